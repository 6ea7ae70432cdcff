// A tile of 64 rows, all of which are computed: two warpgroups load and dequantize keys, two multiply.
#pragma once
#include "ptx/warpgroup.cuh"
#include "sm90/decode/sparse/head16/roles.cuh"
#include "sm90/decode/sparse/head64/merge.cuh"
#include "sm90/decode/sparse/head64/producer.cuh"
#include "sm90/decode/sparse/head64/query.cuh"

namespace flash_mla::sm90::head64 {

// What a cluster works on: of up to 64 rows, a padded tile and its zero rows likewise.
template <class C>
using TileWork = head16::ClusterWork<typename C::SmallTile>;

// Where its results go.
template <class C>
__device__ __forceinline__ OutputTile output_tile(const SparseDecodeParams& p, const TileWork<C>& work) {
    OutputTile tile;
    tile.out = p.out + static_cast<uint64_t>(work.batch) * p.out_stride_b + static_cast<uint64_t>(work.row) * p.out_stride_s +
               static_cast<uint64_t>(work.first_head) * p.out_stride_h;
    tile.out_stride = p.out_stride_h;
    tile.lse = p.lse + (static_cast<uint64_t>(work.batch) * p.h_q + work.first_head) * p.s_q.divisor + work.row;
    tile.lse_stride = p.s_q.divisor;
    tile.heads = work.rows;
    tile.aligned16 = p.out_aligned16;
    tile.aligned4 = p.out_aligned4;
    return tile;
}

// By one thread, before a barrier of the CTA and before the CTA first arrives at the barrier of the cluster.
template <class C>
__device__ __forceinline__ void init_barriers(uint32_t shared, SplitsOfTile splits) {
#pragma unroll
    for (int i = 0; i < C::kStages; ++i) {
        ptx::mbarrier_init(shared + C::kFullOffset + 16 * i, C::kProducers);
        ptx::mbarrier_init(shared + C::kFullOffset + 16 * i + 8, C::kProducers);
        ptx::mbarrier_init(shared + C::kEmptyOffset + 8 * i, C::kConsumers);
        ptx::mbarrier_init(shared + C::kWeighedOffset + 8 * i, kWarpgroup);
    }
    expect_peers<C>(shared, splits);
}

// By the producers, who have found KeyFinder's batch 0; `warp`: of theirs.
template <class C>
__device__ __forceinline__ void produce_tile(const SparseDecodeParams& p, uint32_t shared, const SplitKeys& keys, int warp, int lane) {
    ptx::setmaxnreg_dec<C::kProducerRegisters>();
    if (keys.blocks > 0) produce<C>(p, keys, shared, warp, lane);
}

// By the consumers. store_sinks() puts them to shared memory, unless they are there.
template <class C, class StoreSinks>
__device__ __forceinline__ void consume_tile(const SparseDecodeParams& p, bool q_aligned16, uint32_t shared, SplitsOfTile splits,
                                             const TileWork<C>& work, int blocks, int warp, int lane, StoreSinks store_sinks) {
    ptx::setmaxnreg_inc<C::kConsumerRegisters>();
    load_query<C>(work.query(p), p.q_stride_h, work.rows, q_aligned16, shared, threadIdx.x);
    store_sinks();
    ptx::barrier_sync(kConsumerBarrier, C::kConsumers);

    const int half = warp / 4, thread = threadIdx.x % kWarpgroup;
    const Consumer<C> self = {shared, half, thread, warp % 4, lane};
    Accumulators<C> out;
    RowSums rows;
    if (half == 0) score<C>(self, out, rows, blocks, p.scale_log2);
    else follow<C>(self, out, blocks);
    share_row_sums<C>(self, out, rows);

    // Anew: it costs less than registers in the loop.
    const OutputTile tile = output_tile<C>(p, TileWork<C>(p, ptx::uniform(ptx::opaque(ptx::clusterid_x()))));
    if (splits.count == 1) write_alone<C>(out, rows, tile, shared, half, thread);
    else merge<C>(out, rows, tile, shared, splits, half, thread);
}

}  // namespace flash_mla::sm90::head64
