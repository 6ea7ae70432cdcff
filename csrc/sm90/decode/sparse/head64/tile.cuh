// A tile of 64 rows, all of which are computed: two warpgroups load and dequantize keys, two multiply.
#pragma once
#include "sm90/decode/sparse/head64/merge.cuh"
#include "sm90/decode/sparse/head64/producer.cuh"
#include "sm90/decode/sparse/head64/query.cuh"

namespace flash_mla::sm90::head64 {

// Where the results of a token's heads from first_head on go.
__device__ __forceinline__ OutputTile output_tile(const SparseDecodeParams& p, uint32_t batch, uint32_t row, int first_head, int heads) {
    OutputTile tile;
    tile.out = p.out + static_cast<uint64_t>(batch) * p.out_stride_b + static_cast<uint64_t>(row) * p.out_stride_s +
               static_cast<uint64_t>(first_head) * p.out_stride_h;
    tile.out_stride = p.out_stride_h;
    tile.lse = p.lse + (static_cast<uint64_t>(batch) * p.h_q + first_head) * p.s_q.divisor + row;
    tile.lse_stride = p.s_q.divisor;
    tile.heads = heads;
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

// `first_slot`: of KeyFinder's batch 0, in the producers' hands. `q`: the tile's first row. The consumers call free_query before they
// write Q to shared memory.
template <class C, class FreeQuery>
__device__ __forceinline__ void decode_tile(const SparseDecodeParams& p, uint32_t shared, SplitsOfTile splits, uint32_t batch, uint32_t row,
                                            int first_head, int heads, const uint16_t* q, const SplitKeys& keys, int32_t first_slot,
                                            int warp, int lane, FreeQuery free_query) {
    if (warp >= C::kConsumers / 32) {
        ptx::setmaxnreg_dec<C::kProducerRegisters>();
        if (keys.blocks > 0) produce<C>(p, keys, first_slot, shared, ptx::opaque(warp) - C::kConsumers / 32, lane);
    } else {
        ptx::setmaxnreg_inc<C::kConsumerRegisters>();
        load_query<C>(q, p.q_stride_h, heads, p.q_aligned16, shared, threadIdx.x, free_query);
        ptx::barrier_sync(kConsumerBarrier, C::kConsumers);

        const int half = warp / 4, thread = threadIdx.x % kWarpgroup;
        const Consumer<C> self = {shared, half, thread, warp % 4, lane};
        Accumulators<C> out;
        RowSums rows;
        if (half == 0) score<C>(self, out, rows, keys.blocks, p.scale_log2);
        else follow<C>(self, out, keys.blocks);
        share_row_sums<C>(self, out, rows);

        const OutputTile tile = output_tile(p, batch, row, first_head, heads);
        if (splits.count == 1) write_alone<C>(out, rows, tile, shared, half, thread);
        else merge<C>(out, rows, tile, shared, splits, half, thread);
    }
}

}  // namespace flash_mla::sm90::head64
