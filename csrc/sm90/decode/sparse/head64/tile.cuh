// A tile of 64 rows, all of which are computed: two warpgroups load and dequantize keys, two multiply.
#pragma once
#include "ptx/warpgroup.cuh"
#include "sm90/decode/sparse/head64/merge.cuh"
#include "sm90/decode/sparse/head64/producer.cuh"
#include "sm90/decode/sparse/head64/query.cuh"
#include "sm90/decode/sparse/token_heads.cuh"

namespace flash_mla::sm90::head64 {

// What a cluster works on. Two tiles of a token are neighbours.
struct TileWork : TokenHeads {
    int rows;   // that exist

    __device__ __forceinline__ TileWork(const SparseDecodeParams& p, uint32_t cluster)
        : TileWork(p, cluster, /*two_tiles=*/p.h_q > kLargeTile) {}

   private:
    __device__ __forceinline__ TileWork(const SparseDecodeParams& p, uint32_t cluster, bool two_tiles)
        : TokenHeads(p, cluster >> two_tiles, kLargeTile * (cluster & two_tiles)), rows(min(kLargeTile, p.h_q - first_head)) {}
};

// Where the CTA's results go. Worked out at the end: it costs less than registers in the loop.
__device__ __forceinline__ OutputTile output_tile(const SparseDecodeParams& p) {
    const TileWork work(p, ptx::uniform(ptx::opaque(ptx::clusterid_x())));
    return {work.out(p), p.out_stride_h, work.lse(p), p.s_q.divisor, work.rows, p.out_aligned16, p.out_aligned4};
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
    if (p.splits == 1) return;
    stand_by_while_sending();
    ptx::setmaxnreg_inc<C::kCommonRegisters>();
}

// By the consumers. (Q is stored before more registers are taken: that waits for the producers to give theirs up.)
// kLaneIsKept: see padded_kernel.cuh; the thread's number follows from `lane` then, not from threadIdx.x.
template <class C, bool kLaneIsKept>
__device__ __forceinline__ void consume_tile(const SparseDecodeParams& p, uint32_t shared, SplitsOfTile splits, TileQuery<C>& query, int blocks,
                                             int warp, int lane) {
    query.store(shared, threadIdx.x);
    ptx::setmaxnreg_inc<C::kConsumerRegisters>();
    ptx::barrier_sync(kConsumerBarrier, C::kConsumers);

    const int half = warp / 4, thread = kLaneIsKept ? 32 * (warp % 4) + lane : threadIdx.x % kWarpgroup;
    const Consumer<C> self = {shared, half, thread, warp % 4, lane};
    Accumulators<C> out;
    RowSums rows;
    if (half == 0) score<C>(self, out, rows, blocks, p.scale_log2);
    else follow<C>(self, out, blocks);
    share_row_sums<C>(self, out, rows);
    if (splits.count == 1) {
        write_alone<C>(out, rows, output_tile(p), shared, half, thread);
    } else {
        send_to_owners<C>(out, rows, shared, splits, half, thread);
        ptx::setmaxnreg_dec<C::kCommonRegisters>();
    }
}

// By all, behind that.
template <class C>
__device__ __forceinline__ void merge_tile(const SparseDecodeParams& p, uint32_t shared) {
    if (p.splits > 1) write_units<C>(output_tile(p), shared, SplitsOfTile(p));
}

}  // namespace flash_mla::sm90::head64
