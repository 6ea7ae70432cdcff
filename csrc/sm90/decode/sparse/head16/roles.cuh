// Who does what: which token and heads a cluster works on, and what a warp's share of a CTA's work is.
#pragma once
#include "ptx/cluster.cuh"
#include "sm90/decode/sparse/head16/config.h"

namespace flash_mla::sm90::head16 {

// Of the tiles that may be skipped, the cluster of the zero row (zero_rows.cuh) comes ahead.
template <class C>
struct ClusterWork {
    uint32_t batch, row;
    bool is_zero_row;
    int first_head, heads;   // heads of the tile that exist

    __device__ __forceinline__ ClusterWork(const SparseDecodeParams& p, uint32_t token) {
        const int y = ptx::ctaid_y();
        batch = p.s_q.divide(token);
        row = token - batch * p.s_q.divisor;
        is_zero_row = C::kSkipsZeros && y == 1;
        first_head = (C::kSkipsZeros ? max(y - 1, 0) : y) * C::kHeads;
        heads = min(C::kHeads, p.h_q - first_head);
    }
};

template <class C>
struct WarpRole {
    // Scores: some dims (a part) of some keys of a block.
    int part, first_key;
    // Values: all keys, some dims, which have one scale per key.
    int value_scale_row;
    bool value_is_rope;
    // One warp keeps the softmax sums, the others only need their own reference: V4's first one with RoPE. (Not with shared weights.)
    bool keeps_sum;
    // The last warps find keys: V4's accumulate RoPE, which needs no conversion.
    bool finds_keys;

    __device__ __forceinline__ explicit WarpRole(uint32_t warp) {
        constexpr uint32_t kWarpsPerPart = C::kWarps / C::kDimParts;
        constexpr uint32_t kSumWarp = C::Record::kRopeInV ? C::Record::kNopeDims / C::kValueDims : 0;
        part = warp / kWarpsPerPart, first_key = warp % kWarpsPerPart * (8 * C::kOctets);
        value_scale_row = warp * C::kValueDims / (kTileDims * C::kTilesPerScale);
        value_is_rope = C::Record::kRopeInV && value_scale_row == C::kScaleRows - 1;
        keeps_sum = warp == kSumWarp;
        finds_keys = warp >= C::kWarps - C::kFinders;
    }
};

}  // namespace flash_mla::sm90::head16
