// Matrix products of a warpgroup, named as in the PTX manual ("Asynchronous warpgroup level matrix instructions").
//
// They run asynchronously: registers of D and of A may be touched again only behind wgmma_wait, and what they read from
// shared memory must have been made visible to the async proxy (fence_proxy_async by whoever wrote it).
#pragma once
#include <cstdint>

namespace flash_mla::ptx {

// Registers (D, A) and shared memory written before are visible to the products after. By all warps of the warpgroup.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Until at most kPending of the committed groups, the latest, are still running.
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Keeps the compiler from moving accesses of these registers across this point, past a wgmma_wait, say.
template <int kCount>
__device__ __forceinline__ void pin(float (&r)[kCount]) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(r[i])::"memory");
}
template <int kCount>
__device__ __forceinline__ void pin(uint32_t (&r)[kCount]) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) asm volatile("" : "+r"(r[i])::"memory");
}

// A matrix in shared memory with the 128-byte swizzle: 64 elements of 16 bits make a row of 128 bytes, 8 rows an atom of
// 1024 bytes (aligned to that), and 16-byte chunk c of row r lies at place c ^ (r % 8) of the row. Offsets are in units of
// 16 bytes. What a descriptor's two strides mean depends on which way the matrix is read:
//   along rows (K-major; rows are M or N):        stride = from 8 rows to the next 8; leading is not used, as the 16
//       elements of K of one instruction lie within a row. The next 16 are 32 bytes further.
//   across rows (MN-major, "transposed"; rows are K): stride = from 8 rows (of K) to the next 8; leading = from 64
//       elements (of M or N) to the next 64.
//
// Only the lower half of a descriptor varies here; the upper one says 1024 bytes of stride and the 128-byte swizzle.
struct Swizzled128 {
    uint32_t lower;
    __device__ __forceinline__ explicit Swizzled128(uint32_t address, uint32_t leading_bytes = 16)
        : lower((address & 0x3ffffu) >> 4 | (leading_bytes >> 4) << 16) {}
    // What lies `bytes` behind.
    __device__ __forceinline__ Swizzled128 operator+(uint32_t bytes) const {
        Swizzled128 r = *this;
        r.lower += bytes >> 4;
        return r;
    }
};
#define FLASH_MLA_DESCRIPTOR(name, lower) ".reg .b64 " name ";\n mov.b64 " name ", {" lower ", 0x40000040};\n"

// D fragments: thread 32 w + 4 g + t of the warpgroup holds, of rows 16 w + g and 16 w + g + 8, columns 8 n + 2 t and
// + 1: d[4 n], d[4 n + 1] and d[4 n + 2], d[4 n + 3]. A fragments from registers: as of mma.m16n8k16.

// d[64 x 64] = or += a[64 x 16] * b[64 x 16]^T; bf16, both K-major in shared memory.
template <bool kAccumulate>
__device__ __forceinline__ void wgmma_m64n64k16_ss(float (&d)[32], Swizzled128 a, Swizzled128 b) {
    asm volatile(
        "{.reg .pred accumulate;\n setp.ne.b32 accumulate, %34, 0;\n"
        FLASH_MLA_DESCRIPTOR("a", "%32") FLASH_MLA_DESCRIPTOR("b", "%33")
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
        "a, b, accumulate, 1, 1, 0, 0;}"
        :
          "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
          "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
          "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
          "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
        : "r"(a.lower), "r"(b.lower), "n"(kAccumulate ? 1 : 0));
}

// d[64 x 128] = (or, if `accumulate`, which the warpgroup agrees on, +=) a[64 x 16] * b[16 x 128]; bf16, a in registers, b MN-major
// in shared memory.
__device__ __forceinline__ void wgmma_m64n128k16_rs(float (&d)[64], const uint32_t* a, Swizzled128 b, bool accumulate) {
    asm volatile(
        "{.reg .pred accumulate;\n setp.ne.b32 accumulate, %69, 0;\n"
        FLASH_MLA_DESCRIPTOR("b", "%68")
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
        "{%64, %65, %66, %67}, b, accumulate, 1, 1, 1;}"
        :
          "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
          "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
          "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
          "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]),
          "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]),
          "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]),
          "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]),
          "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b.lower), "r"(static_cast<uint32_t>(accumulate)));
}

#undef FLASH_MLA_DESCRIPTOR

}  // namespace flash_mla::ptx
