// Arithmetic on pairs of f16, subnormals included.
#pragma once
#include <cstdint>

namespace flash_mla::ptx {

__device__ __forceinline__ uint32_t mul_f16x2(uint32_t a, uint32_t b) {
    uint32_t r;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    return r;
}

}  // namespace flash_mla::ptx
