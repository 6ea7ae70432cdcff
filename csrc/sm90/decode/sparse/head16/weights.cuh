// Weights of V on their way into matrix products, and V's scales, which ride in them.
//
// A score warp writes a block's weights, those of its own heads, as B fragments (softmax.cuh). A value warp multiplies them by the
// scales of its own dims of V, as factors that it has worked out while it waited for the weights.
#pragma once
#include <type_traits>

#include "ptx/convert.cuh"
#include "ptx/memory.cuh"
#include "ptx/packed.cuh"
#include "sm90/decode/sparse/head16/ring.cuh"
#include "sm90/decode/sparse/head16/roles.cuh"
#include "sm90/decode/sparse/head16/values.cuh"

namespace flash_mla::sm90::head16 {

// A weight is 2^(score - reference + bias), in f16 and in bf16. For e4m3, those in f16 are mostly good: they stay at or below 2^14 (2^15 times a
// mantissa), and f16 then keeps full precision down to 2^-28 of the largest weight and reaches 2^-38 of it; the e4m3 values that they multiply
// span 2^18. Those in bf16, for RoPE, are small, as the values may be anything that bf16 holds and their sum must stay finite.
inline constexpr int kBias = 6, kBf16Bias = -16;

// 2^exponent, at compile time.
constexpr float power_of_two(int exponent) {
    float r = 1.f;
    for (; exponent > 0; --exponent) r *= 2.f;
    for (; exponent < 0; ++exponent) r *= 0.5f;
    return r;
}
// As an f16 or a bf16, twice.
constexpr uint32_t f16x2_power_of_two(int exponent) { return ((15 + exponent) << 10) * 0x10001u; }
constexpr uint32_t bf16x2_power_of_two(int exponent) { return ((127 + exponent) << 7) * 0x10001u; }

// Where column c of 32 lies among B fragments of two k steps: lane (g, t) reads 16 bytes, of columns 2t, 2t + 1, 2t + 8,
// 2t + 9 of either step. Column g of a fragment is a head, or has the same factors as the others.
__device__ __forceinline__ uint32_t fragment_place(uint32_t column) {
    return column % 8 / 2 * 16 + column / 16 * 8 + column / 8 % 2 * 4 + column % 2 * 2;
}

// What the score warps and the value warps share of a block.
template <class C>
__device__ __forceinline__ uint32_t weight_place(uint32_t shared, Stage stage) {
    return shared + C::kWeightOffset + stage.barrier / 8 * C::kWeightPlaceBytes;
}

// A key's scale becomes a factor of its weights: scale / 2^exponent, in units of which power of two a value warp accumulates. At first exponents are
// expected within kScaleRoom of that of the warp's first key; whatever is outside widens the range, whose upper end is the units'. If its ends come to
// be further apart than kScaleSpread, f16 is too narrow: small weights may meet large scales and count, and so may large weights and small scales. From
// then on the warp's weights are bf16, and so are its values. (So they are with a little less than that between the scales that there are.) Keys
// whose scale is less than 2^-148 of a unit count nothing (V3.2: 2^-155). Subnormal fp32 scales all pass for 2^-127.
inline constexpr int kScaleSpread = 8, kScaleRoom = 2;
inline constexpr int kLeastExponent = -127, kLargestExponent = 128;

// 2^exponent up to 2^127; 0 below 2^-126.
__device__ __forceinline__ float exp2_of_int(int exponent) { return __int_as_float(max(exponent + 127, 0) << 23); }

// ue8m0, V4: a biased exponent and nothing else.
struct ExponentScale {
    static constexpr int kBytes = 1;
    int exponent;
    bool counts = true;   // if it is a key's

    __device__ __forceinline__ explicit ExponentScale(uint32_t at) : exponent(static_cast<int>(ptx::ld_shared_u8(at)) - 127) {}
    __device__ __forceinline__ float times_two_to(int power) const { return exp2_of_int(exponent + power); }
};
// fp32, V3.2. What is no key has a scale of 0.
struct FloatScale {
    static constexpr int kBytes = 4;
    float scale;
    int exponent;   // of subnormals -127, of an infinity or NaN, which go on as they are, 0
    bool counts;

    __device__ __forceinline__ explicit FloatScale(uint32_t at) : scale(ptx::ld_shared_f32(at)) {
        const int biased = __float_as_uint(scale) >> 23 & 0xff;
        exponent = biased == 255 ? 0 : biased - 127, counts = scale != 0.f;
    }
    // In two steps, of which the second is mostly 1: one alone may leave fp32's range. (2^-127 is subnormal.)
    __device__ __forceinline__ float times_two_to(int power) const {
        const int first = min(power, 127);
        return scale * (first == -127 ? 0x1p-127f : exp2_of_int(first)) * exp2_of_int(power - first);
    }
};

// Of a value warp's own dims of e4m3, which have one scale per key: RoPE has none.
template <class C>
struct ValueScales {
    using Scale = std::conditional_t<C::kHasMantissa, FloatScale, ExponentScale>;
    int exponent = 0, width = 0;   // the upper end of the range of exponents, of which the units are; how many it has

