// Who does what: which token and heads a cluster works on, and what a warp's share of a CTA's work is.
#pragma once
#include "ptx/cluster.cuh"
#include "ptx/memory.cuh"
#include "ptx/warpgroup.cuh"
#include "sm90/decode/sparse/head16/config.h"

namespace flash_mla::sm90::head16 {

// Tiles of a token are neighbours along y. A tile with a zero column is the beginning of a tile of 64 rows, of which a token may have two: these
// are neighbours along x.
template <class C>
struct ClusterWork {
    uint32_t batch, row;
    int first_head, heads;   // heads of the tile that exist
    int rows;                // whose results the cluster writes: with the zero row those of 64

    // `cluster`: number along x.
    __device__ __forceinline__ ClusterWork(const SparseDecodeParams& p, uint32_t cluster) {
        const int two_tiles = C::kHasZeroColumn && p.h_q > kLargeTile;
        const uint32_t token = cluster >> two_tiles;
        batch = p.s_q.divide(token);
        row = token - batch * p.s_q.divisor;
        first_head = C::kHasZeroColumn ? kLargeTile * (cluster & two_tiles) : ptx::ctaid_y() * C::kHeads;
        heads = min(C::kHeads, p.h_q - first_head);
        rows = min(C::kMaxRows, p.h_q - first_head);
    }
    // The tile's first row of q.
    __device__ __forceinline__ const uint16_t* query(const SparseDecodeParams& p) const {
        return ptx::opaque(p.q + static_cast<uint64_t>(batch) * p.q_stride_b + static_cast<uint64_t>(row) * p.q_stride_s +
                           static_cast<uint64_t>(first_head) * p.q_stride_h);
    }
};

template <class C>
struct WarpRole {
    bool scores;   // or values
    // Scores: some dims (a part) of some keys of a block.
    int part, first_key;
    // Values: all keys, some dims, which have one scale per key.
    int value_warp, value_scale_row;
    bool value_is_rope;

    __device__ __forceinline__ explicit WarpRole(uint32_t warp) {
        constexpr uint32_t kWarpsPerPart = C::kScoreWarps / C::kDimParts;
        scores = warp < C::kScoreWarps;
        part = warp % C::kScoreWarps / kWarpsPerPart, first_key = warp % kWarpsPerPart * (8 * C::kOctets);
        value_warp = warp % C::kValueWarps, value_scale_row = value_warp * C::kValueDims / (kTileDims * C::kTilesPerScale);
        value_is_rope = C::Record::kRopeInV && value_scale_row == C::kScaleRows - 1;
    }
};

// Barriers of a part of the CTA.
inline constexpr int kScoreBarrier = 1, kValueBarrier = 2;
template <class C>
__device__ __forceinline__ void sync_score_warps() { ptx::barrier_sync(kScoreBarrier, 32 * C::kScoreWarps); }
template <class C>
__device__ __forceinline__ void sync_value_warps() { ptx::barrier_sync(kValueBarrier, 32 * C::kValueWarps); }

}  // namespace flash_mla::sm90::head16
