// Who does what: which token and heads a cluster works on, and what a warp's share of a CTA's work is.
#pragma once
#include "ptx/cluster.cuh"
#include "ptx/warpgroup.cuh"
#include "sm90/decode/sparse/head16/config.h"
#include "sm90/decode/sparse/token_heads.cuh"

namespace flash_mla::sm90::head16 {

// Tiles of a token are neighbours along y. With a zero column there is one tile a token.
template <class C>
struct ClusterWork : TokenHeads {
    int heads;   // of the tile that exist
    int rows;    // whose results the cluster writes: with the zero row up to 64

    // `cluster`: number along x.
    __device__ __forceinline__ ClusterWork(const SparseDecodeParams& p, uint32_t cluster)
        : TokenHeads(p, cluster, C::kHasZeroColumn ? 0 : ptx::ctaid_y() * C::kHeads),
          heads(min(C::kHeads, p.h_q - first_head)), rows(min(C::kMaxRows, p.h_q - first_head)) {}
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

// The score warps' named barrier.
inline constexpr int kScoreBarrier = 1;
template <class C>
__device__ __forceinline__ void sync_score_warps() { ptx::barrier_sync(kScoreBarrier, 32 * C::kScoreWarps); }

}  // namespace flash_mla::sm90::head16
