// Scores to the weights of V: an online softmax whose reference moves only when it must. Which warp computes which weights, there
// are two ways: own_softmax.cuh and shared_softmax.cuh.
#pragma once
#include <cfloat>

#include "ptx/convert.cuh"
#include "ptx/quad.cuh"
#include "sm90/decode/sparse/cluster_merge.cuh"
#include "sm90/decode/sparse/head16/roles.cuh"
#include "sm90/decode/sparse/head16/scores.cuh"
#include "sm90/decode/sparse/head16/values.cuh"

namespace flash_mla::sm90::head16 {

// A weight is 2^(score + scale exponent - reference + bias). The reference is set to the largest exponent of a block when
// that exceeds it by more than kSlack, so accumulators are rarely rescaled.
//
// For e4m3, weights are f16 and stay at or below 2^14 (2^15 with a mantissa). f16 then keeps full precision down to 2^-28
// of the largest weight and reaches 2^-38 of it; the e4m3 values that they multiply span 2^18. For RoPE, weights are bf16
// and small, as the values may be anything that bf16 holds and their sum must stay finite.
inline constexpr float kBias = 6.f, kRopeBias = -16.f;
inline constexpr float kSlack = 8.f;

// 2^exponent for a whole number, at compile time.
constexpr float power_of_two(float exponent) {
    float r = 1.f;
    for (; exponent > 0.f; exponent -= 1.f) r *= 2.f;
    for (; exponent < 0.f; exponent += 1.f) r *= 0.5f;
    return r;
}

// Scores of one block in the layout of B fragments: for head g + 8 n the columns 16 ks + {2t, 2t+1, 2t+8, 2t+9}.
template <class C>
using ScoreFragment = float[C::kKeyGroups][4];
template <class C>
using ScoreFragments = ScoreFragment<C>[C::kHeadGroups];

// Sums the dim parts. `at`: head g, columns 2t and 2t + 1, of part 0.
template <class C>
__device__ __forceinline__ void read_scores(ScoreFragments<C>& s, uint32_t at) {
#pragma unroll
    for (int n = 0; n < C::kHeadGroups; ++n) {
#pragma unroll
        for (int ks = 0; ks < C::kKeyGroups; ++ks) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const uint32_t pair = at + 4 * (8 * n * C::kScoreStride + kKeysPerGroup * ks + 8 * half);
                float2 sum = ptx::ld_shared_f32x2(pair);
#pragma unroll
                for (int part = 1; part < C::kDimParts; ++part) {
                    const float2 x = ptx::ld_shared_f32x2(pair + 4 * part * C::kHeads * C::kScoreStride);
                    sum.x += x.x, sum.y += x.y;
                }
                s[n][ks][2 * half] = sum.x, s[n][ks][2 * half + 1] = sum.y;
            }
        }
    }
}

// Combines every score with its key's entry of an array; `at`: that of column 2t.
template <class C, class Op>
__device__ __forceinline__ void apply_per_key(ScoreFragments<C>& s, uint32_t at, Op op) {
#pragma unroll
    for (int ks = 0; ks < C::kKeyGroups; ++ks) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float2 x = ptx::ld_shared_f32x2(at + 4 * (kKeysPerGroup * ks + 8 * half));
#pragma unroll
            for (int n = 0; n < C::kHeadGroups; ++n) {
                s[n][ks][2 * half] = op(s[n][ks][2 * half], x.x), s[n][ks][2 * half + 1] = op(s[n][ks][2 * half + 1], x.y);
            }
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

}  // namespace flash_mla::sm90::head16