    // When the first block's keys have come. What is no key looks like the least exponent, and leaves the range to the first one that is.
    __device__ __forceinline__ void begin(uint32_t shared, const WarpRole<C>& role) {
        const int first = Scale(shared + C::kRingOffset + C::kScaleInRow + role.value_scale_row * Scale::kBytes).exponent;
        exponent = first == kLeastExponent ? first : min(first + kScaleRoom, 127);
        width = first == kLeastExponent ? 0 : exponent - (first - kScaleRoom) + 1;
    }
    // Whether weights and values are bf16.
    __device__ __forceinline__ bool are_spread() const { return width > kScaleSpread + 1; }

    // Where the factors of a block lie, of this warp alone: as B fragments, of which every column has the same.
    __device__ __forceinline__ static uint32_t factor_place(uint32_t shared, const WarpRole<C>& role) {
        return shared + C::kFactorOffset + role.value_warp * (C::kKeys * 2);
    }
    // Works out the factors of a block whose keys have come, in f16 or bf16, in the same units, though weights in bf16 are less. Mostly all scales that
    // count are in the range; else it grows, and what has been accumulated changes units.
    // A lane has columns 2l and 2l + 1, whose rows are four apart (see row_of_column); of 32 keys the upper lanes have the same as the lower ones.
    __device__ __forceinline__ void prepare_factors(Accumulator<C>& acc, uint32_t shared, Stage stage, const WarpRole<C>& role, int lane) {
        const uint32_t column = 2u * lane % C::kKeys;
        const uint32_t at = shared + C::kRingOffset + stage.rows + row_of_column(column) * C::kRowPitch + C::kScaleInRow + role.value_scale_row * Scale::kBytes;
        Scale scale[2] = {Scale(at), Scale(at + 4 * C::kRowPitch)};
        if constexpr (!C::kHasMantissa) {
            const float2 mask = ptx::ld_shared_f32x2(shared + C::kMaskOffset + stage.mask<C>() + 4 * column);
            scale[0].counts = mask.x == 0.f, scale[1].counts = mask.y == 0.f;
        }
        const auto fits = [&](int i) { return !scale[i].counts || static_cast<uint32_t>(exponent - scale[i].exponent) < static_cast<uint32_t>(width); };
        if (!__all_sync(0xffffffffu, fits(0) && fits(1))) {
            const int previous = exponent;
            int largest = exponent, least = width == 0 ? kLargestExponent : exponent - width + 1;
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                if (scale[i].counts) largest = max(largest, scale[i].exponent), least = min(least, scale[i].exponent);
            }
            exponent = __reduce_max_sync(0xffffffffu, largest), width = exponent - __reduce_min_sync(0xffffffffu, least) + 1;
            acc.rescale(ptx::ex2(static_cast<float>(previous - exponent)));
        }
        const int power = (are_spread() ? kBias - kBf16Bias : 0) - exponent;
        const float first = scale[0].times_two_to(power), second = scale[1].times_two_to(power);
        const uint32_t pair = are_spread() ? ptx::cvt_bf16x2_f32(first, second) : ptx::cvt_f16x2_f32(first, second);
        __syncwarp();   // all lanes have had the last block's
        ptx::st_shared_u32(factor_place(shared, role) + column / 32 * 64 + fragment_place(column % 32), pair);
        __syncwarp();
    }
};

// By a value warp: the block's weights, times the factors of its own dims.
template <class C>
__device__ __forceinline__ void take_weights(WeightFragments<C>& w, uint32_t shared, uint32_t place, const ValueScales<C>& scales, const WarpRole<C>& role, uint32_t lane) {
    // Of the zero row every key weighs 2^0 (what is no key has zeros for V), in all columns of its group.
    constexpr uint32_t kOne = f16x2_power_of_two(kBias), kOneAsBf16 = bf16x2_power_of_two(kBf16Bias);
    constexpr int kPairs = C::kKeyGroups / 2;   // of k steps
    const uint32_t factors = scales.factor_place(shared, role) + 16 * (lane % 4);
    const auto take = [&](uint32_t weights, uint32_t zero_row_weight, auto multiply) {
#pragma unroll
        for (int pair = 0; pair < kPairs; ++pair) {
            uint4 f = {};
            if (!role.value_is_rope) f = ptx::ld_shared_v4(factors + 64 * pair);
#pragma unroll
            for (int n = 0; n < C::kColumnGroups; ++n) {
                uint4 x;
                if (n < C::kHeadGroups) x = ptx::ld_shared_v4(weights + 16 * lane + 512 * (kPairs * n + pair));
                else x = make_uint4(zero_row_weight, zero_row_weight, zero_row_weight, zero_row_weight);
                w[2 * pair][n][0] = multiply(x.x, f.x), w[2 * pair][n][1] = multiply(x.y, f.y);
                w[2 * pair + 1][n][0] = multiply(x.z, f.z), w[2 * pair + 1][n][1] = multiply(x.w, f.w);
            }
        }
    };
    if (!role.value_is_rope && !scales.are_spread()) take(place, kOne, [](uint32_t x, uint32_t f) { return ptx::mul_f16x2(x, f); });
    else if (role.value_is_rope) take(place + C::kWeightBytes, kOneAsBf16, [](uint32_t x, uint32_t) { return x; });
    else take(place + C::kWeightBytes, kOneAsBf16, [](uint32_t x, uint32_t f) { return ptx::mul_bf16x2(x, f); });
}

}  // namespace flash_mla::sm90::head16
