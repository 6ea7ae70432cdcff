// Sparse decode with a head tile of 16 rows (or 8): load keys -> scores -> softmax weights -> accumulate -> merge.
// docs/sparse_decode.md explains the data flow.
#pragma once
#include "sm90/decode/sparse/head16/merge.cuh"
#include "sm90/decode/sparse/head16/ring.cuh"

namespace flash_mla::sm90::head16 {

// Grid: x = splits * tokens, in clusters of `splits`; y = head tiles.
template <class C>
__global__ void __launch_bounds__(C::kThreads, C::kCtasPerSm)
sparse_decode_kernel(const __grid_constant__ SparseDecodeParams p) {
    extern __shared__ __align__(1024) char shared[];
    const uint32_t warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
    const SplitsOfTile splits = {static_cast<int>(ptx::cluster_ctarank()), p.splits, p.splits_magic};
    const uint32_t token = ptx::clusterid_x();
    const uint32_t batch = p.s_q.divide(token), row = token - batch * p.s_q.divisor;
    const int first_head = blockIdx.y * C::kHeads;
    // This warp's share of the scores: some dims (a part) of some keys of a block.
    constexpr uint32_t kWarpsPerPart = C::kWarps / C::kDimParts;
    const int part = warp / kWarpsPerPart, warp_key = warp % kWarpsPerPart * (8 * C::kOctets);
    // Its share of the values: all keys, some dims, which have one scale per key.
    const int value_scale_row = warp * C::kValueDims / (kTileDims * C::kTilesPerScale);
    const bool value_is_rope = C::Record::kRopeInV && value_scale_row == C::kScaleRows - 1;
    const bool keeps_sum = warp == 0;   // the others only need their own reference

    ptx::griddepcontrol_launch_dependents();
    ptx::griddepcontrol_wait();   // q, the indices and the cache may come from the kernel before

    // Load: the first indices, the lengths and Q side by side, then keys, as many blocks as the ring takes.
    IndexLists lists;
    lists.main = index_list(p.source[0], batch, row);
    lists.extra = index_list(p.source[1], batch, row);
    const uint32_t shared_address = ptx::shared_address(shared);
    const RingWriter<C> ring(shared_address);
    auto place_of = [&](int block_group, int key) {
        return KeyPlace(p, splits.rank, block_group + key / kKeysPerGroup, key % kKeysPerGroup);
    };
    constexpr int kAhead = C::kStages - 1;
    const int first_group = splits.rank * p.groups_per_split;
    int32_t slots[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) slots[i] = load_slot(p, lists, place_of(first_group + i * C::kKeyGroups, ring.row));
    lists.main_length = index_list_length(p.source[0], batch);
    lists.extra_length = index_list_length(p.source[1], batch);
    const QueryRows q_rows = {p.q + static_cast<uint64_t>(batch) * p.q_stride_b + static_cast<uint64_t>(row) * p.q_stride_s +
                                  static_cast<uint64_t>(first_head) * p.q_stride_h,
                              p.q_stride_h, min(C::kHeads, p.h_q - first_head), p.q_aligned16};
    Query<C> q;
    QueryTile<C> q_tile;
    if (warp < C::kTiles) q_tile.load(q_rows, warp, C::Record::kRopeInV && warp == C::kTiles - 1, lane);
    q.load_rope(q_rows, part, lane);
    if (threadIdx.x == 0) expect_partials<C>(shared, splits);

    // Block 0 without waiting to know which blocks there are; should the split begin with a hole, once more.
    if (p.source[0].groups + p.source[1].groups > 0) {
        ring.fetch(fetch_entry<C>(p, lists, place_of(first_group, ring.row), slots[0]), 0, 0);
    }
    ptx::cp_async_commit_group();
    const auto blocks = BlockRange::make<C::kKeyGroups>(p, splits.rank, lists.main_length, lists.extra_length);
    auto group_of = [&](int i) { return blocks.template group_of<C::kKeyGroups>(i); };
    if (blocks.count > 0 && group_of(0) != first_group) {
        ptx::cp_async_wait_group<0>();
        const KeyPlace place = place_of(group_of(0), ring.row);
        ring.fetch(fetch_entry<C>(p, lists, place, load_slot(p, lists, place)), 0, 0);
        ptx::cp_async_commit_group();
    }
#pragma unroll
    for (int i = 1; i < kAhead; ++i) {
        if (i < blocks.count) {
            const KeyPlace place = place_of(group_of(i), ring.row);
            if (group_of(i) != first_group + i * C::kKeyGroups) slots[i] = load_slot(p, lists, place);   // behind a hole
            ring.fetch(fetch_entry<C>(p, lists, place, slots[i]), i * C::kStageBytes, i * C::kKeys * 4);
        }
        ptx::cp_async_commit_group();
    }
    const FetchTable<C> table(shared_address);
    // The last warps find the keys of blocks to come, lane by lane: V4's accumulate RoPE, which needs no conversion.
    const int found_key = static_cast<int>(threadIdx.x) - (C::kThreads - C::kKeys);
    const bool finds_keys = warp >= C::kWarps - C::kKeys / 32;
    int32_t next_slot = -1;
    auto load_next_slot = [&](int i) {
        if (finds_keys && i < blocks.count) next_slot = load_slot(p, lists, place_of(group_of(i), found_key));
    };
    load_next_slot(kAhead);
    q.convert(q_tile, q_rows, shared, p.scale_log2, part, warp, lane);
    ptx::cp_async_wait_group<kAhead - 1>();
    __syncthreads();

    Accumulator<C> acc;
    RowSum<C> row_sum[C::kHeadGroups];
    acc.clear();
    const ScoreAddresses<C> score_at(shared_address, warp_key, part, lane);
    const ValueAddresses<C> value_at(shared_address, warp, value_scale_row, value_is_rope, lane);
    WeightFragments<C> weights;
    ValueFragments<C> values;
    auto accumulate = [&](BlockOffsets block) {
        if (!C::kLoadsValuesEarly && !value_is_rope) load_values<C>(values, value_at.value + block.ring);
        if (value_is_rope) acc.multiply_bf16(weights, value_at.value + block.ring);
        else acc.multiply_e4m3(weights, values);
    };

    BlockOffsets block = {0, 0, 0, 0}, free_block = {kAhead * C::kStageBytes, kAhead * C::kKeys * 4, 0, 0};
    for (int i = 0; i < blocks.count; ++i) {
        // Scores.
        if (q.is_bf16) compute_scores<C, true>(q, p.scale_log2, score_at, block, part, lane);
        else compute_scores<C, false>(q, p.scale_log2, score_at, block, part, lane);
        const int ahead = i + kAhead;
        if (finds_keys && ahead < blocks.count) {
            table.store(ahead, found_key, fetch_entry<C>(p, lists, place_of(group_of(ahead), found_key), next_slot));
            load_next_slot(ahead + 1);
        }

        // One barrier a block: behind it, this block's scores are there, so is all of the next block, and nobody needs
        // the block before any more, whose stage is filled again.
        ptx::cp_async_wait_group<kAhead - 2>();
        __syncthreads();
        if (C::kLoadsValuesEarly && !value_is_rope) load_values<C>(values, value_at.value + block.ring);

        // Softmax weights, one head group after the other.
#pragma unroll
        for (int n = 0; n < C::kHeadGroups; ++n) {
            ScoreFragment<C> s;
            read_scores<C>(s, value_at.score + block.score + 4 * 8 * n * C::kScoreStride);
            if (keeps_sum) row_sum[n].add(s);
            apply_per_key<C>(s, value_at.exponent + block.scale, [](float x, float e) { return x + e; });
            acc.weigh(s, n, lane);
            if constexpr (C::kHasMantissa) {
                apply_per_key<C>(s, value_at.exponent + block.scale + C::kScaleArrayBytes,
                                 [](float x, float mantissa) { return x * mantissa; });
            }
            pack_weights<C>(weights, s, n, value_is_rope);
        }
        if (ahead < blocks.count) ring.fetch(table.load(ahead, ring.row), free_block.ring, free_block.mask);
        ptx::cp_async_commit_group();
        free_block = block;
        if (i + 1 == blocks.count) break;   // the last block's values wait for what comes next
        accumulate(block);
        block = block.next<C>();
    }

    // When every warp of the cluster has weighed its last block, the scores' place is free to receive.
    if (keeps_sum) publish_sum<C>(row_sum, shared, lane);
    __syncthreads();
    ptx::barrier_cluster_arrive_relaxed();
    Normalization<C> norm;
    norm.load(acc, shared, lane);
    if (blocks.count > 0) accumulate(block);

    // Merge, and write.
    ptx::barrier_cluster_wait();
    send_partial<C>(acc, norm, shared, splits, value_is_rope, warp, lane);
    const OutputTile tile = {
        p.out + static_cast<uint64_t>(batch) * p.out_stride_b + static_cast<uint64_t>(row) * p.out_stride_s +
            static_cast<uint64_t>(first_head) * p.out_stride_h,
        p.out_stride_h,
        p.out_aligned4,
        p.lse + (static_cast<uint64_t>(batch) * p.h_q + first_head) * p.s_q.divisor + row,
        p.s_q.divisor,
        p.attn_sink ? p.attn_sink + first_head : nullptr,
        p.h_q - first_head,
    };
    receive_and_write<C>(tile, shared, splits, warp, lane);
}

}  // namespace flash_mla::sm90::head16
