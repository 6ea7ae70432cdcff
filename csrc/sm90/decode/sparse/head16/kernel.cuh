// Sparse decode with a head tile of 16 rows (or 8): load keys -> scores -> softmax weights -> accumulate -> merge.
// docs/sparse_decode.md explains the data flow.
#pragma once
#include "sm90/decode/sparse/head16/feeder.cuh"
#include "sm90/decode/sparse/head16/merge.cuh"

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
    if (threadIdx.x == 0) {
        feeder.ring.init_barriers();
        ptx::mbarrier_init(shared_address + C::kShareBarrierOffset, 32 * C::kScoreWarps);
        ptx::st_shared_u32(shared_address + C::kTokenOffset, token);
        expect_peers<C>(shared_address, splits, work.is_zero_row ? 4 : 0);
    }
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
    const int sinks = work.is_zero_row ? p.h_q : work.heads;
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

    // Block by block.
    const bool alone = splits.count == 1 && !work.is_zero_row;   // nothing to merge
    Stage stage;
    if (role.scores) {
        if constexpr (C::kMovesRegisters) ptx::setmaxnreg_inc<C::kScoreRegisters>();
        const ScoreAddresses<C> score_at(shared_address, role.first_key, role.part, lane);
        q.convert(q_tile, tile_flags.too_wide(), shared, p.scale_log2, role.part, warp, lane);
        Softmax<C> softmax;
        softmax.clear();
        ptx::barrier_cluster_wait();   // all CTAs have begun
        ScoreBuffer buffer;
        for (int i = 0; i < blocks; ++i) {
            feeder.ring.wait(stage);
            if (q.is_bf16) compute_scores<C, true>(q, p.scale_log2, score_at, stage, buffer, role.part, lane);
            else compute_scores<C, false>(q, p.scale_log2, score_at, stage, buffer, role.part, lane);
            sync_score_warps<C>();   // the block's scores are there
            softmax.hand_over(shared_address, stage, buffer, i == 0, warp, lane);
            stage = stage.next<C>(), buffer = buffer.other<C>();
        }
        // The log-sum-exps go round. When all warps of the cluster are done with their last block's scores and weights, the place
        // of these is free to receive.
        softmax.publish(shared_address, splits, warp, lane);
        if (work.is_zero_row && warp == 0) publish_nonzero_tiles<C>(shared_address, splits.rank, splits.count, lane);
        ptx::barrier_cluster_arrive_relaxed();
        if constexpr (C::kSkipsZeros) sync_score_warps<C>();   // the own nonzero tiles
        ptx::mbarrier_wait(shared_address + C::kLseBarrierOffset, 0);
        merge_sums<C>(p, softmax, shared_address, splits, work.is_zero_row, warp, lane);
        if (alone) return;
        sync_score_warps<C>();   // the sinks' factors
        ptx::barrier_cluster_wait();
        if constexpr (C::kMovesRegisters) ptx::setmaxnreg_dec<128>();
    } else {
#pragma unroll
        for (int i = 1; i < C::kStages; ++i) feeder.copy(i, Stage::make<C>(i));
        feeder.load_next_slots(C::kBlocksPerRound);
        const uint32_t value_at = value_address(shared_address, role, lane);
        Accumulator<C> acc;
        acc.clear();
        ptx::barrier_cluster_wait();   // all CTAs have begun
        for (int i = 0; i < blocks; ++i) {
            WeightFragments<C> weights;
            feeder.ring.wait(stage);
            ptx::mbarrier_wait(shared_address + C::kWeighedBarrierOffset + stage.barrier, stage.parity);
            const bool as_bf16 = take_weights<C>(weights, acc, weight_place<C>(shared_address, stage), role, lane);
            acc.multiply(weights, value_at + stage.rows, role.value_is_rope, as_bf16);
            if (i + 1 == blocks) break;
            sync_value_warps<C>();   // nobody needs the block any more
            feeder.copy(i + C::kStages, stage);
            stage = stage.next<C>();
        }
        ptx::barrier_cluster_arrive_relaxed();
        ptx::mbarrier_wait(shared_address + C::kShareBarrierOffset, 0);   // what the split counts, and the sinks' factors
        if (alone) {
            write_alone<C>(p, acc, role, shared_address, lane);
            return;
        }
        ptx::barrier_cluster_wait();
        send_partial<C>(acc, role, shared_address, splits, lane);
        if constexpr (C::kMovesRegisters) ptx::setmaxnreg_inc<128>();
    }

    // Add up, and write.
    const OutputTile tile = OutputTile::make<C>(p, shared_address, lane);
    const int parts = splits.own_units<C>() * 32;
    const UnitPart<C> part(p, tile, shared_address, splits, threadIdx.x);
    ptx::mbarrier_wait(shared_address + C::kPartialBarrierOffset, 0);
    __syncthreads();   // own units came by ordinary stores
    if (static_cast<int>(threadIdx.x) < parts) part.add_and_write(p, tile, shared_address, splits);
    for (int i = threadIdx.x + C::kThreads; i < parts; i += C::kThreads) {
        UnitPart<C>(p, tile, shared_address, splits, i).add_and_write(p, tile, shared_address, splits);
    }
    if constexpr (C::kSkipsZeros) {
        if (tile.zero_tiles != 0) {
            __syncthreads();
            write_zero_tiles<C>(p, tile, shared_address, splits);
        }
    }
}

}  // namespace flash_mla::sm90::head16
