// Warps and warpgroups: one lane for all, registers that change hands, and barriers of a part of the CTA.
#pragma once
#include <cstdint>

namespace flash_mla::ptx {

// Every warp of a warpgroup, in the one branch that is its role. A multiple of 8.
template <int kRegisters>
__device__ __forceinline__ void setmaxnreg_inc() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void setmaxnreg_dec() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// The same value, for the compiler too, in all lanes. Behind a branch on one that it does not know to be, it computes no addresses and
// descriptors in uniform registers.
__device__ __forceinline__ uint32_t uniform(uint32_t x) { return __shfl_sync(0xffffffffu, x, 0); }

// True in one lane of the warp, which has to be whole.
__device__ __forceinline__ bool elect_one() {
    uint32_t elected;
    asm volatile("{.reg .pred p;\n elect.sync _|p, 0xffffffff;\n selp.u32 %0, 1, 0, p;}" : "=r"(elected));
    return elected;
}

// Barrier number `id` (0 is __syncthreads's) of `threads` threads.
__device__ __forceinline__ void barrier_sync(int id, int threads) {
    asm volatile("barrier.cta.sync.aligned %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// The same, and whether any of the threads says so.
__device__ __forceinline__ bool barrier_any(int id, int threads, bool x) {
    uint32_t any;
    asm volatile(
        "{\n"
        ".reg .pred in, out;\n"
        "setp.ne.u32 in, %3, 0;\n"
        "barrier.cta.red.or.pred.aligned out, %1, %2, in;\n"
        "selp.u32 %0, 1, 0, out;\n"
        "}"
        : "=r"(any)
        : "r"(id), "r"(threads), "r"(static_cast<uint32_t>(x))
        : "memory");
    return uniform(any) != 0;
}

}  // namespace flash_mla::ptx
