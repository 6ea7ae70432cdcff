// Scores to softmax weights, in registers. A warpgroup has all 64 heads: thread 32 w + 4 g + t the rows 16 w + g and
// 16 w + g + 8, of which the lanes of a quad have a quarter of the columns each.
#pragma once
#include <cfloat>
#include <cmath>

#include "ptx/convert.cuh"
#include "ptx/memory.cuh"
#include "ptx/reduce.cuh"
#include "sm90/decode/sparse/head64/config.h"

namespace flash_mla::sm90::head64 {

// A row's reference moves only if a score exceeds it by more than this (base 2): then what has been accumulated is rescaled.
inline constexpr float kSlack = 8.f;
// Weights stay at or below 2^-kHeadroom, so that the sum of 2^14 equal weights times the largest V is still finite in fp32,
// and the smallest V that counts are not yet lost below it.
inline constexpr float kHeadroom = 6.f;

// The softmax of the thread's two rows so far. Weights are 2^(score - shift), where the shift is the reference plus slack and
// headroom. A finite start in place of -inf spares every (-inf) - (-inf).
struct RowSums {
    float shift[2], sum[2];   // the lanes of a quad have a share each of the sum
    uint32_t masks;           // all that the lane has seen, bit by bit: the sign is set if all of them are -inf

    __device__ __forceinline__ void clear() { shift[0] = shift[1] = -FLT_MAX, sum[0] = sum[1] = 0.f, masks = ~0u; }

    // Of all lanes of the quad. Without a key the sum is 0, whatever q has made of the zeros in the place of keys.
    __device__ __forceinline__ void complete() {
        masks &= __shfl_xor_sync(0xffffffffu, masks, 1);
        masks &= __shfl_xor_sync(0xffffffffu, masks, 2);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const float all = ptx::quad_sum(sum[r]);
            sum[r] = masks >> 31 ? 0.f : all;
        }
    }
    // Base 2; -inf without keys.
    __device__ __forceinline__ float lse(int r) const { return sum[r] == 0.f ? -INFINITY : shift[r] + ptx::lg2(sum[r]); }
};

// D fragments of Q K^T become A fragments of P V, four registers for 16 keys. `mask_at`: that of column 2t. `factor`: what
// the rows that have been accumulated before are to be multiplied by; whether it is 1 for all rows of the warp is returned.
template <class C>
__device__ __forceinline__ bool weigh(float (&s)[32], uint32_t (&weights)[16], float (&factor)[2], RowSums& rows, float scale_log2,
                                      uint32_t mask_at) {
#pragma unroll
    for (int n = 0; n < C::kKeys / 8; ++n) {
        const float2 mask = ptx::ld_shared_f32x2(mask_at + 32 * n);
        rows.masks &= __float_as_uint(mask.x) & __float_as_uint(mask.y);
        s[4 * n] = fmaf(s[4 * n], scale_log2, mask.x), s[4 * n + 1] = fmaf(s[4 * n + 1], scale_log2, mask.y);
        s[4 * n + 2] = fmaf(s[4 * n + 2], scale_log2, mask.x), s[4 * n + 3] = fmaf(s[4 * n + 3], scale_log2, mask.y);
    }
    float m[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        float tree[8];
#pragma unroll
        for (int n = 0; n < 8; ++n) tree[n] = fmaxf(s[4 * n + 2 * r], s[4 * n + 2 * r + 1]);
#pragma unroll
        for (int step = 1; step < 8; step *= 2) {
#pragma unroll
            for (int n = 0; n < 8; n += 2 * step) tree[n] = fmaxf(tree[n], tree[n + step]);
        }
        m[r] = tree[0];
    }
    factor[0] = factor[1] = 1.f;
    const bool moves = __any_sync(0xffffffffu, m[0] + kHeadroom > rows.shift[0] || m[1] + kHeadroom > rows.shift[1]);
    if (moves) {
        // Row by row: what becomes of a row must not depend on the others.
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const float row_max = ptx::quad_max(m[r]), moved = row_max + kHeadroom > rows.shift[r] ? row_max + (kSlack + kHeadroom) : rows.shift[r];
            factor[r] = ptx::ex2_ftz(rows.shift[r] - moved);
            rows.shift[r] = moved;
            rows.sum[r] *= factor[r];
        }
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
#pragma unroll
        for (int n = 0; n < 8; ++n) {
            float& a = s[4 * n + 2 * r];
            float& b = s[4 * n + 2 * r + 1];
            a = ptx::ex2_ftz(a - rows.shift[r]), b = ptx::ex2_ftz(b - rows.shift[r]);
            weights[2 * n + r] = ptx::cvt_bf16x2_f32(a, b);
        }
        float even = 0.f, odd = 0.f;
#pragma unroll
        for (int n = 0; n < 8; ++n) even += s[4 * n + 2 * r], odd += s[4 * n + 2 * r + 1];
        rows.sum[r] += even + odd;
    }
    return !moves;
}

}  // namespace flash_mla::sm90::head64
