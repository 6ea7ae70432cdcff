// Rows of Q that are all zero, as callers pad to 64 heads. A zero row's result does not depend on which tile it lies in:
// its scores are 0 for every key, rows never mix, and the sink is applied last. So
//
//   a tile is skipped if all its rows are zero and so is the last row of the tile before it;
//   a tile that is not skipped, and whose last row is zero, answers for the skipped tiles that follow it: their heads get
//   its last row's result, each with its own sink.
//
// Both sides look at Q alone and come to the same conclusion. -0 is zero, NaN is not.
#pragma once
#include "sm90/decode/sparse/head16/query.cuh"

namespace flash_mla::sm90::head16 {

// This warp's dims of a row (its e4m3 or RoPE tile, and V3.2's RoPE dims for warp 0).
template <class C>
__device__ __forceinline__ bool row_slice_is_nonzero(const uint16_t* row, bool aligned16, int warp, int lane) {
    bool nonzero = false;
    with_alignment(aligned16, [&](auto aligned) {
        auto look_at = [&](const uint16_t* dims) {
            uint32_t r[4];
            load_bf16<4, aligned.value>(r, dims + 8 * (lane % 8));
            nonzero |= is_nonzero(r[0] | r[1] | r[2] | r[3]);
        };
        if (warp < C::kTiles) look_at(row + kTileDims * warp);
        if (C::kRopeWords > 0 && warp == 0) look_at(row + C::Record::kNopeDims);
    });
    return nonzero;
}

// Which tiles behind this one are all zero, up to 7. All threads; complete after the next barrier of the CTA, in shared
// memory: a bit for every tile that is not, [warp].
template <class C>
__device__ __forceinline__ void look_for_zero_tiles(const SparseDecodeParams& p, const uint16_t* q_token, int first_head,
                                                    uint32_t shared, int warp, int lane) {
    constexpr int kRowsPerWarp = C::kHeads / C::kWarps, kChunks = C::Record::kDimQK / 8;   // of 16 bytes
    constexpr int kLoads = (kChunks + 31) / 32;
    uint32_t nonzero = 0;
    with_alignment(p.q_aligned16, [&](auto aligned) {
        for (int tile = 1; first_head + tile * C::kHeads < p.h_q; ++tile) {
            uint32_t r[kRowsPerWarp][kLoads][4] = {};   // all loads before the first use
#pragma unroll
            for (int i = 0; i < kRowsPerWarp; ++i) {
                const int head = first_head + tile * C::kHeads + kRowsPerWarp * warp + i;
                const uint16_t* row = q_token + static_cast<uint64_t>(head) * p.q_stride_h;
#pragma unroll
                for (int j = 0; j < kLoads; ++j) {
                    const int chunk = lane + 32 * j;
                    if (head < p.h_q && chunk < kChunks) load_bf16<4, aligned.value>(r[i][j], row + 8 * chunk);
                }
            }
            uint32_t any = 0;
#pragma unroll
            for (int i = 0; i < kRowsPerWarp; ++i) {
#pragma unroll
                for (int j = 0; j < kLoads; ++j) any |= r[i][j][0] | r[i][j][1] | r[i][j][2] | r[i][j][3];
            }
            if (is_nonzero(any)) nonzero |= 1u << (tile - 1);
        }
    });
    nonzero = __reduce_or_sync(0xffffffffu, nonzero);
    if (lane == 0) ptx::st_shared_u32(shared + C::kNonzeroTilesOffset + 4 * warp, nonzero);
}

// How many heads, whole tiles of them up to the last one's end, directly behind this tile are skipped.
template <class C>
__device__ __forceinline__ int zero_heads_behind(const SparseDecodeParams& p, int first_head, uint32_t shared, int lane) {
    const uint32_t of_warp = lane < C::kWarps ? ptx::ld_shared_u32(shared + C::kNonzeroTilesOffset + 4 * lane) : 0;
    const uint32_t nonzero = __reduce_or_sync(0xffffffffu, of_warp);
    const int heads_behind = max(0, p.h_q - first_head - C::kHeads);
    return nonzero ? min(heads_behind, C::kHeads * (__ffs(nonzero) - 1)) : heads_behind;
}

}  // namespace flash_mla::sm90::head16
