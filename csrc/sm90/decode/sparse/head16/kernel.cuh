// Sparse decode with a head tile of 16 rows (or 8): load keys -> scores -> softmax weights -> accumulate -> merge.
// docs/sparse_decode.md explains the data flow.
#pragma once
#include "sm90/decode/sparse/head16/tile.cuh"

namespace flash_mla::sm90::head16 {

// Grid: x = splits * tokens, in clusters of `splits`; y = head tiles.
template <class C>
__global__ void __launch_bounds__(C::kThreads, 1)
sparse_decode_kernel(const __grid_constant__ SparseDecodeParams p) {
    extern __shared__ __align__(1024) char shared[];
    const uint32_t warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
    const SplitsOfTile splits(p);
    const uint32_t token = ptx::clusterid_x();
    const ClusterWork<C> work(p, token);
    const WarpRole<C> role(warp);

    // What does not depend on the kernel before: addresses and barriers.
    const uint32_t shared_address = ptx::shared_address(shared);
    KeyFeeder<C> feeder(p, shared_address, work, splits.rank, role.value_warp, lane);
    const QueryRows q_rows = {work.query(p), p.q_stride_h, work.heads, p.q_aligned16};
    if (threadIdx.x == 0) init_barriers<C>(feeder.ring, splits, token);
    __syncthreads();
    ptx::barrier_cluster_arrive_relaxed();
    if constexpr (C::kMovesRegisters) {
        if (!role.scores) ptx::setmaxnreg_dec<C::kValueRegisters>();
    }
    ptx::griddepcontrol_launch_dependents();
    ptx::griddepcontrol_wait();   // q, the indices and the cache may come from the kernel before

    // Load: the first indices, the lengths, Q and the sinks side by side, then keys, as many blocks as the ring takes.
    feeder.load_first(work.batch, !role.scores);
    Query<C> q;
    QueryTile<C> q_tile;
    bool as_bf16 = false;
    if (role.scores) {
        const bool is_rope_tile = C::Record::kRopeInV && warp == C::kTiles - 1;
        q_tile.load(q_rows, warp, is_rope_tile, lane);
        q.load_rope(q_rows, role.part, lane);
        // By whole warps: a divergent branch would hold up the loads.
        const float sink = warp == 0 ? load_sink(p, work.first_head + min(static_cast<int>(lane), work.heads - 1)) : 0.f;
        feeder.count_blocks();
        as_bf16 = ptx::barrier_any(kScoreBarrier, 32 * C::kScoreWarps, q_tile.examine(q_rows, is_rope_tile, lane));
        Query<C>::convert(q_tile, as_bf16, shared, p.scale_log2, warp, lane);
        if (static_cast<int>(threadIdx.x) < work.heads) ptx::st_shared_f32(shared_address + C::kSinkOffset + 4 * threadIdx.x, sink * kLog2E);
        sync_score_warps<C>();
    } else {
        feeder.count_blocks();
        feeder.find_first();
        feeder.copy(0, Stage());
    }
    ptx::barrier_cluster_wait();   // all CTAs have begun
    decode_tile<C>(p, shared, work, role, feeder, q, as_bf16, warp, lane);
}

}  // namespace flash_mla::sm90::head16
