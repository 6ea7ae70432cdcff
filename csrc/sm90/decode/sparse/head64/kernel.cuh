// Sparse decode with a head tile of 64 rows: two warpgroups load and dequantize keys, two multiply. docs/head64.md explains
// the data flow.
#pragma once
#include "sm90/decode/sparse/head64/merge.cuh"
#include "sm90/decode/sparse/head64/producer.cuh"
#include "sm90/decode/sparse/head64/query.cuh"

namespace flash_mla::sm90::head64 {

// Which token and heads a CTA works on.
template <class C>
struct CtaPlace {
    uint32_t batch, row;
    int first_head, heads;

    __device__ __forceinline__ explicit CtaPlace(const SparseDecodeParams& p) {
        const uint32_t cluster = ptx::opaque(ptx::clusterid_x());   // opaque: worked out twice rather than kept
        const int two_tiles = p.h_q > C::kHeads;                    // h_q is at most 128
        const uint32_t token = cluster >> two_tiles;
        first_head = C::kHeads * (cluster & two_tiles);
        heads = min(C::kHeads, p.h_q - first_head);
        batch = p.s_q.divide(token), row = token - batch * p.s_q.divisor;
    }
    __device__ __forceinline__ OutputTile output(const SparseDecodeParams& p) const {
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
};

// Grid: x = splits * head tiles * tokens, in clusters of `splits`; the tiles of a token are neighbours and read the same
// keys at about the same time.
template <class C>
__global__ void __launch_bounds__(C::kThreads, 1) sparse_decode_kernel(const __grid_constant__ SparseDecodeParams p) {
    extern __shared__ __align__(1024) char shared_memory[];
    const uint32_t shared = ptx::shared_address(shared_memory);
    const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
    const SplitsOfTile splits(p);
    const CtaPlace<C> place(p);

    // What does not depend on the kernel before: addresses and barriers.
    SplitKeys keys;
    keys.lists.main = index_list(p.source[0], place.batch, place.row);
    keys.lists.extra = index_list(p.source[1], place.batch, place.row);
    keys.split = splits.rank, keys.first_group = splits.rank * p.groups_per_split;
    if (threadIdx.x == 0) {
#pragma unroll
        for (int i = 0; i < C::kStages; ++i) {
            ptx::mbarrier_init(shared + C::kFullOffset + 16 * i, C::kProducers);
            ptx::mbarrier_init(shared + C::kFullOffset + 16 * i + 8, C::kProducers);
            ptx::mbarrier_init(shared + C::kEmptyOffset + 8 * i, C::kConsumers);
            ptx::mbarrier_init(shared + C::kWeighedOffset + 8 * i, kWarpgroup);
        }
        expect_peers<C>(shared, splits);
    }
    __syncthreads();
    ptx::barrier_cluster_arrive_relaxed();
    ptx::griddepcontrol_launch_dependents();
    ptx::griddepcontrol_wait();   // q, the indices and the cache may come from the kernel before

    auto count_blocks = [&] {
        keys.lists.main_length = index_list_length(p.source[0], place.batch);
        keys.lists.extra_length = index_list_length(p.source[1], place.batch);
        const int live = max(0, live_groups(p, splits.rank, keys.lists.main_length, keys.lists.extra_length));
        keys.blocks = (live + C::kKeyGroups - 1) / C::kKeyGroups;
    };
    if (warp >= C::kConsumers / 32) {
        ptx::setmaxnreg_dec<C::kProducerRegisters>();
        const int producer_warp = warp - C::kConsumers / 32;
        const int32_t first_slot = KeyFinder<C>::load_slot(p, keys, 0, producer_warp, lane);
        count_blocks();
        if (keys.blocks > 0) produce<C>(p, keys, first_slot, shared, producer_warp, lane);
    } else {
        ptx::setmaxnreg_inc<C::kConsumerRegisters>();
        count_blocks();
        const uint16_t* q = p.q + static_cast<uint64_t>(place.batch) * p.q_stride_b + static_cast<uint64_t>(place.row) * p.q_stride_s +
                            static_cast<uint64_t>(place.first_head) * p.q_stride_h;
        load_query<C>(q, p.q_stride_h, place.heads, p.q_aligned16, shared, threadIdx.x);
        if (threadIdx.x < C::kHeads) {
            const int head = place.first_head + min(static_cast<int>(threadIdx.x), place.heads - 1);
            ptx::st_shared_f32(shared + C::kSinkOffset + 4 * threadIdx.x, load_sink(p, head));
        }
        ptx::barrier_sync(kConsumerBarrier, C::kConsumers);

        const int half = warp / 4, thread = threadIdx.x % kWarpgroup;
        const Consumer<C> self = {shared, half, thread, warp % 4, lane};
        Accumulators<C> out;
        RowSums rows;
        if (half == 0) score<C>(self, out, rows, keys.blocks, p.scale_log2);
        else follow<C>(self, out, keys.blocks);
        share_row_sums<C>(self, out, rows);

        const OutputTile tile = CtaPlace<C>(p).output(p);
        if (splits.count == 1) write_alone<C>(out, rows, tile, shared, half, thread);
        else merge<C>(out, rows, tile, shared, splits, half, thread);
    }
}

}  // namespace flash_mla::sm90::head64
