// P V: each warp accumulates its own dims of V over all keys of the CTA.
#pragma once
#include "ptx/mma.cuh"
#include "sm90/decode/sparse/head16/softmax.cuh"

namespace flash_mla::sm90::head16 {

// The matrix product is out^T[dims x heads] += V^T[dims x keys] * P^T[keys x heads]: 8 heads are a full N. The scale
// of V is constant over the warp's dims for each key, so it rides in P: P's reference is the warp's own, the largest
// score + scale exponent it has seen.
template <class C>
struct Accumulator {
    using Record = typename C::Record;

    float out[C::kValueUnits][C::kHeadGroups][4];  // dims g, g, g+8, g+8 of a unit; heads 2t, 2t+1, 2t, 2t+1
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

    // Scores plus scale exponents to weights, in place; rescales what has been accumulated if the reference moves.
    __device__ __forceinline__ void weigh(ScoreFragment<C>& s, int live_groups, int lane) {
        float m[C::kHeadGroups];
        bool moves = false;
#pragma unroll
        for (int n = 0; n < C::kHeadGroups; ++n) {
            m[n] = row_max<C>(s[n]);
            moves |= m[n] > reference[n] + kSlack;
        }
        if (__any_sync(0xffffffffu, moves)) {
#pragma unroll
            for (int n = 0; n < C::kHeadGroups; ++n) {
                const float larger = fmaxf(reference[n], m[n]);
                const float factor = ptx::ex2(reference[n] - larger);
                reference[n] = larger;
                const int t = lane % 4;
                const float f0 = __shfl_sync(0xffffffffu, factor, 8 * t), f1 = __shfl_sync(0xffffffffu, factor, 8 * t + 4);
#pragma unroll
                for (int u = 0; u < C::kValueUnits; ++u) {
                    out[u][n][0] *= f0, out[u][n][1] *= f1, out[u][n][2] *= f0, out[u][n][3] *= f1;
                }
            }
        }
#pragma unroll
        for (int n = 0; n < C::kHeadGroups; ++n) {
            const float shift = kWeightBias - reference[n];
#pragma unroll
            for (int ks = 0; ks < C::kKeyGroups; ++ks) {
                if (ks >= live_groups) continue;
#pragma unroll
                for (int i = 0; i < 4; ++i) s[n][ks][i] = ptx::ex2(s[n][ks][i] + shift);
            }
        }
    }

    // `value_lane` is the address of this lane's row of the first 16 x 16 tile: see value_lane_address.
    template <bool kIsBf16>
    __device__ __forceinline__ void multiply(const ScoreFragment<C>& w, uint32_t value_lane, int live_groups) {
#pragma unroll
        for (int ks = 0; ks < C::kKeyGroups; ++ks) {
            if (ks >= live_groups) continue;
            uint32_t b[C::kHeadGroups][2];
#pragma unroll
            for (int n = 0; n < C::kHeadGroups; ++n) {
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const float lo = w[n][ks][2 * half], hi = w[n][ks][2 * half + 1];
                    b[n][half] = kIsBf16 ? ptx::cvt_bf16x2_f32(lo, hi) : ptx::cvt_f16x2_f32(lo, hi);
                }
            }
#pragma unroll
            for (int u = 0; u < C::kValueUnits; ++u) {
                uint32_t a[4];
                ptx::ldmatrix_x4_trans(a, (value_lane ^ (u << 5)) + ks * kKeysPerGroup * C::kValueRowBytes);
#pragma unroll
                for (int n = 0; n < C::kHeadGroups; ++n) {
                    if constexpr (kIsBf16) ptx::mma_m16n8k16_bf16(out[u][n], a, b[n]);
                    else ptx::mma_m16n8k16_f16(out[u][n], a, b[n]);
                }
            }
        }
    }
};

// ldmatrix fetches, for 16 keys x 16 dims, the 8x8 matrices (keys 0-7, dims 0-7), (0-7, 8-15), (8-15, 0-7),
// (8-15, 8-15): transposed, these are the A registers of V^T in order. Unit u of the warp lies 2u chunks further,
// which in the swizzled address is an xor, since a warp's first chunk is a multiple of its number of chunks.
template <class C>
__device__ __forceinline__ uint32_t value_lane_address(uint32_t value_buffer, int warp, int lane) {
    const int key = lane % 8 + 8 * (lane / 16), chunk = warp * (C::kValueDims / 8) + lane / 8 % 2;
    return value_address<C>(value_buffer, key, chunk);
}

}  // namespace flash_mla::sm90::head16
