// Each warp weighs all keys for its own dims of V, from the scores: one barrier less than with shared weights, but as many
// exponentials of a score as there are warps. For blocks of 32 keys, where all warps compute scores and values.
#pragma once
#include "sm90/decode/sparse/head16/softmax.cuh"

namespace flash_mla::sm90::head16 {

// The softmax sum of a head over the keys that a warp has seen, as sum * 2^reference. Rows without a key keep sum = 0.
//
// V4's RoPE dims have no scale, so a warp that accumulates those has the softmax's own terms at hand and adds them up
// (OwnSoftmax::weigh). For V3.2 a warp computes them besides its weights: this.
template <class C>
struct SumBesides {
    float reference[C::kHeadGroups], sum[C::kHeadGroups];   // of head g + 8 n; the lanes of a quad have a share each

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int n = 0; n < C::kHeadGroups; ++n) reference[n] = -FLT_MAX, sum[n] = 0.f;
    }
    __device__ __forceinline__ void add(const ScoreFragments<C>& s) {
#pragma unroll
        for (int n = 0; n < C::kHeadGroups; ++n) {
            const float m = lane_max<C>(s[n]);
            if (__any_sync(0xffffffffu, m > reference[n] + kSlack)) {
                const float row_max = ptx::quad_max(m), moved = row_max > reference[n] + kSlack ? row_max : reference[n];
                sum[n] *= ptx::ex2_ftz(reference[n] - moved);
                reference[n] = moved;
            }
#pragma unroll
            for (int ks = 0; ks < C::kKeyGroups; ++ks) {
#pragma unroll
                for (int i = 0; i < 4; ++i) sum[n] += ptx::ex2_ftz(s[n][ks][i] - reference[n]);
            }
        }
    }
};

// V's scale rides in P: the reference is the warp's own, the largest score + scale exponent that it has seen.
template <class C>
struct OwnReference {
    float reference[C::kHeadGroups];               // of head 8 n + g
    float sum[C::kHeadGroups];                     // of the weights; the lanes of a quad have a share each

    // A finite start in place of -inf spares every (-inf) - (-inf).
    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int n = 0; n < C::kHeadGroups; ++n) reference[n] = -FLT_MAX, sum[n] = 0.f;
    }

    // Scores plus scale exponents to weights, in place. If the reference moves, what has been accumulated is rescaled,
    // unless this is the first block.
    __device__ __forceinline__ void weigh(ScoreFragments<C>& s, Accumulator<C>& acc, float bias, bool first, bool keep_sum, int lane) {
        float m[C::kHeadGroups];
        bool moves = false;
#pragma unroll
        for (int n = 0; n < C::kHeadGroups; ++n) m[n] = lane_max<C>(s[n]), moves |= m[n] > reference[n] + kSlack;
        if (__any_sync(0xffffffffu, moves)) {
#pragma unroll
            for (int n = 0; n < C::kHeadGroups; ++n) {
                // Row by row: what becomes of a row must not depend on the others.
                const float row_max = ptx::quad_max(m[n]), moved = row_max > reference[n] + kSlack ? row_max : reference[n];
                const float factor = ptx::ex2_ftz(reference[n] - moved);
                reference[n] = moved;
                sum[n] *= factor;
                if (first) continue;
                const int t = lane % 4;   // heads 2t and 2t + 1 are rows 8t and 8t + 4
                const float f0 = __shfl_sync(0xffffffffu, factor, 8 * t), f1 = __shfl_sync(0xffffffffu, factor, 8 * t + 4);
                acc.rescale(n, f0, f1);
            }
        }
#pragma unroll
        for (int n = 0; n < C::kHeadGroups; ++n) {
            const float shift = bias - reference[n];
#pragma unroll
            for (int ks = 0; ks < C::kKeyGroups; ++ks) {
#pragma unroll
                for (int i = 0; i < 4; ++i) s[n][ks][i] = ptx::ex2_ftz(s[n][ks][i] + shift);
            }
        }
        if (keep_sum) {
#pragma unroll
            for (int n = 0; n < C::kHeadGroups; ++n) {
#pragma unroll
                for (int ks = 0; ks < C::kKeyGroups; ++ks) sum[n] += (s[n][ks][0] + s[n][ks][1]) + (s[n][ks][2] + s[n][ks][3]);
            }
        }
    }
};

template <class C>
__device__ __forceinline__ void pack_weights(WeightFragments<C>& w, const ScoreFragments<C>& s, bool as_bf16) {
#pragma unroll
    for (int ks = 0; ks < C::kKeyGroups; ++ks) {
#pragma unroll
        for (int n = 0; n < C::kHeadGroups; ++n) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const float lo = s[n][ks][2 * half], hi = s[n][ks][2 * half + 1];
                w[ks][n][half] = as_bf16 ? ptx::cvt_bf16x2_f32(lo, hi) : ptx::cvt_f16x2_f32(lo, hi);
            }
        }
    }
}

template <class C>
struct OwnSoftmax {
    OwnReference<C> own;
    SumBesides<C> sum_besides;

    __device__ __forceinline__ void clear() { own.clear(), sum_besides.clear(); }
    __device__ __forceinline__ void weigh(WeightFragments<C>& w, Accumulator<C>& acc, const ValueAddresses<C>& at, ScoreBuffer buffer,
                                          const WarpRole<C>& role, bool first, int lane) {
        ScoreFragments<C> s;
        read_scores<C>(s, at.score + buffer.score);
        if (!C::Record::kRopeInV && role.keeps_sum) sum_besides.add(s);
        apply_per_key<C>(s, at.exponent + buffer.scale, [](float x, float e) { return x + e; });
        own.weigh(s, acc, role.value_is_rope ? kRopeBias : kBias, first, C::Record::kRopeInV && role.keeps_sum, lane);
        if constexpr (C::kHasMantissa) {
            apply_per_key<C>(s, at.exponent + buffer.scale + C::kScaleArrayBytes, [](float x, float mantissa) { return x * mantissa; });
        }
        pack_weights<C>(w, s, role.value_is_rope);
    }

    // By the warp that keeps the sums: {reference, sum} of every head, for sum * 2^reference, to the CTA, seen after its next
    // barrier, and the log-sum-exps to every CTA of the cluster.
    __device__ __forceinline__ void publish(uint32_t shared, SplitsOfTile splits, const WarpRole<C>& role, int lane) const {
        if (!role.keeps_sum) return;
#pragma unroll
        for (int n = 0; n < C::kHeadGroups; ++n) {
            const float reference = C::Record::kRopeInV ? own.reference[n] : sum_besides.reference[n];
            const float sum = ptx::quad_sum(C::Record::kRopeInV ? own.sum[n] * power_of_two(-kRopeBias) : sum_besides.sum[n]);
            const float lse = sum == 0.f ? -INFINITY : reference + ptx::lg2(sum);
            const int head = 8 * n + lane / 4;
            if (lane % 4 == 0) ptx::st_shared_f32x2(shared + C::kOwnStatsOffset + 8 * head, {reference, sum});
            send_lse<C>(lse, head, shared, splits, lane % 4, 4);
        }
    }
};

}  // namespace flash_mla::sm90::head16
