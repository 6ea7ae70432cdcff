// Whether the rows of q behind a tile with a zero column are all zero. -0 is zero, NaN is not.
//
// The tile is one of 16 rows that began because it looked so (head64/padded_kernel.cuh). Its value warps look at every element of the rows
// behind, shared among all splits, while they wait for their first weights, and what they find goes round with the log-sum-exps, before
// any result is sent or written.
#pragma once
#include "ptx/cluster.cuh"
#include "sm90/decode/sparse/head16/query.cuh"
#include "sm90/decode/sparse/head16/roles.cuh"

namespace flash_mla::sm90::head16 {

// What a warp has found against the tile, to shared memory.
template <class C>
__device__ __forceinline__ void note_finding(bool found, uint32_t shared, int warp, int lane) {
    found = __any_sync(0xffffffffu, found);
    if (lane == 0) ptx::st_shared_u32(shared + C::kFindingsOffset + 4 * warp, found);
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

// What the warps of this CTA have found, to every CTA of the cluster, by one warp; counts towards the LSE barrier.
template <class C>
__device__ __forceinline__ void publish_findings(uint32_t shared, SplitsOfTile splits, int lane) {
    const uint32_t of_warp = lane < C::kWarps ? ptx::ld_shared_u32(shared + C::kFindingsOffset + 4 * lane) : 0;
    const uint32_t found = __reduce_or_sync(0xffffffffu, of_warp), at = shared + C::kPeerFindingsOffset + 4 * splits.rank;
    if (lane == splits.rank) ptx::st_shared_u32(at, found);
    else if (lane < splits.count) ptx::st_async(ptx::mapa(at, lane), __uint_as_float(found), ptx::mapa(shared + C::kLseBarrierOffset, lane));
}

// When those of all splits are there.
template <class C>
__device__ __forceinline__ bool any_finding(const SparseDecodeParams& p, uint32_t shared, int lane) {
    const uint32_t of_split = lane < p.splits ? ptx::ld_shared_u32(shared + C::kPeerFindingsOffset + 4 * lane) : 0;
    return __reduce_or_sync(0xffffffffu, of_split) != 0;
}

}  // namespace flash_mla::sm90::head16
