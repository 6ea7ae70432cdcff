// e4m3 to bf16 by integer arithmetic: a bf16 holds every e4m3 value.
#pragma once
#include "ptx/packed.cuh"
#include "ptx/convert.cuh"
#include "ptx/memory.cuh"
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

// The scales of a key, in the hands of the four lanes that have it, as factors of what `spread` gives. 2^120 * scale may leave
// bf16's range: then, which no real cache asks for, all keys of the warp are multiplied by the two separately (kWide). Products
// are exact where the result is no bf16 subnormal (ue8m0), or rounded once (fp32). The scales of what is no key are 0, which
// makes zeros of any bytes.
template <class Record>
struct Scales;

template <>
struct Scales<V4Record> {
    static_assert(V4Record::kScaleGroup == kTileDims);
    uint2 bytes;

    __device__ __forceinline__ void load(uint32_t from, int) { bytes = ptx::ld_shared_v2(from); }
    // Whether some e > 127 + 7. (The last byte is none.)
    __device__ __forceinline__ bool is_wide() const {
        const auto above = [](uint32_t x) { return ((x & 0x7f7f7f7fu) + 0x79797979u) & x & 0x80808080u; };
        return (above(bytes.x) | above(bytes.y & 0x00ffffffu)) != 0;
    }
    template <bool kWide> __device__ __forceinline__ void prepare() {}
    // For a tile, twice in a pair: 2^(e - 127), which bf16 has for e = 0 only as a subnormal; or 2^120 times that.
    template <bool kWide>
    __device__ __forceinline__ uint32_t of_tile(int tile, bool valid) const {
        const uint32_t e = (tile < 4 ? bytes.x : bytes.y) >> (8 * (tile % 4)) & 0xffu;
        return (kWide ? max(e << 7, 0x40u) : (e + 120) << 7) * (valid ? 0x10001u : 0u);
    }
    template <bool kWide>
    __device__ __forceinline__ static uint32_t apply(uint32_t factor, uint32_t x) {
        return ptx::mul_bf16x2(kWide ? ptx::mul_bf16x2(x, kSpread) : x, factor);
    }
};

template <>
struct Scales<V32Record> {
    uint32_t scale;   // number lane % 4, fp32

    __device__ __forceinline__ void load(uint32_t from, int lane) { scale = ptx::ld_shared_u32(from + 4 * (lane % 4)); }
    // Whether it is not below 2^7 in magnitude.
    __device__ __forceinline__ bool is_wide() const { return (scale & 0x7fffffffu) >= (127u + 7) << 23; }
    // An fp32 scale is a bf16 and what that leaves, another bf16: upper and lower half.
    template <bool kWide>
    __device__ __forceinline__ void prepare() {
        const float factor = __uint_as_float(scale) * (kWide ? 1.f : 0x1p120f);
        const uint32_t upper = __float_as_uint(factor) & 0xffff0000u;
        scale = upper | (ptx::cvt_bf16x2_f32(factor - __uint_as_float(upper), 0.f) & 0xffffu);
    }
    template <bool kWide>
    __device__ __forceinline__ uint32_t of_tile(int tile, bool) const {
        return __shfl_sync(0xffffffffu, scale, tile * kTileDims / V32Record::kScaleGroup, 4);
    }
    template <bool kWide>
    __device__ __forceinline__ static uint32_t apply(uint32_t factor, uint32_t x) {
        if (kWide) x = ptx::mul_bf16x2(x, kSpread);
        return ptx::fma_bf16x2(x, __byte_perm(factor, 0, 0x3232), ptx::mul_bf16x2(x, __byte_perm(factor, 0, 0x1010)));
    }
};

}  // namespace flash_mla::sm90::head64
