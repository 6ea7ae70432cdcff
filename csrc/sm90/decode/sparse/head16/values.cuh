// P V: each warp accumulates its own dims of V over all keys of the CTA.
#pragma once
#include "ptx/mma.cuh"
#include "sm90/decode/sparse/head16/softmax.cuh"

namespace flash_mla::sm90::head16 {

// Weights as B fragments: [k step][head group][register].
template <class C>
using WeightFragments = uint32_t[C::kKeyGroups][C::kHeadGroups][2];

// A warp's dims of a block of V, e4m3, as ldmatrix fetches them: (keys 0-7, dims 0-15), (0-7, 16-31), (8-15, 0-15),
// (8-15, 16-31) of two units and a k step.
template <class C>
using ValueFragments = uint32_t[C::kValueUnits / 2][C::kKeyGroups][4];

template <class C>
__device__ __forceinline__ void load_values(ValueFragments<C>& v, uint32_t value_at) {
#pragma unroll
    for (int u = 0; u < C::kValueUnits / 2; ++u) {
#pragma unroll
        for (int ks = 0; ks < C::kKeyGroups; ++ks) {
            ptx::ldmatrix_x4_trans(v[u][ks], value_at + 2 * u * kUnitDims + ks * kKeysPerGroup * C::kRowPitch);
        }
    }
}

// The matrix product is out^T[dims x heads] += V^T[dims x keys] * P^T[keys x heads]: 8 heads are a full N. The scale
// of V is constant over the warp's dims for each key, so it rides in P: P's reference is the warp's own, the largest
// score + scale exponent it has seen.
template <class C>
struct Accumulator {
    float out[C::kValueUnits][C::kHeadGroups][4];  // rows g, g, g+8, g+8 of a unit; heads 2t, 2t+1, 2t, 2t+1
    float reference[C::kHeadGroups];               // of head 8 n + g

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int n = 0; n < C::kHeadGroups; ++n) {
            reference[n] = -FLT_MAX;
#pragma unroll
            for (int u = 0; u < C::kValueUnits; ++u) {
#pragma unroll
                for (int i = 0; i < 4; ++i) out[u][n][i] = 0.f;
            }
        }
    }

    // Scores plus scale exponents of head group n to weights, in place; what has been accumulated, unless this is the
    // first block, is rescaled if the reference moves.
    __device__ __forceinline__ void weigh(ScoreFragment<C>& s, int n, bool first, int lane) {
        const float m = lane_max<C>(s);
        if (__any_sync(0xffffffffu, m > reference[n] + kSlack)) {
            const float larger = fmaxf(reference[n], quad_max(m)), factor = ptx::ex2_ftz(reference[n] - larger);
            reference[n] = larger;
            if (!first) {
                const int t = lane % 4;   // heads 2t and 2t + 1 are rows 8t and 8t + 4
                const float f0 = __shfl_sync(0xffffffffu, factor, 8 * t), f1 = __shfl_sync(0xffffffffu, factor, 8 * t + 4);
#pragma unroll
                for (int u = 0; u < C::kValueUnits; ++u) {
                    out[u][n][0] *= f0, out[u][n][1] *= f1, out[u][n][2] *= f0, out[u][n][3] *= f1;
                }
            }
        }
        const float shift = kWeightBias - reference[n];
#pragma unroll
        for (int ks = 0; ks < C::kKeyGroups; ++ks) {
#pragma unroll
            for (int i = 0; i < 4; ++i) s[ks][i] = ptx::ex2_ftz(s[ks][i] + shift);
        }
    }

    // Transposing 8x8 matrices of 16-bit elements, here pairs of e4m3 dims, gives a lane two keys of two dims. Sorted by
    // dim and converted, those are two A registers of V^T, of dims 2g and 2g + 1: rows g and g + 8 of a unit.
    __device__ __forceinline__ void multiply_e4m3(const WeightFragments<C>& w, const ValueFragments<C>& v) {
#pragma unroll
        for (int ks = 0; ks < C::kKeyGroups; ++ks) {
#pragma unroll
            for (int u = 0; u < C::kValueUnits; ++u) {
                const uint32_t(&r)[4] = v[u / 2][ks];
                uint32_t a[4];
                ptx::cvt_f16x4_e4m3x4(a[0], a[1], __byte_perm(r[u % 2], 0, 0x3120));
                ptx::cvt_f16x4_e4m3x4(a[2], a[3], __byte_perm(r[2 + u % 2], 0, 0x3120));
#pragma unroll
                for (int n = 0; n < C::kHeadGroups; ++n) ptx::mma_m16n8k16<false>(out[u][n], a, w[ks][n]);
            }
        }
    }

    // The same for RoPE, bf16: one ldmatrix fetches one unit, whose rows are dims in order. `value_at`: this lane's row for
    // it, of the warp's first dims.
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
__device__ __forceinline__ void pack_weights(WeightFragments<C>& w, const ScoreFragment<C>& s, int n, bool as_bf16) {
#pragma unroll
    for (int ks = 0; ks < C::kKeyGroups; ++ks) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float lo = s[ks][2 * half], hi = s[ks][2 * half + 1];
            w[ks][n][half] = as_bf16 ? ptx::cvt_bf16x2_f32(lo, hi) : ptx::cvt_f16x2_f32(lo, hi);
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
        exponent = places.pair + (C::kScaleOffset + C::kScaleArrayBytes + 4 * scale_row * C::kScaleStride);
    }
};

}  // namespace flash_mla::sm90::head16
