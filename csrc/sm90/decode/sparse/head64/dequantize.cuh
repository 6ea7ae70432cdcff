// e4m3 to bf16 by integer arithmetic: a bf16 holds every e4m3 value.
#pragma once
#include "ptx/bf16x2.cuh"
#include "ptx/convert.cuh"
#include "sm90/decode/sparse/head64/config.h"

namespace flash_mla::sm90::head64 {

// Four e4m3 (s eeee mmm) as two pairs of bf16 (s 0000eeee mmm0000): the value times 2^-120, subnormals included, since
// both formats go down to zero in the same way. NaN (s 1111 111) becomes 480; see has_nan.
__device__ __forceinline__ void spread(uint32_t e4m3x4, uint32_t& lo, uint32_t& hi) {
    const uint32_t upper = (e4m3x4 & 0x80808080u) | ((e4m3x4 >> 4) & 0x07070707u), lower = (e4m3x4 << 4) & 0xf0f0f0f0u;
    lo = __byte_perm(lower, upper, 0x5140);
    hi = __byte_perm(lower, upper, 0x7362);
}
inline constexpr uint32_t kSpread = 0x7b807b80u;   // 2^120, twice

// Sets bit 7 of some byte of `found` if one of the four is NaN.
__device__ __forceinline__ uint32_t has_nan(uint32_t e4m3x4) { return (e4m3x4 & 0x7f7f7f7fu) + 0x01010101u; }

// What a value is multiplied by, twice in a pair. 2^120 comes separately, as 2^120 * scale may leave bf16's range; both
// products are exact where the result is no bf16 subnormal (ue8m0), or rounded once (fp32).
struct PowerOfTwo {
    uint32_t scale;
    __device__ __forceinline__ uint32_t apply(uint32_t x) const { return ptx::mul_bf16x2(ptx::mul_bf16x2(x, kSpread), scale); }
};
// An fp32 scale is a bf16 and what that leaves, another bf16.
struct TwoTerms {
    uint32_t scale, rest;
    __device__ __forceinline__ uint32_t apply(uint32_t x) const {
        const uint32_t v = ptx::mul_bf16x2(x, kSpread);
        return ptx::fma_bf16x2(v, scale, ptx::mul_bf16x2(v, rest));
    }
};

// The scales of a key, in the hands of the four lanes that have it. Those of what is no key are 0, which makes zeros of
// any bytes.
template <class Record>
struct Scales;

template <>
struct Scales<V4Record> {
    uint2 bytes;

    __device__ __forceinline__ void load(const uint8_t* row, uint32_t scales_from_row, bool valid, int) {
        bytes = ptx::ld_global_v2_or_zero(row + scales_from_row, valid);
    }
    __device__ __forceinline__ void prepare() {}
    // 2^(e - 127); bf16 has that for e = 0 only as a subnormal.
    __device__ __forceinline__ PowerOfTwo of_tile(int tile, bool valid) const {
        const uint32_t twice = valid ? 0x10001u : 0u;
        const uint32_t e = (tile < 4 ? bytes.x : bytes.y) >> (8 * (tile % 4)) & 0xffu;
        return {max(e << 7, 0x40u) * twice};
    }
};

template <>
struct Scales<V32Record> {
    uint32_t terms;   // of the scale number lane % 4: its upper half, and the rest as bf16

    __device__ __forceinline__ void load(const uint8_t* row, uint32_t scales_from_row, bool valid, int lane) {
        terms = ptx::ld_global_u32_or(row + scales_from_row + 4 * (lane % 4), valid, 0);
    }
    // Not while loading: that would wait for the load.
    __device__ __forceinline__ void prepare() {
        const uint32_t upper = terms & 0xffff0000u;
        terms = upper | (ptx::cvt_bf16x2_f32(__uint_as_float(terms) - __uint_as_float(upper), 0.f) & 0xffffu);
    }
    __device__ __forceinline__ TwoTerms of_tile(int tile, bool) const {
        const uint32_t t = __shfl_sync(0xffffffffu, terms, tile / 2, 4);
        return {__byte_perm(t, 0, 0x3232), __byte_perm(t, 0, 0x1010)};
    }
};

}  // namespace flash_mla::sm90::head64
