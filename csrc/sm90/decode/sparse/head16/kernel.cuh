// Sparse decode with a head tile of 16 rows (or 8): load keys -> scores -> softmax weights -> accumulate -> merge.
// docs/sparse_decode.md explains the data flow.
#pragma once
#include "sm90/decode/sparse/head16/merge.cuh"

namespace flash_mla::sm90::head16 {

// Grid: x = splits * tokens, in clusters of `splits`; y = head tiles.
template <class C>
__global__ void __launch_bounds__(C::kThreads, C::kCtasPerSm)
sparse_decode_kernel(const __grid_constant__ SparseDecodeParams p) {
    extern __shared__ __align__(1024) char shared[];
    const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
    const int key_group = warp % C::kKeyGroups, part = warp / C::kKeyGroups;   // this warp's share of the scores
    const int split = ptx::cluster_ctarank(), token = ptx::clusterid_x();
    const int batch = p.s_q.divide(token), row = token - batch * p.s_q.divisor;
    const int first_head = blockIdx.y * C::kHeads;

    ptx::griddepcontrol_launch_dependents();
    ptx::griddepcontrol_wait();   // q, the indices and the cache may come from the kernel before

    // Load: the first indices, the lengths and Q side by side, then keys one block ahead of their use.
    IndexLists lists;
    lists.main = index_list(p.source[0], batch, row);
    lists.extra = index_list(p.source[1], batch, row);
    const int first_group = split * p.groups_per_split + key_group;
    Slots slots = load_slots(p, lists, first_group, lane / 4);
    const bool loads_query = key_group == 0;
    RawQuery<C> raw_query;
    if (loads_query) {
        raw_query.load(p, p.q + batch * p.q_stride_b + row * p.q_stride_s + first_head * p.q_stride_h,
                       p.h_q - first_head, part, lane);
    }
    lists.main_length = index_list_length(p.source[0], batch);
    lists.extra_length = index_list_length(p.source[1], batch);
    const auto blocks = BlockRange::make<C::kKeyGroups>(p, split, lists.main_length, lists.extra_length);
    auto group_of = [&](int i) { return blocks.group_of<C::kKeyGroups>(i) + key_group; };
    if (group_of(0) != first_group) slots = load_slots(p, lists, group_of(0), lane / 4);
    KeySlice<C> keys;
    load_keys(keys, p, lists, slots, group_of(0), part, lane);
    slots = load_slots(p, lists, group_of(1), lane / 4);
    const auto q = Query<C>::at(shared, part, lane);
    if (loads_query) raw_query.store(q, p.scale_log2, part, lane);
    __syncthreads();

    Accumulator<C> acc;
    RowSum<C> row_sum;
    acc.clear();
    row_sum.clear();
    // The last warp also keeps the softmax sum; the others only need their own reference.
    const bool keeps_sum = warp == C::kWarps - 1;
    const int value_scale = warp * C::kValueDims / C::Record::kScaleGroup;
    const bool value_is_rope = C::Record::kRopeInV && value_scale >= C::Record::kNumScales;
    float2* own_stats = reinterpret_cast<float2*>(shared + C::kOwnStatsOffset);
    auto publish_sum = [&] {
        if (!keeps_sum) return;
        row_sum.finish();
#pragma unroll
        for (int n = 0; n < C::kHeadGroups; ++n) {
            if (lane % 4 == 0) own_stats[8 * n + lane / 4] = {row_sum.reference[n], row_sum.sum[n]};
        }
    };
    // All buffers but the first of V are free once every warp of the cluster has weighed its last block.
    auto done_with_buffers = [&] {
        publish_sum();
        __syncwarp();
        ptx::barrier_cluster_arrive();
    };
    if (blocks.count == 0) done_with_buffers();

    for (int i = 0; i < blocks.count; ++i) {
        const int buffer = (blocks.count - 1 - i) & 1;   // the last block uses buffer 0
        const int live_groups = min(C::kKeyGroups, blocks.end - (group_of(i) - key_group));
        const BlockBuffers b = {
            ptx::shared_address(shared + C::kValueOffset + buffer * C::kValueBytes),
            reinterpret_cast<float*>(shared + C::kScoreOffset + buffer * C::kScoreBytes),
            reinterpret_cast<float*>(shared + C::kScaleOffset + buffer * C::kScaleBytes),
        };

        // Scores, and V to shared memory.
        if (key_group < live_groups) compute_scores<C>(keys, q, p.scale_log2, b, key_group, part, lane);
        if (i + 1 < blocks.count) {
            load_keys(keys, p, lists, slots, group_of(i + 1), part, lane);
            slots = load_slots(p, lists, group_of(i + 2), lane / 4);
        }
        __syncthreads();

        // Softmax weights.
        ScoreFragment<C> s;
        read_scores<C>(s, b.score, live_groups, lane);
        if (keeps_sum) row_sum.add(s, live_groups);
        if (!value_is_rope) {
            apply_per_key<C>(s, b.exponent + value_scale * C::kKeys, live_groups, lane, [](float x, float e) { return x + e; });
        }
        acc.weigh(s, live_groups, lane);
        if constexpr (C::kHasMantissa) {
            apply_per_key<C>(s, b.exponent + (C::Record::kNumScales + value_scale) * C::kKeys, live_groups, lane,
                             [](float x, float mantissa) { return x * mantissa; });
        }
        if (i == blocks.count - 1) done_with_buffers();

        // Accumulate.
        const uint32_t value_lane = value_lane_address<C>(b.value, warp, lane);
        if (value_is_rope) acc.template multiply<true>(s, value_lane, live_groups);
        else acc.template multiply<false>(s, value_lane, live_groups);
    }

    // Merge, and write.
    const SplitsOfTile splits = {split, p.splits, p.splits_magic};
    ptx::barrier_cluster_wait();
    send_partial<C>(acc, own_stats, shared, splits, warp, lane);
    ptx::barrier_cluster_arrive();
    ptx::barrier_cluster_wait();
    const OutputTile tile = {
        p.out + batch * p.out_stride_b + row * p.out_stride_s + first_head * p.out_stride_h,
        p.out_stride_h,
        p.out_aligned4,
        p.lse + (static_cast<int64_t>(batch) * p.h_q + first_head) * p.s_q.divisor + row,
        p.s_q.divisor,
        p.attn_sink ? p.attn_sink + first_head : nullptr,
        p.h_q - first_head,
    };
    merge_and_write<C>(tile, shared, splits, threadIdx.x);
}

}  // namespace flash_mla::sm90::head16
