// Keys in the ring to scores.
#pragma once
#include <cmath>
#include <type_traits>

#include "ptx/convert.cuh"
#include "ptx/memory.cuh"
#include "ptx/mma.cuh"
#include "sm90/decode/sparse/head16/query.cuh"
#include "sm90/decode/sparse/head16/ring.cuh"

namespace flash_mla::sm90::head16 {

// Where a lane reads and writes while it computes scores: addresses in shared memory, of stage 0, buffer 0 of the scores and octet 0.
template <class C>
struct ScoreAddresses {
    using Record = typename C::Record;
    uint32_t key;           // the lane's 16 bytes of its part's first tile, of column g's row
    uint32_t more;          // V3.2: the lane's share of the part's RoPE dims
    uint32_t scale;         // scale of row t of the part, in column g's row
    uint32_t scale_store;   // that scale's place in the array of scales
    uint32_t scale_load;    // scale row 0 of the part, columns 2t and 2t + 1
    uint32_t mask;          // columns 2t and 2t + 1
    uint32_t score;         // head g, columns 2t and 2t + 1, of the part

    __device__ __forceinline__ ScoreAddresses(uint32_t shared, int warp_key, int part, int lane) {
        const int g = lane / 4, t = lane % 4;
        // Columns 2t and 2t + 1 of the first row of an array, and of row g of the scores. The rest of an address is the same for
        // the whole warp and costs no register.
        const uint32_t pair = ptx::opaque(shared + 8 * t), score_pair = ptx::opaque(shared + 4 * g * C::kScoreStride + 8 * t);
        const uint32_t row = shared + C::kRingOffset + (warp_key + row_of_column(g)) * C::kRowPitch;
        key = ptx::opaque(row + part * (C::kTilesPerPart * kTileDims) + 16 * t);
        // From `key` by what the lanes of a warp have in common, where that is possible: no register.
        more = key + (Record::kRopeOffset + part * (64 - C::kTilesPerPart * kTileDims));
        const int scale_row = C::kScaleRowsPerPart * part + min(t, C::kScaleRowsPerPart - 1);
        scale = ptx::opaque(row + C::kScaleInRow + scale_row * (C::kHasMantissa ? 4 : 1));
        scale_store = shared + C::kScaleOffset + 4 * (scale_row * C::kScaleStride + warp_key + g);
        scale_load = pair + (C::kScaleOffset + 4 * (C::kScaleRowsPerPart * part * C::kScaleStride + warp_key));
        mask = pair + (C::kMaskOffset + 4 * warp_key);
        score = score_pair + (C::kScoreOffset + 4 * (part * C::kHeads * C::kScoreStride + warp_key));
    }
};

// A scale as fp32. A ue8m0 byte is a biased exponent and nothing else, 2^(e - 127).
template <class C>
__device__ __forceinline__ float scale_as_f32(uint32_t scale, bool is_rope) {
    if constexpr (C::kHasMantissa) return __uint_as_float(scale);
    const uint32_t e = is_rope ? 127 : scale;
    return __uint_as_float(e == 0 ? 0x00400000u : e << 23);
}

// Q K^T of an octet, fragment by fragment of Q. `k`: pairs of dims, 2 words a k step.
template <class C>
struct Product {
    float d[3 - C::kHeadGroups][4] = {};   // a tile of 8 heads: of the first and of the second step of a fragment

