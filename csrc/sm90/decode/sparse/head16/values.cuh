// P V: each warp accumulates its own dims of V over all keys of the CTA.
#pragma once
#include <cfloat>

#include "ptx/mma.cuh"
#include "sm90/decode/sparse/head16/softmax.cuh"

namespace flash_mla::sm90::head16 {

// Weights as B fragments: [k step][head group][register].
template <class C>
using WeightFragments = uint32_t[C::kKeyGroups][C::kHeadGroups][2];

// The matrix product is out^T[dims x heads] += V^T[dims x keys] * P^T[keys x heads]: 8 heads are a full N. The scale
// of V is constant over the warp's dims for each key, so it rides in P: P's reference is the warp's own, the largest
// score + scale exponent it has seen.
template <class C>
struct Accumulator {
    float out[C::kValueUnits][C::kHeadGroups][4];  // rows g, g, g+8, g+8 of a unit; heads 2t, 2t+1, 2t, 2t+1
    float reference[C::kHeadGroups];               // of head 8 n + g
    float sum[C::kHeadGroups];                     // of the weights; the lanes of a quad have a share each

    // A finite start in place of -inf spares every (-inf) - (-inf).
    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int n = 0; n < C::kHeadGroups; ++n) {
            reference[n] = -FLT_MAX, sum[n] = 0.f;
#pragma unroll
            for (int u = 0; u < C::kValueUnits; ++u) {
#pragma unroll
                for (int i = 0; i < 4; ++i) out[u][n][i] = 0.f;
            }
        }
    }

    // Scores plus scale exponents to weights, in place. If the reference moves, what has been accumulated is rescaled,
    // unless this is the first block.
    __device__ __forceinline__ void weigh(ScoreFragments<C>& s, float bias, bool first, bool keep_sum, int lane) {
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
#pragma unroll
                for (int u = 0; u < C::kValueUnits; ++u) {
                    out[u][n][0] *= f0, out[u][n][1] *= f1, out[u][n][2] *= f0, out[u][n][3] *= f1;
                }
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

    // `value_at`: this lane's row, for ldmatrix, of the warp's first dims.
    //
    // One ldmatrix fetches, of two units and a k step, the matrices (keys 0-7, dims 0-15), (0-7, 16-31), (8-15, 0-15),
    // (8-15, 16-31): 8x8 pairs of e4m3 dims. Transposed, they give a lane two keys of two dims. Sorted by dim and
    // converted, those are two A registers of V^T, of dims 2g and 2g + 1: rows g and g + 8 of a unit.
    __device__ __forceinline__ void multiply_e4m3(const WeightFragments<C>& w, uint32_t value_at) {
#pragma unroll
        for (int u = 0; u < C::kValueUnits; u += 2) {
#pragma unroll
            for (int ks = 0; ks < C::kKeyGroups; ++ks) {
                uint32_t r[4];
                ptx::ldmatrix_x4_trans(r, value_at + u * kUnitDims + ks * kKeysPerGroup * C::kRowPitch);
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    uint32_t a[4];
                    ptx::cvt_f16x4_e4m3x4(a[0], a[1], __byte_perm(r[i], 0, 0x3120));
                    ptx::cvt_f16x4_e4m3x4(a[2], a[3], __byte_perm(r[2 + i], 0, 0x3120));
#pragma unroll
                    for (int n = 0; n < C::kHeadGroups; ++n) ptx::mma_m16n8k16<false>(out[u + i][n], a, w[ks][n]);
                }
            }
        }
    }

    // The same for RoPE, bf16: one ldmatrix fetches one unit, whose rows are dims in order.
    __device__ __forceinline__ void multiply_bf16(const WeightFragments<C>& w, uint32_t value_at) {
#pragma unroll
        for (int u = 0; u < C::kValueUnits; ++u) {
#pragma unroll
            for (int ks = 0; ks < C::kKeyGroups; ++ks) {
                uint32_t a[4];
                ptx::ldmatrix_x4_trans(a, value_at + 2 * u * kUnitDims + ks * kKeysPerGroup * C::kRowPitch);
#pragma unroll
                for (int n = 0; n < C::kHeadGroups; ++n) ptx::mma_m16n8k16<true>(out[u][n], a, w[ks][n]);
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

// Where a lane reads while it accumulates: addresses in shared memory, of stage or buffer 0.
template <class C>
struct ValueAddresses {
    uint32_t value;      // its row of the first matrix for ldmatrix
    uint32_t score;      // head g, columns 2t and 2t + 1, of part 0
    uint32_t exponent;   // of the warp's scale row, column 2t; V3.2: the mantissas are one array further

    __device__ __forceinline__ ValueAddresses(uint32_t shared, LanePlaces<C> places, int warp, int scale_row, bool is_rope, int lane) {
        const int matrix = lane / 8, row = row_of_column(lane % 8 + 8 * (matrix / 2));
        const int first = is_rope ? C::Record::kRopeOffset + 2 * (warp * C::kValueDims % kTileDims) : warp * C::kValueDims;
        value = ptx::opaque(shared + C::kRingOffset + row * C::kRowPitch + first + 16 * (matrix % 2));
        score = places.score + C::kScoreOffset;
        exponent = places.pair + (C::kScaleArraysOffset + C::kScaleArrayBytes + 4 * scale_row * C::kScaleStride);
    }
};

}  // namespace flash_mla::sm90::head16
