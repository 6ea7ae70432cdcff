// Q as A fragments of the scores' matrix product: converted once, by the score warps together, then kept in registers.
#pragma once
#include "ptx/convert.cuh"
#include "sm90/decode/sparse/head16/roles.cuh"
#include "sm90/decode/sparse/query_row.cuh"

namespace flash_mla::sm90::head16 {

// Keys are e4m3 values used as f16, as they stand, so Q is needed as f16 too. A power of two per (head, tile) takes
// any magnitude of bf16 into f16's range: the largest element lands in [2^14, 2^15), and f16's 11 bits hold bf16's 8
// down to 2^-31 of it. The power comes off again in fp32, together with the softmax scale. Should a tile of some head
// span more than that, the CTA keeps all of Q as it is, in bf16, and converts the keys to bf16 instead, which is
// slower.
//
// Which dims pair up in the matrix product is free as long as Q and K agree. Lane (g, t) holds the dims
// 64 * tile + 16 t .. + 15 of heads g and g + 8: the same dims that its 16-byte load of a key brings. Of a RoPE tile,
// whose keys take two such loads, it holds the dims 8 t .. + 7 and 32 + 8 t .. + 7.

// Rows of a head tile that do not exist are read from its last row and become zeros.
struct QueryRows {
    const uint16_t* first;
    uint32_t stride;
    int count;
    bool aligned16;
    __device__ __forceinline__ const uint16_t* row(int head) const { return first + static_cast<uint64_t>(min(head, count - 1)) * stride; }
    __device__ __forceinline__ bool exists(int head) const { return head < count; }
};

// The exponent (bf16: 8 bits below the sign) of the largest of two magnitudes.
__device__ __forceinline__ int exponent_of_larger(uint32_t magnitudes) { return max(magnitudes & 0xffffu, magnitudes >> 16) >> 7; }

__device__ __forceinline__ bool is_nonzero(uint32_t pairs) { return (pairs & 0x7fff7fffu) != 0; }

// One tile of Q on its way from global memory to shared memory, in the hands of one warp.
template <class C>
struct QueryTile {
    uint32_t words[C::kHeadGroups][8];   // pairs of dims
    int exponent[C::kHeadGroups];        // of the largest magnitude of the head's 64 dims

    __device__ __forceinline__ void load(const QueryRows& rows, int tile, bool is_rope, int lane) {
        const int g = lane / 4, t = lane % 4;
        const int first = tile * kTileDims + (is_rope ? 8 : 16) * t, second = first + (is_rope ? 32 : 8);
        with_alignment(rows.aligned16, [&](auto aligned) {
#pragma unroll
            for (int n = 0; n < C::kHeadGroups; ++n) {
                load_bf16<4, aligned.value>(words[n], rows.row(8 * n + g) + first);
                load_bf16<4, aligned.value>(words[n] + 4, rows.row(8 * n + g) + second);
            }
        });
    }

    // Before anything else. Returns whether the lane's share is too wide: some head spans more than f16 can hold. Positive bf16 order like
    // integers; for the least, zeros become 0xffff and the others their magnitude minus 1.
    __device__ __forceinline__ bool examine(const QueryRows& rows, bool is_rope, int lane) {
        const int g = lane / 4;
        bool too_wide = false;
#pragma unroll
        for (int n = 0; n < C::kHeadGroups; ++n) {
            uint32_t largest = 0, least = 0xffffffffu;
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                if (!rows.exists(8 * n + g)) words[n][i] = 0;
                const uint32_t magnitudes = words[n][i] & 0x7fff7fffu;
                largest = __vmaxu2(largest, magnitudes);
                least = __vminu2(least, (magnitudes + 0x7fff7fffu) ^ 0x80008000u);
            }
            largest = __vmaxu2(largest, __shfl_xor_sync(0xffffffffu, largest, 1));
            largest = __vmaxu2(largest, __shfl_xor_sync(0xffffffffu, largest, 2));
            exponent[n] = exponent_of_larger(largest);
            const int least_exponent = static_cast<int>(min(least & 0xffffu, least >> 16) + 1) >> 7;
            const bool is_finite = exponent[n] != 255;   // what else is in a head that is not, does not matter
            too_wide |= !is_rope && is_finite && least_exponent < exponent[n] - 31;
        }
        return too_wide;
    }