    template <bool kIsBf16>
    __device__ __forceinline__ void add(uint4 q, const uint32_t* k) {
        const uint32_t a[4] = {q.x, q.y, q.z, q.w};
#pragma unroll
        for (int i = 0; i < 3 - C::kHeadGroups; ++i) {
            const uint32_t b[2] = {k[2 * i], k[2 * i + 1]};
            ptx::mma_m16n8k16<kIsBf16>(d[i], a, b);
        }
    }
    // Of head g + 8 n, column 2t + i.
    __device__ __forceinline__ float at(int n, int i) const {
        if constexpr (C::kHeadGroups == 2) return d[0][2 * n + i];
        else return d[0][i] + d[2 - C::kHeadGroups][2 + i];
    }
};

// Scores of the warp's keys over the dims of `part` to one of the two buffers, an offset. Returns whether those of the first head, which some
// lanes have, are finite: then the zero row's are 0, as no key holds a NaN or an infinity, which would make NaN of 0 as well. (They may also be infinite
// because a product of finite numbers leaves fp32's range.)
template <class C, bool kQueryIsBf16>
__device__ __forceinline__ bool compute_scores(const Query<C>& q, float scale_log2, const ScoreAddresses<C>& at, Stage stage, uint32_t buffer,
                                               int part, int lane) {
    const int t = lane % 4;
    const bool rope_last = last_tile_is_rope<C>(part);
    constexpr int kOctetRows = 8 * C::kRowPitch, kOctetColumnBytes = 32;   // bytes from octet to octet

    // What this lane reads of the block, ahead of its use: all of it first, since what follows is long, or, where registers are
    // short, a tile ahead.
    constexpr int kTilesAhead = C::kOctets == 1 ? C::kTilesPerPart : kQueryIsBf16 ? 1 : 2;
    uint4 keys[C::kOctets][C::kTilesPerPart], more[C::kOctets];
    uint32_t scales[C::kOctets];
    auto load_tile = [&](int j) {
#pragma unroll
        for (int o = 0; o < C::kOctets; ++o) keys[o][j] = ptx::ld_shared_v4(at.key + stage.rows + o * kOctetRows + j * kTileDims);
        if (j == C::kTilesPerPart - 1 && rope_last) {
#pragma unroll
            for (int o = 0; o < C::kOctets; ++o) more[o] = ptx::ld_shared_v4(at.key + stage.rows + o * kOctetRows + C::kTilesPerPart * kTileDims);
        }
    };
#pragma unroll
    for (int j = 0; j < kTilesAhead; ++j) load_tile(j);
#pragma unroll
    for (int o = 0; o < C::kOctets; ++o) {
        const uint32_t from = at.scale + stage.rows + o * kOctetRows;
        scales[o] = C::kHasMantissa ? ptx::ld_shared_u32(from) : ptx::ld_shared_u8(from);
    }

    // Tile by tile; a tile's products are used while the next one's are on their way.
    float s[C::kOctets][C::kHeadGroups][2] = {};   // heads g + 8 n, columns 2t and 2t + 1
    Product<C> product[2][C::kOctets];
    auto multiply_tile = [&](int j) {
        uint32_t pairs[C::kOctets][8];
        auto multiply = [&](auto is_bf16) {
#pragma unroll
            for (int o = 0; o < C::kOctets; ++o) product[j % 2][o] = {};
#pragma unroll
            for (int f = 0; f < C::kFragmentsPerTile; ++f) {
#pragma unroll
                for (int o = 0; o < C::kOctets; ++o) product[j % 2][o].template add<is_bf16.value>(q.fragment[j][f], pairs[o] + 8 / C::kFragmentsPerTile * f);
            }
        };
        if (j == C::kTilesPerPart - 1 && rope_last) {
#pragma unroll
            for (int o = 0; o < C::kOctets; ++o) {
                pairs[o][0] = keys[o][j].x, pairs[o][1] = keys[o][j].y, pairs[o][2] = keys[o][j].z, pairs[o][3] = keys[o][j].w;
                pairs[o][4] = more[o].x, pairs[o][5] = more[o].y, pairs[o][6] = more[o].z, pairs[o][7] = more[o].w;
            }
            multiply(std::true_type());
        } else {
#pragma unroll
            for (int o = 0; o < C::kOctets; ++o) {
                ptx::cvt_f16x4_e4m3x4(pairs[o][0], pairs[o][1], keys[o][j].x);
                ptx::cvt_f16x4_e4m3x4(pairs[o][2], pairs[o][3], keys[o][j].y);
                ptx::cvt_f16x4_e4m3x4(pairs[o][4], pairs[o][5], keys[o][j].z);
                ptx::cvt_f16x4_e4m3x4(pairs[o][6], pairs[o][7], keys[o][j].w);
                if constexpr (kQueryIsBf16) {
#pragma unroll
                    for (int i = 0; i < 8; ++i) pairs[o][i] = ptx::cvt_bf16x2_f16x2(pairs[o][i]);
                }
            }
            multiply(std::bool_constant<kQueryIsBf16>());
        }
    };
    // Q's power of two comes off first, then the scale goes on: product * scale alone may leave fp32's range.
    auto add_tile = [&](int j) {
#pragma unroll
        for (int o = 0; o < C::kOctets; ++o) {
            const float2 scale = ptx::ld_shared_f32x2(at.scale_load + o * kOctetColumnBytes + 4 * (j / C::kTilesPerScale * C::kScaleStride));
#pragma unroll
            for (int n = 0; n < C::kHeadGroups; ++n) {
                s[o][n][0] = fmaf(product[j % 2][o].at(n, 0) * q.unscale[j][n], scale.x, s[o][n][0]);
                s[o][n][1] = fmaf(product[j % 2][o].at(n, 1) * q.unscale[j][n], scale.y, s[o][n][1]);
            }
        }
    };
    multiply_tile(0);
    // The scales change hands: from the lane that has read one to those of its column. (All have had the last block's before its barrier.)
#pragma unroll
    for (int o = 0; o < C::kOctets; ++o) {
        if (t < C::kScaleRowsPerPart) {
            ptx::st_shared_f32(at.scale_store + o * kOctetColumnBytes, scale_as_f32<C>(scales[o], rope_last && t == C::kScaleRowsPerPart - 1));
        }
    }
    __syncwarp();
#pragma unroll
    for (int j = 1; j < C::kTilesPerPart; ++j) {
        if (j + kTilesAhead - 1 < C::kTilesPerPart) load_tile(j + kTilesAhead - 1);
        multiply_tile(j);
        add_tile(j - 1);
    }
    add_tile(C::kTilesPerPart - 1);

    bool are_finite = true;
#pragma unroll
    for (int o = 0; o < C::kOctets; ++o) {
        if constexpr (C::kRopeWords > 0) {
            const uint4 k = ptx::ld_shared_v4(at.more + stage.rows + o * kOctetRows);
            const uint32_t pairs[4] = {k.x, k.y, k.z, k.w};
            Product<C> rope;
#pragma unroll
            for (int f = 0; f < C::kHeadGroups; ++f) rope.template add<true>(q.rope[f], pairs + 4 / C::kHeadGroups * f);
#pragma unroll
            for (int n = 0; n < C::kHeadGroups; ++n) {
#pragma unroll
                for (int i = 0; i < 2; ++i) s[o][n][i] = fmaf(rope.at(n, i), scale_log2, s[o][n][i]);
            }
        }
        const float2 mask = ptx::ld_shared_f32x2(at.mask + stage.mask<C>() + o * kOctetColumnBytes);
#pragma unroll
        for (int n = 0; n < C::kHeadGroups; ++n) {
            const float2 masked = {mask.x < 0.f ? mask.x : s[o][n][0], mask.y < 0.f ? mask.y : s[o][n][1]};
            ptx::st_shared_f32x2(at.score + buffer + o * kOctetColumnBytes + 4 * (8 * n * C::kScoreStride), masked);
        }
        are_finite &= (mask.x < 0.f || fabsf(s[o][0][0]) < INFINITY) && (mask.y < 0.f || fabsf(s[o][0][1]) < INFINITY);
    }
    return are_finite || lane >= 4;
}

}  // namespace flash_mla::sm90::head16
