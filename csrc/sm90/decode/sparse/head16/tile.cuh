// From a tile that has been loaded to its results: keys -> scores -> softmax weights -> accumulate -> merge.
#pragma once
#include "sm90/decode/sparse/head16/feeder.cuh"
#include "sm90/decode/sparse/head16/merge.cuh"
#include "sm90/decode/sparse/head16/weights.cuh"
#include "sm90/decode/sparse/head16/zero_rows.cuh"

namespace flash_mla::sm90::head16 {

// By one thread, before a barrier of the CTA and before the CTA first arrives at the barrier of the cluster, whose number is
// `cluster`.
template <class C>
__device__ __forceinline__ void init_barriers(const Ring<C>& ring, SplitsOfTile splits, uint32_t cluster) {
    ring.init_barriers();
    ptx::mbarrier_init(ring.shared + C::kShareBarrierOffset, 32 * C::kScoreWarps);
    if constexpr (C::kHasZeroColumn) {
        ptx::mbarrier_init(ring.shared + C::kLookBarrierOffset, 32 * C::kValueWarps);
        ptx::mbarrier_init(ring.shared + C::kZeroRowBarrierOffset, 1 + C::kPartialArrivals + 32);
        ptx::mbarrier_init(ring.shared + C::kZeroSumsBarrierOffset, splits.own_units<C>() * (kUnitDims / 2));
        ptx::st_shared_u32(ring.shared + C::kRejectedOffset, 0);
    }
    ptx::st_shared_u32(ring.shared + C::kClusterOffset, cluster);
    expect_peers<C>(ring.shared, splits);
    if constexpr (C::kHasZeroColumn) {
        ptx::mbarrier_arrive_expect_tx(ring.shared + C::kZeroRowBarrierOffset, (splits.count - 1) * splits.own_units<C>() * C::kZeroUnitBytes);
    }
}

// The first slots are in registers, the tile of Q in shared memory (`is_bf16`: as bf16), the first copies have begun, all CTAs of the cluster
// too, and the value warps have given registers up.
//
// With a zero column the tile may be rejected (zero_rows.cuh). Then no result is sent or written, and false is returned: each thread has its
// registers again, and all CTAs of the cluster have multiplied their last block. Whoever overwrites what is in shared memory waits for the
// others of the CTA before.
template <class C>
__device__ __forceinline__ bool decode_tile(const SparseDecodeParams& p, char* shared, const ClusterWork<C>& work,
                                            const WarpRole<C>& role, KeyFeeder<C>& feeder, Query<C>& q, bool is_bf16, int warp, int lane) {
    const uint32_t shared_address = feeder.ring.shared;
    const int blocks = feeder.blocks;

    // Block by block.
    const bool writes_alone = !C::kHasZeroColumn && p.splits == 1;   // nothing to merge; beside a zero column, as with more, for want of room for code
    Stage stage;
    if (role.scores) {
        if constexpr (C::kMovesRegisters) ptx::setmaxnreg_inc<C::kScoreRegisters>();
        const ScoreAddresses<C> score_at(shared_address, role.first_key, role.part, lane);
        q.take(C::kMayBeWide && is_bf16, shared, role.part, lane);
        Softmax<C> softmax;
        softmax.clear();
        uint32_t buffer = 0;   // for scores: 0 or the second
        for (int i = 0; i < blocks; ++i) {
            feeder.ring.wait(stage);
            bool are_finite;
            if (C::kMayBeWide && q.is_bf16) are_finite = compute_scores<C, C::kMayBeWide>(q, p.scale_log2, score_at, stage, buffer, role.part, lane);
            else are_finite = compute_scores<C, false>(q, p.scale_log2, score_at, stage, buffer, role.part, lane);
            if (C::kHasZeroColumn && !are_finite) reject<C>(shared_address);
            sync_score_warps<C>();   // the block's scores are there
            softmax.hand_over(shared_address, stage, buffer, i == 0, warp, lane);
            stage = stage.next<C>(), buffer = C::kScoreBytes - buffer;
        }
        // The log-sum-exps go round. When all warps of the cluster are done with their last block's scores and weights, the place
        // of these is free to receive.
        const SplitsOfTile splits(p);
        bool is_rejected = false;
        if constexpr (C::kHasZeroColumn) {
            ptx::mbarrier_wait(shared_address + C::kLookBarrierOffset, 0);
            if (warp == 0) is_rejected = is_rejected_here<C>(shared_address);
        }
        softmax.publish(shared_address, splits, is_rejected, warp, lane);
        if (warp == 1) find_unit_places<C>(shared_address, splits, lane);
        ptx::barrier_cluster_arrive_relaxed();
        ptx::mbarrier_wait(shared_address + C::kLseBarrierOffset, 0);
        if (C::kHasZeroColumn && is_rejected_anywhere<C>(shared_address, splits, lane)) {
            ptx::mbarrier_arrive(shared_address + C::kShareBarrierOffset);
            ptx::barrier_cluster_wait();
            ptx::setmaxnreg_dec<128>();
            return false;
        }
        merge_sums<C>(p, softmax, shared_address, splits, warp, lane);
        if (writes_alone) return true;
        sync_score_warps<C>();   // the sinks' factors
        ptx::barrier_cluster_wait();
        if constexpr (C::kMovesRegisters) ptx::setmaxnreg_dec<128>();
    } else {
        const auto copy_ahead = [&feeder] {
#pragma unroll
            for (int i = 1; i < C::kStages; ++i) feeder.copy(i, Stage::make<C>(i));
            feeder.load_next_slots(C::kBlocksPerRound);
        };
        if constexpr (C::kHasZeroColumn) {   // and meanwhile the rows behind the tile travel
            if (search_rows<C>(p, work, role.value_warp, lane, copy_ahead)) reject<C>(shared_address);
            ptx::mbarrier_arrive(shared_address + C::kLookBarrierOffset);
        } else {
            copy_ahead();
        }
        uint32_t value_at = value_address(shared_address, role, lane);
        Accumulator<C> acc;
        acc.clear();
        ValueScales<C> scales;
        if (blocks > 0) {   // (ahead of the loop, for a branch less in it; V4's RoPE has no scales, and uses none of this)
            feeder.ring.wait(stage);
            scales.begin(shared_address, role);
        }
        for (int i = 0; i < blocks; ++i) {
            // With a zero column registers are short: what follows from the lane is mostly worked out anew.
            const int same_lane = C::kHasZeroColumn ? ptx::opaque(lane) : lane;
            if constexpr (C::kHasZeroColumn) value_at = value_address(shared_address, role, same_lane);
            feeder.ring.wait(stage);
            if (!role.value_is_rope) scales.prepare_factors(acc, shared_address, stage, role, same_lane);
            ptx::mbarrier_wait(shared_address + C::kWeighedBarrierOffset + stage.barrier, stage.parity);
            const uint32_t place = weight_place<C>(shared_address, stage);
            const uint2 updates = load_updates<C>(place);
            WeightFragments<C> weights;
            take_weights<C>(weights, shared_address, place, scales, role, same_lane);
            follow_updates<C>(acc, updates, place, same_lane);
            acc.multiply(weights, value_at + stage.rows, role.value_is_rope, scales.are_spread());
            if (i + 1 == blocks) break;
            feeder.ring.release(stage);
            // The stage of the block before is filled again, not this one's: nobody has to wait until the slowest warp is done with it.
            if (i > 0 && i - 1 + C::kStages < blocks) {
                const Stage before = stage.previous<C>();
                feeder.ring.wait_until_free(before);
                feeder.refill(i - 1 + C::kStages, before);
            }
            stage = stage.next<C>();
        }
        ptx::barrier_cluster_arrive_relaxed();
        ptx::mbarrier_wait(shared_address + C::kShareBarrierOffset, 0);   // what the split counts, and the sinks' factors
        if (C::kHasZeroColumn && is_rejected_anywhere<C>(shared_address, SplitsOfTile(p), lane)) {
            ptx::barrier_cluster_wait();
            ptx::setmaxnreg_inc<128>();
            return false;
        }
        if (writes_alone) {
            write_alone<C>(p, acc, scales.exponent, role, shared_address, lane);
            return true;
        }
        ptx::barrier_cluster_wait();
        send_partial<C>(acc, scales.exponent, role, shared_address, SplitsOfTile(p), lane);
        if constexpr (C::kMovesRegisters) ptx::setmaxnreg_inc<128>();
    }

    // Add up, and write.
    const SplitsOfTile splits(p);
    const OutputTile tile = OutputTile::make<C>(p, shared_address);
    const int parts = splits.own_units<C>() * 32;
    if constexpr (C::kHasZeroColumn) write_zero_rows<C>(p, tile, shared_address, splits);   // while the heads' units travel
    const UnitPart<C> part(p, tile, shared_address, splits, threadIdx.x);
    ptx::mbarrier_wait(shared_address + C::kPartialBarrierOffset, 0);
    if (static_cast<int>(threadIdx.x) < parts) part.add_and_write(p, splits);
    static_assert(C::kUnits / 2 * 32 <= C::kThreads);   // of two splits or more a thread has no second part
    if constexpr (C::kHasZeroColumn) {
        for (int i = threadIdx.x + C::kThreads; i < parts; i += C::kThreads) {
            UnitPart<C>(p, tile, shared_address, splits, i).add_and_write(p, splits);
        }
    }
    return true;
}

}  // namespace flash_mla::sm90::head16