    // As A fragments, `at` [fragment][32 lanes], see Query. `unscale` [head]: softmax scale * log2(e) / the power
    // of two.
    __device__ __forceinline__ void store(uint4* at, float* unscale, float scale_log2, bool as_bf16, int lane) const {
        uint32_t r[C::kHeadGroups][8];
#pragma unroll
        for (int n = 0; n < C::kHeadGroups; ++n) {
            const int power = as_bf16 ? 0 : min(127 + 14 - exponent[n], 126);   // so that 2^-power is no subnormal
            const float scale = __int_as_float((127 + power) << 23);
            if (lane % 4 == 0) unscale[8 * n + lane / 4] = scale_log2 * __int_as_float((127 - power) << 23);
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                const uint32_t w = words[n][i];
                r[n][i] = as_bf16 ? w : ptx::cvt_f16x2_f32(ptx::f32_of_bf16_lo(w) * scale, ptx::f32_of_bf16_hi(w) * scale);
            }
        }
#pragma unroll
        for (int f = 0; f < C::kFragmentsPerTile; ++f) {
            if constexpr (C::kHeadGroups == 2) at[f * 32 + lane] = make_uint4(r[0][2 * f], r[1][2 * f], r[0][2 * f + 1], r[1][2 * f + 1]);
            else at[f * 32 + lane] = make_uint4(r[0][4 * f], r[0][4 * f + 2], r[0][4 * f + 1], r[0][4 * f + 3]);
        }
    }
};

// A warp's part of Q. M of the matrix product is 16 heads; a fragment of a tile of 16 heads serves one k step. A
// fragment of a tile of 8 serves two: its rows 0-7 are the heads at the dims of the first step, rows 8-15 the same heads
// at the dims of the second; with the keys of the one or the other, half of the product is what is wanted.
template <class C>
struct Query {
    using Record = typename C::Record;
    uint4 fragment[C::kTilesPerPart][C::kFragmentsPerTile];
    float unscale[C::kTilesPerPart][C::kHeadGroups];   // of heads g and g + 8
    uint4 rope[C::kHeadGroups];                        // V3.2: the part's RoPE dims, bf16
    bool is_bf16;                                      // Q's e4m3 tiles; RoPE always is

    __device__ __forceinline__ void load_rope(const QueryRows& rows, int part, int lane) {
        if constexpr (C::kRopeWords > 0) {
            const int g = lane / 4, t = lane % 4;
            uint32_t r[C::kHeadGroups][C::kRopeWords];
            with_alignment(rows.aligned16, [&](auto aligned) {
#pragma unroll
                for (int n = 0; n < C::kHeadGroups; ++n) {
                    load_bf16<C::kRopeWords, aligned.value>(r[n], rows.row(8 * n + g) + Record::kNopeDims + 2 * C::kRopeWords * (4 * part + t));
                }
            });
#pragma unroll
            for (int n = 0; n < C::kHeadGroups; ++n) {
#pragma unroll
                for (int i = 0; i < C::kRopeWords; ++i) r[n][i] = rows.exists(8 * n + g) ? r[n][i] : 0;
            }
            if constexpr (C::kHeadGroups == 2) {
#pragma unroll
                for (int f = 0; f < 2; ++f) rope[f] = make_uint4(r[0][2 * f], r[1][2 * f], r[0][2 * f + 1], r[1][2 * f + 1]);
            } else {
                rope[0] = make_uint4(r[0][0], r[0][2], r[0][1], r[0][3]);
            }
        }
    }

    // By the score warps together, through shared memory: each converts and stores a tile,
    __device__ __forceinline__ static void convert(const QueryTile<C>& own_tile, bool as_bf16, char* shared, float scale_log2, int warp, int lane) {
        const bool is_rope = Record::kRopeInV && warp == C::kTiles - 1;
        own_tile.store(fragments(shared) + warp * kPerTile, unscales(shared) + warp * C::kHeads, scale_log2, as_bf16 || is_rope, lane);
    }
    // and behind a barrier takes what it needs.
    __device__ __forceinline__ void take(bool as_bf16, char* shared, int part, int lane) {
        is_bf16 = as_bf16;
#pragma unroll
        for (int j = 0; j < C::kTilesPerPart; ++j) {
            const int tile = C::kTilesPerPart * part + j;
#pragma unroll
            for (int f = 0; f < C::kFragmentsPerTile; ++f) fragment[j][f] = fragments(shared)[tile * kPerTile + f * 32 + lane];
#pragma unroll
            for (int n = 0; n < C::kHeadGroups; ++n) unscale[j][n] = unscales(shared)[tile * C::kHeads + 8 * n + lane / 4];
        }
    }

   private:
    static constexpr int kPerTile = C::kFragmentsPerTile * 32;
    __device__ __forceinline__ static uint4* fragments(char* shared) { return reinterpret_cast<uint4*>(shared + C::kQueryOffset); }
    __device__ __forceinline__ static float* unscales(char* shared) { return reinterpret_cast<float*>(shared + C::kUnscaleOffset); }
};

}  // namespace flash_mla::sm90::head16
