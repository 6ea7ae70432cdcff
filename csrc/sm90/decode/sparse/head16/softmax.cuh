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

// Reads and sums the dim parts of the scores of one block, in B fragment layout: for head 8 n + g the keys
// 16 ks + {2t, 2t+1, 2t+8, 2t+9}.
template <class C>
using ScoreFragment = float[C::kHeadGroups][C::kKeyGroups][4];

template <class C>
__device__ __forceinline__ void read_scores(ScoreFragment<C>& s, const float* score, int live_groups, int lane) {
    const int g = lane / 4, t = lane % 4;
#pragma unroll
    for (int ks = 0; ks < C::kKeyGroups; ++ks) {
        if (ks >= live_groups) {
#pragma unroll
            for (int n = 0; n < C::kHeadGroups; ++n) s[n][ks][0] = s[n][ks][1] = s[n][ks][2] = s[n][ks][3] = -INFINITY;
            continue;
        }
#pragma unroll
        for (int n = 0; n < C::kHeadGroups; ++n) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const float* at = score + (8 * n + g) * C::kScoreStride + kKeysPerGroup * ks + 8 * half + 2 * t;
                float2 sum = *reinterpret_cast<const float2*>(at);
#pragma unroll
                for (int part = 1; part < kDimParts; ++part) {
                    const float2 x = *reinterpret_cast<const float2*>(at + part * C::kHeads * C::kScoreStride);
                    sum.x += x.x, sum.y += x.y;
                }
                s[n][ks][2 * half] = sum.x, s[n][ks][2 * half + 1] = sum.y;
            }
        }
    }
}

// Adds `values` of the fragment's keys, or multiplies by them.
template <class C, class Op>
__device__ __forceinline__ void apply_per_key(ScoreFragment<C>& s, const float* values, int live_groups, int lane, Op op) {
    const int t = lane % 4;
#pragma unroll
    for (int ks = 0; ks < C::kKeyGroups; ++ks) {
        if (ks >= live_groups) continue;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float2 x = *reinterpret_cast<const float2*>(values + kKeysPerGroup * ks + 8 * half + 2 * t);
#pragma unroll
            for (int n = 0; n < C::kHeadGroups; ++n) {
                s[n][ks][2 * half] = op(s[n][ks][2 * half], x.x);
                s[n][ks][2 * half + 1] = op(s[n][ks][2 * half + 1], x.y);
            }
        }
    }
}

template <class C>
__device__ __forceinline__ float row_max(const float (&s)[C::kKeyGroups][4]) {
    float m = -INFINITY;
#pragma unroll
    for (int ks = 0; ks < C::kKeyGroups; ++ks) {
#pragma unroll
        for (int i = 0; i < 4; ++i) m = fmaxf(m, s[ks][i]);
    }
    m = fmaxf(m, __shfl_xor_sync(0xffffffffu, m, 1));
    return fmaxf(m, __shfl_xor_sync(0xffffffffu, m, 2));
}

// The softmax sum of head 8 n + g over the keys seen so far: sum * 2^reference. A finite start in place of -inf
// spares every (-inf) - (-inf): a row without valid keys keeps sum = 0.
template <class C>
struct RowSum {
    float reference[C::kHeadGroups], sum[C::kHeadGroups];

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int n = 0; n < C::kHeadGroups; ++n) reference[n] = -FLT_MAX, sum[n] = 0.f;
    }

    // `sum` is this lane's share until `finish`.
    __device__ __forceinline__ void add(const ScoreFragment<C>& s, int live_groups) {
#pragma unroll
        for (int n = 0; n < C::kHeadGroups; ++n) {
            const float m = row_max<C>(s[n]);
            if (m > reference[n] + kSlack) {
                sum[n] *= ptx::ex2(reference[n] - m);
                reference[n] = m;
            }
#pragma unroll
            for (int ks = 0; ks < C::kKeyGroups; ++ks) {
                if (ks >= live_groups) continue;
#pragma unroll
                for (int i = 0; i < 4; ++i) sum[n] += ptx::ex2(s[n][ks][i] - reference[n]);
            }
        }
    }

    __device__ __forceinline__ void finish() {
#pragma unroll
        for (int n = 0; n < C::kHeadGroups; ++n) {
            sum[n] += __shfl_xor_sync(0xffffffffu, sum[n], 1);
            sum[n] += __shfl_xor_sync(0xffffffffu, sum[n], 2);
        }
    }
};

}  // namespace flash_mla::sm90::head16
