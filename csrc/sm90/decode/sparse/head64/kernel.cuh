// Sparse decode with a head tile of 64 rows. docs/head64.md explains the data flow.
#pragma once
#include "sm90/decode/sparse/head64/tile.cuh"

namespace flash_mla::sm90::head64 {

// Grid: x = splits * head tiles * tokens, in clusters of `splits`; the tiles of a token are neighbours and read the same
// keys at about the same time.
template <class C>
__global__ void __launch_bounds__(C::kThreads, 1) sparse_decode_kernel(const __grid_constant__ SparseDecodeParams p) {
    extern __shared__ __align__(1024) char shared_memory[];
    const uint32_t shared = ptx::shared_address(shared_memory);
    const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0), lane = threadIdx.x % 32, producer = warp - C::kConsumers / 32;
    const SplitsOfTile splits(p);
    const TileWork work(p, ptx::clusterid_x());

    // What does not depend on the kernel before: addresses and barriers.
    SplitKeys keys;
    keys.lists.find(p, work), keys.split = splits.rank, keys.first_group = splits.rank * p.groups_per_split;
    if (threadIdx.x == 0) init_barriers<C>(shared, splits);
    __syncthreads();
    ptx::barrier_cluster_arrive_relaxed();
    ptx::griddepcontrol_launch_dependents();
    ptx::griddepcontrol_wait();   // q, the indices and the cache may come from the kernel before

    if (producer >= 0) {
        const int32_t slot = KeyFinder<C>::load_slot(p, keys, 0, producer, lane);
        keys.load_lengths(p, work.batch);
        KeyFinder<C>::find(p, keys, 0, slot, shared, producer, lane);
        produce_tile<C>(p, shared, keys, producer, lane);
    } else {
        keys.load_lengths(p, work.batch);
        TileQuery<C> query;
        query.load(p, p.q_aligned16, work.query(p), work.first_head, work.rows, threadIdx.x);
        consume_tile<C, false>(p, shared, splits, query, keys.blocks, warp, lane);
    }
    merge_tile<C>(p, shared);
}

}  // namespace flash_mla::sm90::head64
