// Warpgroups: registers that change hands, and barriers of a part of the CTA.
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

// Barrier number `id` (0 is __syncthreads's) of `threads` threads.
__device__ __forceinline__ void barrier_sync(int id, int threads) {
    asm volatile("barrier.cta.sync.aligned %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

}  // namespace flash_mla::ptx
