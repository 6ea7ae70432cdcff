// P V: each warp accumulates its own dims of V over all keys of the CTA.
#pragma once
#include "ptx/convert.cuh"
#include "ptx/memory.cuh"
#include "ptx/mma.cuh"
#include "sm90/decode/sparse/head16/roles.cuh"

namespace flash_mla::sm90::head16 {

// Weights as B fragments: [k step][column group][register]. A column group is 8 heads or the zero row, eight times.
template <class C>
using WeightFragments = uint32_t[C::kKeyGroups][C::kColumnGroups][2];

// The matrix product is out^T[dims x heads] += V^T[dims x keys] * P^T[keys x heads]: 8 heads are a full N. The scale
// of V is constant over the warp's dims for each key, so it rides in P.
template <class C>
struct Accumulator {
    float out[C::kValueUnits][C::kColumnGroups][4];  // rows g, g, g+8, g+8 of a unit; heads 2t, 2t+1, 2t, 2t+1

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int u = 0; u < C::kValueUnits; ++u) {
#pragma unroll
            for (int n = 0; n < C::kColumnGroups; ++n) {
#pragma unroll
                for (int i = 0; i < 4; ++i) out[u][n][i] = 0.f;
            }
        }
    }
    // Column group n, its columns 2t and 2t + 1; or all.
    __device__ __forceinline__ void rescale(int n, float factor0, float factor1) {
#pragma unroll
        for (int u = 0; u < C::kValueUnits; ++u) {
            out[u][n][0] *= factor0, out[u][n][1] *= factor1, out[u][n][2] *= factor0, out[u][n][3] *= factor1;
        }
    }

    __device__ __forceinline__ void rescale(float factor) {
#pragma unroll
        for (int n = 0; n < C::kColumnGroups; ++n) rescale(n, factor, factor);
    }

    // Of a block. `value_at`: this lane's row, for ldmatrix, of the warp's first dims in the first one.
    __device__ __forceinline__ void multiply(const WeightFragments<C>& w, uint32_t value_at, bool is_rope, bool as_bf16) {
        // (The usual case first, here and in take_weights: ptxas lays the code out by that, and tiles of 8 rows are up to 1 % faster.)
        if (!is_rope && !as_bf16) multiply_e4m3<false>(w, value_at);
        else if (is_rope) multiply_bf16(w, value_at);
        else multiply_e4m3<true>(w, value_at);
    }

   private:
    // One ldmatrix fetches, of two units and a k step, the matrices (keys 0-7, dims 0-15), (0-7, 16-31), (8-15, 0-15),
    // (8-15, 16-31): 8x8 pairs of e4m3 dims. Transposed, they give a lane two keys of two dims. Sorted by dim and
    // converted, those are two A registers of V^T, of dims 2g and 2g + 1: rows g and g + 8 of a unit. To f16, or if the weights
    // are bf16 to bf16.
    template <bool kIsBf16>
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
                    if constexpr (kIsBf16) {
#pragma unroll
                        for (int j = 0; j < 4; ++j) a[j] = ptx::cvt_bf16x2_f16x2(a[j]);
                    }
#pragma unroll
                    for (int n = 0; n < C::kColumnGroups; ++n) ptx::mma_m16n8k16<kIsBf16>(out[u + i][n], a, w[ks][n]);
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
                for (int n = 0; n < C::kColumnGroups; ++n) ptx::mma_m16n8k16<true>(out[u][n], a, w[ks][n]);
            }
        }
    }
};

// Where a lane reads a block of stage 0: its row of the first matrix for ldmatrix.
template <class C>
__device__ __forceinline__ uint32_t value_address(uint32_t shared, const WarpRole<C>& role, int lane) {
    const int matrix = lane / 8, row = row_of_column(lane % 8 + 8 * (matrix / 2));
    const int first = role.value_is_rope ? C::Record::kRopeOffset : role.value_warp * C::kValueDims;
    return ptx::opaque(shared + C::kRingOffset + row * C::kRowPitch + first + 16 * (matrix % 2));
}

}  // namespace flash_mla::sm90::head16
