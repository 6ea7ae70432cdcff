// Whether the rows of q behind a tile with a zero column are all zero. -0 is zero, NaN is not.
//
// The tile is one of 16 rows that began because it looked so (head64/padded_kernel.cuh). Its value warps look at every element of the rows
// behind, shared among all splits, while they wait for their first weights. It may also turn out that f16 cannot hold the tile's own rows,
// or that a score of the first head is not finite: then a key may hold a NaN or an infinity, which makes NaN of 0 as well. Whatever a CTA
// finds goes round with the log-sum-exps, before any result is sent or written.
#pragma once
#include <cmath>

#include "ptx/cluster.cuh"
#include "sm90/decode/sparse/cluster_merge.cuh"
#include "sm90/decode/sparse/head16/query.cuh"
#include "sm90/decode/sparse/head16/roles.cuh"

namespace flash_mla::sm90::head16 {

// By whatever lane finds something against the tile: score warps, seen behind a barrier of theirs, and value warps, seen behind `look`.
template <class C>
__device__ __forceinline__ void reject(uint32_t shared) { ptx::or_shared_u32(shared + C::kRejectedOffset, 1); }

template <class C>
__device__ __forceinline__ bool is_rejected_here(uint32_t shared) { return ptx::ld_shared_u32(shared + C::kRejectedOffset) != 0; }

// When the log-sum-exps of all splits are there, of which the zero row's says so: whether any CTA of the cluster has rejected the tile. (The
// own one is another warp's ordinary store; the flag says the same.)
template <class C>
__device__ __forceinline__ bool is_rejected_anywhere(uint32_t shared, SplitsOfTile splits, int lane) {
    const bool is_peer = lane < splits.count && lane != splits.rank;
    const float lse = is_peer ? ptx::ld_shared_f32(shared + C::kPeerLseOffset + 4 * (C::kHeads * kMaxSplits + lane)) : 0.f;
    return __any_sync(0xffffffffu, is_rejected_here<C>(shared) || lse == INFINITY);
}

// Whether there are nonzeros in work.rows - kHeads rows, which the value warps of all splits share. Calls meanwhile() once, while loads
// travel.
template <class C, class Meanwhile>
__device__ __forceinline__ bool search_rows(const SparseDecodeParams& p, const ClusterWork<C>& work, int value_warp, int lane,
                                            Meanwhile meanwhile) {
    const uint16_t* q = work.query(p);   // the tile's first row
    constexpr int kChunks = C::Record::kDimQK / 8;   // of a row, 16 bytes each
    constexpr int kLoads = (kChunks + 31) / 32, kRows = 2;   // a lane's loads of a row; rows at a time
    const int step = C::kValueWarps * p.splits, first = C::kHeads + C::kValueWarps * ptx::cluster_ctarank() + value_warp;   // this warp's
    uint32_t any = 0;
#pragma unroll 1
    for (int row = first; row == first || row < work.rows; row += kRows * step) {
        uint32_t words[kRows][kLoads][4] = {};
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
            const uint16_t* of_lane = q + static_cast<uint64_t>(row + i * step) * p.q_stride_h + 8 * lane;
#pragma unroll
            for (int j = 0; j < kLoads; ++j) {
                if (row + i * step < work.rows && lane + 32 * j < kChunks) load_bf16<4, true>(words[i][j], of_lane + 256 * j);
            }
        }
        if (row == first) meanwhile();
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
#pragma unroll
            for (int j = 0; j < kLoads; ++j) any |= words[i][j][0] | words[i][j][1] | words[i][j][2] | words[i][j][3];
        }
    }
    return is_nonzero(any);
}

}  // namespace flash_mla::sm90::head16
