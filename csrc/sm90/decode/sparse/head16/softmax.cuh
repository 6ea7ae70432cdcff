// Scores to the weights of V: an online softmax whose reference moves only when it must.
#pragma once
#include <cfloat>

#include "ptx/convert.cuh"
#include "sm90/decode/sparse/head16/scores.cuh"

namespace flash_mla::sm90::head16 {

// A weight is 2^(score + scale exponent - reference + kWeightBias). The reference is set to the largest exponent of
// a block when that exceeds it by more than kSlack, so weights stay at or below 2^14 (2^15 with a mantissa), inside
// f16, and accumulators are rarely rescaled. f16 then keeps full precision down to 2^-20 of the largest weight and
// reaches 2^-38 of it; the e4m3 values that they multiply span 2^18.
inline constexpr float kWeightBias = 6.f;
inline constexpr float kSlack = 8.f;

// Scores of one block and head group in the layout of B fragments: for head g the columns 16 ks + {2t, 2t+1, 2t+8, 2t+9}.
template <class C>
using ScoreFragment = float[C::kKeyGroups][4];

// Sums the dim parts. `at`: head g, columns 2t and 2t + 1, of part 0.
template <class C>
__device__ __forceinline__ void read_scores(ScoreFragment<C>& s, uint32_t at) {
#pragma unroll
    for (int ks = 0; ks < C::kKeyGroups; ++ks) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const uint32_t pair = at + 4 * (kKeysPerGroup * ks + 8 * half);
            float2 sum = ptx::ld_shared_f32x2(pair);
#pragma unroll
            for (int part = 1; part < C::kDimParts; ++part) {
                const float2 x = ptx::ld_shared_f32x2(pair + 4 * part * C::kHeads * C::kScoreStride);
                sum.x += x.x, sum.y += x.y;
            }
            s[ks][2 * half] = sum.x, s[ks][2 * half + 1] = sum.y;
        }
    }
}

// Combines every score with its key's entry of an array; `at`: that of column 2t.
template <class C, class Op>
__device__ __forceinline__ void apply_per_key(ScoreFragment<C>& s, uint32_t at, Op op) {
#pragma unroll
    for (int ks = 0; ks < C::kKeyGroups; ++ks) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float2 x = ptx::ld_shared_f32x2(at + 4 * (kKeysPerGroup * ks + 8 * half));
            s[ks][2 * half] = op(s[ks][2 * half], x.x), s[ks][2 * half + 1] = op(s[ks][2 * half + 1], x.y);
        }
    }
}

// Over the block's keys that this lane holds, and over all of them: the lanes of a quad hold the same heads.
template <class C>
__device__ __forceinline__ float lane_max(const ScoreFragment<C>& s) {
    float m[C::kKeyGroups];   // a tree, not a chain
#pragma unroll
    for (int ks = 0; ks < C::kKeyGroups; ++ks) m[ks] = fmaxf(fmaxf(s[ks][0], s[ks][1]), fmaxf(s[ks][2], s[ks][3]));
#pragma unroll
    for (int step = 1; step < C::kKeyGroups; step *= 2) {
#pragma unroll
        for (int ks = 0; ks + step < C::kKeyGroups; ks += 2 * step) m[ks] = fmaxf(m[ks], m[ks + step]);
    }
    return m[0];
}
__device__ __forceinline__ float quad_max(float m) {
    m = fmaxf(m, __shfl_xor_sync(0xffffffffu, m, 1));
    return fmaxf(m, __shfl_xor_sync(0xffffffffu, m, 2));
}

// The softmax sum of one head over the keys seen so far, as sum * 2^reference. A finite start in place of -inf spares
// every (-inf) - (-inf): a row without valid keys keeps sum = 0.
template <class C>
struct RowSum {
    float reference = -FLT_MAX, sum = 0.f;

    // `sum` is this lane's share until `finish`.
    __device__ __forceinline__ void add(const ScoreFragment<C>& s) {
        float m = lane_max<C>(s);
        if (__any_sync(0xffffffffu, m > reference + kSlack)) {
            m = fmaxf(reference, quad_max(m));
            sum *= ptx::ex2_ftz(reference - m);
            reference = m;
        }
#pragma unroll
        for (int ks = 0; ks < C::kKeyGroups; ++ks) {
            sum += (ptx::ex2_ftz(s[ks][0] - reference) + ptx::ex2_ftz(s[ks][1] - reference)) +
                   (ptx::ex2_ftz(s[ks][2] - reference) + ptx::ex2_ftz(s[ks][3] - reference));
        }
    }

    __device__ __forceinline__ void finish() {
        sum += __shfl_xor_sync(0xffffffffu, sum, 1);
        sum += __shfl_xor_sync(0xffffffffu, sum, 2);
    }
};

}  // namespace flash_mla::sm90::head16
