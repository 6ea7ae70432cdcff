// Sparse decode with a head tile of 64 rows, or of 16 if those behind are zero: where callers may have padded. docs/head64.md explains
// the data flow.
//
// They pad 8 or 16 heads to 64 with zero rows. The host cannot look at q, so the kernel does, while the first slots are on their
// way: a tile that looks padded is computed as one of 16 rows and a zero row (head16/), in the same CTAs, which look meanwhile
// whether it really is. If not, or if f16 cannot hold the 16 rows or a score of the first is not finite, it is computed again, as any other: as
// it is (tile.cuh). Both kinds of tile have warps 0-7 multiply Q and warps 8-15 find keys, the same ones.
#pragma once
#include "ptx/warpgroup.cuh"
#include "sm90/decode/sparse/head16/tile.cuh"
#include "sm90/decode/sparse/head64/padding.cuh"
#include "sm90/decode/sparse/head64/tile.cuh"

namespace flash_mla::sm90::head64 {

// Grid: x = splits * tokens, in clusters of `splits`. Rows of q are aligned to 16 bytes.
template <class C>
__global__ void __launch_bounds__(C::kThreads, 1) maybe_padded_kernel(const __grid_constant__ SparseDecodeParams p) {
    using Small = typename C::SmallTile;
    extern __shared__ __align__(1024) char shared_memory[];
    const uint32_t shared = ptx::shared_address(shared_memory);
    const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
    const SplitsOfTile splits(p);
    const uint32_t cluster = ptx::clusterid_x();
    const head16::ClusterWork<Small> work(p, cluster);
    const head16::WarpRole<Small> role(warp);

    // What does not depend on the kernel before: addresses and barriers.
    head16::KeyFeeder<Small> feeder(p, shared, work, splits.rank, role.value_warp, lane);
    const uint16_t* q = work.query(p);
    if (threadIdx.x == 0) {
        head16::init_barriers<Small>(feeder.ring, splits, cluster);
        init_barriers<C>(shared, splits);
    }
    __syncthreads();
    ptx::barrier_cluster_arrive_relaxed();
    ptx::griddepcontrol_launch_dependents();
    ptx::griddepcontrol_wait();   // q, the indices and the cache may come from the kernel before

    // Load side by side: the first slots, the lengths, the first rows of Q, a sample of the others, and the sinks. Both kinds of
    // warps take the same sample, for themselves.
    feeder.load_first(work.batch, !role.scores);
    SampleBehind<C> sample;
    sample.load(p, q, work.rows, lane);
    head16::Query<Small> small_q;
    bool is_padded;
    if (role.scores) {
        const int head = threadIdx.x;
        const bool is_rope_tile = C::Record::kRopeInV && warp == Small::kTiles - 1;
        const head16::QueryRows q_rows = {q, p.q_stride_h, work.heads, true};
        head16::QueryTile<Small> q_tile;
        q_tile.load(q_rows, warp, is_rope_tile, lane);
        small_q.load_rope(q_rows, role.part, lane);
        float sink = 0.f;
        if (warp < C::kHeads / 32) sink = load_sink(p, work.first_head + min(head, work.rows - 1));
        feeder.count_blocks();
        is_padded = !sample.has_nonzero(work.rows);
        if (is_padded) {
            if (q_tile.examine(q_rows, is_rope_tile, lane)) head16::reject<Small>(shared);   // too wide for f16
            head16::Query<Small>::convert(q_tile, false, shared_memory, p.scale_log2, warp, lane);
            if (head < C::kHeads) ptx::st_shared_f32(shared + Small::kSinkOffset + 4 * head, sink * kLog2E);
            head16::sync_score_warps<Small>();
        }
    } else {
        feeder.count_blocks();
        feeder.find_first();
        is_padded = !sample.has_nonzero(work.rows);
        if (is_padded) feeder.copy(0, head16::Stage());
        else KeyFinder<C>::enter(feeder.found, 0, shared, role.value_warp, lane);
    }
    if (is_padded) {
        ptx::barrier_cluster_wait();   // all CTAs have begun
        if (!role.scores) ptx::setmaxnreg_dec<Small::kValueRegisters>();
        if (head16::decode_tile<Small>(p, shared_memory, work, role, feeder, small_q, /*is_bf16=*/false, warp, lane)) return;
        __syncthreads();   // nobody in the CTA looks at anything of that tile any more
        ptx::barrier_cluster_arrive_relaxed();
    }
    // Anew, rather than kept. (`splits` is kept all the same: ptxas spills without it.)
    const SplitsOfTile same_splits(p);
    const TileWork same(p, ptx::uniform(ptx::opaque(ptx::clusterid_x())));
    SplitKeys keys = {feeder.lists, same_splits.rank, same_splits.rank * p.groups_per_split, static_cast<int>(ptx::uniform(feeder.blocks))};
    keys.lists.find(p, same);
    const int producer = ptx::opaque(warp) - C::kConsumers / 32;
    const int kept_lane = __shfl_sync(0xffffffffu, lane, lane);   // or ptxas reads threadIdx.x again in the loops, which takes long
    // (In this order: ptxas puts the producers' code, which is needed sooner, in front.)
    if (producer < 0) {
        TileQuery<C> query;
        query.load(p, /*q_is_aligned16=*/true, same.query(p), same.first_head, same.rows, threadIdx.x);
        consume_tile<C, true>(p, shared, splits, query, keys.blocks, warp, kept_lane);
    } else {
        // If it only looked so.
        if (is_padded) KeyFinder<C>::find(p, keys, 0, KeyFinder<C>::load_slot(p, keys, 0, producer, lane), shared, producer, lane);
        produce_tile<C>(p, shared, keys, producer, kept_lane);
    }
    merge_tile<C>(p, shared);
}

}  // namespace flash_mla::sm90::head64
