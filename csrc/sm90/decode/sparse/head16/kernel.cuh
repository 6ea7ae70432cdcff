// Sparse decode with a head tile of 16 rows (or 8): load keys -> scores -> softmax weights -> accumulate -> merge.
// docs/sparse_decode.md explains the data flow.
#pragma once
#include "sm90/decode/sparse/head16/tile.cuh"

namespace flash_mla::sm90::head16 {

// Grid: x = splits * tokens, in clusters of `splits`; y = head tiles, and the zero row's (ClusterWork).
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
    const uint16_t* q_token = p.q + static_cast<uint64_t>(work.batch) * p.q_stride_b + static_cast<uint64_t>(work.row) * p.q_stride_s;
    const QueryRows q_rows = {ptx::opaque(q_token + static_cast<uint64_t>(work.first_head) * p.q_stride_h), p.q_stride_h,
                              work.heads, p.q_aligned16};
    if (threadIdx.x == 0) init_barriers<C>(feeder.ring, splits, token, work.is_zero_row);
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
    const bool is_rope_tile = C::Record::kRopeInV && warp == C::kTiles - 1;
    RowSearch<C> search(splits.rank, splits.count, warp);
    if (work.is_zero_row) {
        search.load(p, q_token, lane);
        q_tile.clear(), q.clear_rope();
    } else if (role.scores) {
        q_tile.load(q_rows, warp, is_rope_tile, lane);
        q.load_rope(q_rows, role.part, lane);
    }
    // The sinks of the tile or, for the zero row, of all heads. By whole warps: a divergent branch would hold up the loads.
    const int sinks = work.is_zero_row ? work.rows : work.heads;
    const float sink = warp < (work.is_zero_row ? kMaxHeads / 32 : 1) ? load_sink(p, work.first_head + min(static_cast<int>(threadIdx.x), sinks - 1)) : 0.f;
    feeder.count_blocks();
    const int blocks = feeder.blocks;
    // Fetching keys for a tile that is then skipped takes bandwidth from others.
    const bool copies_at_once = !C::kSkipsZeros || work.first_head < kLikelyHeads;
    if (!role.scores) {
        feeder.locate_first();
        if (copies_at_once) feeder.copy(0, Stage());
    }

    // What kind of tile it is, by the warps that have loaded it; then Q is converted.
    TileFlags tile_flags = {0};
    if (role.scores) tile_flags = q_tile.examine(q_rows, is_rope_tile, lane);
    if constexpr (C::kSkipsZeros) {
        if (role.scores) tile_flags.bits |= q.rope_flags();
        if (work.is_zero_row) search.finish(p, q_token, shared_address, warp, lane);
    }
    if (role.scores || C::kSkipsZeros) tile_flags.share<C>(shared_address, warp, lane);
    if constexpr (C::kSkipsZeros) {
        if (!tile_flags.nonzero() && !work.is_zero_row) {   // skipped: all its CTAs, which have begun nothing but copies
            if (copies_at_once && blocks > 0) feeder.ring.wait(Stage());
            return;
        }
        if (!role.scores && !copies_at_once) feeder.copy(0, Stage());
    }
    if (static_cast<int>(threadIdx.x) < sinks) ptx::st_shared_f32(shared_address + C::kSinkOffset + 4 * threadIdx.x, sink);
    if (role.scores) {
        Query<C>::convert(q_tile, tile_flags.too_wide(), shared, p.scale_log2, warp, lane);
        sync_score_warps<C>();
    }
    ptx::barrier_cluster_wait();   // all CTAs have begun
    decode_tile<C>(p, shared, splits, work, role, feeder, q, tile_flags.too_wide(), warp, lane);
}

}  // namespace flash_mla::sm90::head16
