// Conversions between the 8-, 16- and 32-bit floating-point types of the kernels.
#pragma once
#include <cstdint>

namespace flash_mla::ptx {

// Four e4m3 values to four f16 values, exactly (every e4m3 value, subnormals and NaN included, exists in f16).
__device__ __forceinline__ void cvt_f16x4_e4m3x4(uint32_t& lo, uint32_t& hi, uint32_t e4m3x4) {
    asm("{ .reg .b16 a, b; mov.b32 {a, b}, %2; cvt.rn.f16x2.e4m3x2 %0, a; cvt.rn.f16x2.e4m3x2 %1, b; }"
        : "=r"(lo), "=r"(hi)
        : "r"(e4m3x4));
}

__device__ __forceinline__ uint32_t cvt_f16x2_f32(float lo, float hi) {
    uint32_t r;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
    return r;
}

__device__ __forceinline__ uint32_t cvt_bf16x2_f32(float lo, float hi) {
    uint32_t r;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
    return r;
}

// A pair of f16 to a pair of bf16: exact for values of 8 significant bits, e4m3's among them.
__device__ __forceinline__ uint32_t cvt_bf16x2_f16x2(uint32_t f16x2) {
    float lo, hi;
    asm("{ .reg .f16 a, b; mov.b32 {a, b}, %2; cvt.f32.f16 %0, a; cvt.f32.f16 %1, b; }" : "=f"(lo), "=f"(hi) : "r"(f16x2));
    return cvt_bf16x2_f32(lo, hi);
}

// The two halves of a bf16 pair as fp32: a bf16 is the upper half of the fp32 with the same value.
__device__ __forceinline__ float f32_of_bf16_lo(uint32_t pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float f32_of_bf16_hi(uint32_t pair) { return __uint_as_float(pair & 0xffff0000u); }

// 2^x; a result below 2^-126 is 0.
__device__ __forceinline__ float ex2_ftz(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// 2^x, subnormal results included: two more instructions.
__device__ __forceinline__ float ex2(float x) {
    float y;
    asm("ex2.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ float lg2(float x) {
    float y;
    asm("lg2.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

}  // namespace flash_mla::ptx
