// Sparse decode with a head tile of 64 rows, or of 16 if those behind are zero. docs/head64.md explains the data flow.
//
// Callers pad 8 or 16 heads to 64 with zero rows. The host cannot look at q, so the kernel does, while the first slots are on their
// way: a tile whose rows from 16 on are zero becomes one of 16 rows and a zero row (head16/), in the same CTAs, if f16 can hold the 16 and
// the first is finite. The others are computed as they are (tile.cuh). Both kinds have warps 0-7 multiply Q and warps 8-15 find keys, the same ones.
#pragma once
#include "sm90/decode/sparse/head16/tile.cuh"
#include "sm90/decode/sparse/head64/padding.cuh"
#include "sm90/decode/sparse/head64/tile.cuh"

namespace flash_mla::sm90::head64 {

// Grid: x = splits * head tiles * tokens, in clusters of `splits`; the tiles of a token are neighbours and read the same
// keys at about the same time.
template <class C>
__global__ void __launch_bounds__(C::kThreads, 1) sparse_decode_kernel(const __grid_constant__ SparseDecodeParams p) {
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
    const auto first_row = [&p](const head16::ClusterWork<Small>& work) {
        return ptx::opaque(p.q + static_cast<uint64_t>(work.batch) * p.q_stride_b + static_cast<uint64_t>(work.row) * p.q_stride_s +
                           static_cast<uint64_t>(work.first_head) * p.q_stride_h);
    };
    const uint16_t* q = first_row(work);
    if (threadIdx.x == 0) {
        head16::init_barriers<Small>(feeder.ring, splits, cluster, false);
        RowsBehind<C>::init_barrier(shared);
        init_barriers<C>(shared, splits);
    }
    __syncthreads();
    ptx::barrier_cluster_arrive_relaxed();
    ptx::griddepcontrol_launch_dependents();
    ptx::griddepcontrol_wait();   // q, the indices and the cache may come from the kernel before

    // Load side by side: the first slots, the lengths, the first rows of Q, a sample of the others, and the sinks.
    feeder.load_first(work.batch, !role.scores);
    const int head = threadIdx.x;
    head16::Query<Small> small_q;
    bool looks_padded, is_padded = false;
    float sink = 0.f;
    // If it looks padded, begin as if it was, and look at everything meanwhile. Both kinds of warps take the same sample, for themselves.
    if (role.scores) {
        const bool is_rope_tile = C::Record::kRopeInV && warp == Small::kTiles - 1;
        const head16::QueryRows q_rows = {q, p.q_stride_h, work.heads, p.q_aligned16};
        RowsBehind<C> rows_behind = {q, p.q_stride_h, shared, work.rows, warp, lane, p.q_aligned16};
        rows_behind.load_sample();
        head16::QueryTile<Small> q_tile;
        q_tile.load(q_rows, warp, is_rope_tile, lane);
        small_q.load_rope(q_rows, role.part, lane);
        if (warp < C::kHeads / 32) sink = load_sink(p, work.first_head + min(head, work.rows - 1));
        feeder.count_blocks();
        looks_padded = !ptx::barrier_any(head16::kScoreBarrier, C::kConsumers, rows_behind.sample_has_nonzero());
        if (looks_padded) {
            head16::TileFlags flags = q_tile.examine(q_rows, is_rope_tile, lane);
            flags.share<Small>(shared, warp, lane);
            head16::Query<Small>::convert(q_tile, false, shared_memory, p.scale_log2, warp, lane);
            if (head < work.rows) ptx::st_shared_f32(shared + Small::kSinkOffset + 4 * head, sink);
            is_padded = !ptx::uniform(__syncthreads_or(flags.too_wide()));
        }
    } else {
        RowsBehind<C> rows_behind = {q, p.q_stride_h, shared, work.rows, role.value_warp, lane, p.q_aligned16};
        rows_behind.load_sample();
        feeder.count_blocks();
        feeder.locate_first();
        looks_padded = !ptx::barrier_any(head16::kValueBarrier, C::kProducers, rows_behind.sample_has_nonzero());
        if (looks_padded) {
            rows_behind.copy();
            feeder.copy(0, head16::Stage());
            is_padded = !ptx::uniform(__syncthreads_or(rows_behind.has_nonzero()));
        }
    }
    if (is_padded) {
        ptx::barrier_cluster_wait();   // all CTAs have begun
        if (!role.scores) ptx::setmaxnreg_dec<Small::kValueRegisters>();
        head16::decode_tile<Small>(p, shared_memory, splits, work, role, feeder, small_q, false, warp, lane);
        return;
    }
    if (head < C::kHeads) ptx::st_shared_f32(shared + C::kSinkOffset + 4 * head, sink);
    // Anew, rather than kept.
    const head16::ClusterWork<Small> same(p, ptx::uniform(ptx::opaque(ptx::clusterid_x())));
    const IndexLists lists = {index_list(p.source[0], same.batch, same.row), index_list(p.source[1], same.batch, same.row),
                              feeder.lists.main_length, feeder.lists.extra_length};
    const SplitKeys keys = {lists, splits.rank, splits.rank * p.groups_per_split, static_cast<int>(ptx::uniform(feeder.blocks))};
    // Copies of a first block that have begun go to the place of Q.
    const auto free_query = [&] {
        if (keys.blocks > 0 && looks_padded) feeder.ring.wait(head16::Stage());
    };
    decode_tile<C>(p, shared, splits, same.batch, same.row, same.first_head, same.rows, first_row(same), keys, feeder.slot, warp, lane, free_query);
}

}  // namespace flash_mla::sm90::head64
