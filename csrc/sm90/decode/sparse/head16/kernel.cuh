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
    const float bias = value_is_rope ? kRopeBias : kBias;
    // One warp keeps the softmax sums, the others only need their own reference: V4's first one with RoPE.
    constexpr uint32_t kSumWarp = C::Record::kRopeInV ? C::Record::kNopeDims / C::kValueDims : 0;
    const bool keeps_sum = warp == kSumWarp;
    // The last warps find keys: V4's accumulate RoPE, which needs no conversion.
    const bool finds_keys = warp >= C::kWarps - C::kFinders;
    const int found_key = static_cast<int>(threadIdx.x) - (C::kThreads - C::kKeys);

    // What does not depend on the kernel before: addresses and barriers.
    IndexLists lists;
    lists.main = ptx::opaque(index_list(p.source[0], batch, row));
    lists.extra = ptx::opaque(index_list(p.source[1], batch, row));
    const uint16_t* q_token = p.q + static_cast<uint64_t>(batch) * p.q_stride_b + static_cast<uint64_t>(row) * p.q_stride_s;
    const QueryRows q_rows = {ptx::opaque(q_token + static_cast<uint64_t>(first_head) * p.q_stride_h), p.q_stride_h,
                              min(C::kHeads, p.h_q - first_head), p.q_aligned16};
    const uint32_t shared_address = ptx::shared_address(shared);
    const Ring<C> ring = {shared_address};
    const LanePlaces<C> places(shared_address, lane);
    const ScoreAddresses<C> score_at(shared_address, places, warp_key, part, lane);
    const ValueAddresses<C> value_at(shared_address, places, warp, value_scale_row, value_is_rope, lane);
    auto place_of = [&](int block_group, int key) {
        return KeyPlace(p, splits.rank, block_group + key / kKeysPerGroup, key % kKeysPerGroup);
    };
    const int first_group = splits.rank * p.groups_per_split;
    // Of the first kAhead blocks each warp finds its own keys: lane kKeysPerWarp * b + k the k-th of block b.
    const int first_block = lane / C::kKeysPerWarp, first_key = C::kKeysPerWarp * warp + lane % C::kKeysPerWarp;
    const KeyPlace first_place = place_of(first_group + first_block * C::kKeyGroups, first_key);
    SlotAddress first_slot(p, lists, first_place);
    first_slot.at = ptx::opaque(first_slot.at);
    if (threadIdx.x == 0) {
        ring.init_barriers();
        expect_peers<C>(shared_address, splits);
    }
    __syncthreads();
    ptx::barrier_cluster_arrive_relaxed();
    ptx::griddepcontrol_launch_dependents();
    ptx::griddepcontrol_wait();   // q, the indices and the cache may come from the kernel before

    // Load: the first indices, the lengths and Q side by side, then keys, as many blocks as the ring takes.
    const int32_t slot = first_slot.load();
    lists.main_length = index_list_length(p.source[0], batch);
    lists.extra_length = index_list_length(p.source[1], batch);
    Query<C> q;
    QueryTile<C> q_tile;
    if (warp < C::kTiles) q_tile.load(q_rows, warp, C::Record::kRopeInV && warp == C::kTiles - 1, lane);
    q.load_rope(q_rows, part, lane);
    const float sink = warp == 0 ? load_sink(p, first_head + min(static_cast<int>(lane), q_rows.count - 1)) : 0.f;

    // The first blocks are fetched whether or not the lengths leave them keys.
    FoundKey<C> found = {};
    const int groups = min(p.groups_per_split, p.source[0].groups + p.source[1].groups - first_group);
    const int first_blocks = min(C::kAhead, (groups + C::kKeyGroups - 1) / C::kKeyGroups);
    auto copy_first = [&](int i) {
        const uint32_t lanes = ((1u << C::kKeysPerWarp) - 1) << (C::kKeysPerWarp * i);
        if (i < first_blocks) ring.copy(Stage::make<C>(i), first_key, found.row, found.valid, lanes, lane);
    };
    if (first_blocks > 0) found.locate(p, lists, first_place, slot);
    const bool has_neighbours = C::kHeadGroups == 2 && gridDim.y > 1;   // more tiles of this token
    if (!has_neighbours) copy_first(0);

    // What kind of tile it is, by all warps.
    TileFlags tile_flags = {0};
    if (warp < C::kTiles) tile_flags = q_tile.examine(q_rows, C::Record::kRopeInV && warp == C::kTiles - 1, lane);
    if constexpr (C::kHeadGroups == 2) {
        if (has_neighbours) {
            tile_flags.bits |= q.rope_flags(lane);
            const uint16_t* previous_row = q_rows.first - q_rows.stride;
            if (first_head == 0 || row_slice_is_nonzero<C>(previous_row, p.q_aligned16, warp, lane)) {
                tile_flags.bits |= TileFlags::kPreviousRowNonzero;
            }
        }
    }
    tile_flags.share<C>(shared_address, warp, lane);
    if constexpr (C::kHeadGroups == 2) {
        if (has_neighbours) {
            if (tile_flags.is_skipped()) return;   // the whole cluster, before it has begun anything
            copy_first(0);
            if (tile_flags.answers_for_others()) {
                look_for_zero_tiles<C>(p, q_token, first_head, shared_address, warp, lane);
                const int head = first_head + C::kHeads + threadIdx.x;
                const uint32_t at = shared_address + C::kSkippedSinkOffset + 4 * threadIdx.x;
                if (head < p.h_q) ptx::st_shared_f32(at, load_sink(p, head));
            }
        }
    }
    q.convert(q_tile, tile_flags.too_wide(), shared, p.scale_log2, part, warp, lane, [&] {
        if (first_block < first_blocks) ring.store_scales_and_mask(Stage::make<C>(first_block), first_key, found);
        if (threadIdx.x < C::kHeads) ptx::st_shared_f32(shared_address + C::kSinkOffset + 4 * lane, sink);
    });
#pragma unroll
    for (int i = 1; i < C::kAhead; ++i) copy_first(i);

    const int live = max(0, live_groups(p, splits.rank, lists.main_length, lists.extra_length));
    const int blocks = (live + C::kKeyGroups - 1) / C::kKeyGroups;
    auto group_of = [&](int i) { return first_group + i * C::kKeyGroups; };
    int32_t next_slot = -1;
    auto load_next_slot = [&](int i) {
        if (finds_keys && i < blocks) next_slot = SlotAddress(p, lists, place_of(group_of(i), found_key)).load();
    };
    load_next_slot(C::kAhead);

    Accumulator<C> acc;
    SumBesides<C> sum_besides;
    acc.clear();
    sum_besides.clear();
    WeightFragments<C> weights;
    auto accumulate = [&](Stage stage) {
        if (value_is_rope) acc.multiply_bf16(weights, value_at.value + stage.rows);
        else acc.multiply_e4m3(weights, value_at.value + stage.rows);
    };

    Stage stage, free_stage = Stage::make<C>(C::kAhead), told_stage;
    ScoreBuffer buffer;
    for (int i = 0; i < blocks; ++i) {
        // Scores.
        ring.wait(stage);
        if (q.is_bf16) compute_scores<C, true>(q, p.scale_log2, score_at, stage, buffer, part, lane);
        else compute_scores<C, false>(q, p.scale_log2, score_at, stage, buffer, part, lane);
        const int ahead = i + C::kAhead;
        if (finds_keys) {
            // `found` is of block ahead - 1, whose copies have started; then the next one.
            if (i > 0 && ahead - 1 < blocks) ring.store_scales_and_mask(told_stage, found_key, found);
            if (ahead < blocks) {
                found.locate(p, lists, place_of(group_of(ahead), found_key), next_slot);
                ring.tell(ahead, found_key, found);
                load_next_slot(ahead + 1);
            }
        }

        // One barrier a block: behind it, this block's scores are there, and nobody needs the block before any more,
        // whose stage is filled again.
        __syncthreads();

        // Softmax weights.
        ScoreFragments<C> s;
        read_scores<C>(s, value_at.score + buffer.score);
        if (!C::Record::kRopeInV && keeps_sum) sum_besides.add(s);
        apply_per_key<C>(s, value_at.exponent + buffer.scale, [](float x, float e) { return x + e; });
        acc.weigh(s, bias, i == 0, C::Record::kRopeInV && keeps_sum, lane);
        if constexpr (C::kHasMantissa) {
            apply_per_key<C>(s, value_at.exponent + buffer.scale + C::kScaleArrayBytes,
                             [](float x, float mantissa) { return x * mantissa; });
        }
        pack_weights<C>(weights, s, value_is_rope);
        if (ahead < blocks) ring.copy_as_told(free_stage, ahead, warp, lane);
        if (i + 1 == blocks) break;   // the last block's values wait for what comes next
        accumulate(stage);
        told_stage = free_stage, free_stage = stage;
        stage = stage.next<C>(), buffer = buffer.other<C>();
    }

    // The softmax sums go round. When every warp of the cluster has weighed its last block, the scores' place is free to
    // receive.
    ptx::barrier_cluster_wait();   // all CTAs have begun
    if (keeps_sum) {
        if constexpr (C::Record::kRopeInV) {
#pragma unroll
            for (int n = 0; n < C::kHeadGroups; ++n) acc.sum[n] *= ptx::ex2(-bias);
            publish_sums<C>(acc.reference, acc.sum, shared_address, splits, lane);
        } else {
            publish_sums<C>(sum_besides.reference, sum_besides.sum, shared_address, splits, lane);
        }
    }
    __syncthreads();
    ptx::barrier_cluster_arrive_relaxed();
    if (blocks > 0) accumulate(stage);

    // Merge, and write.
    const OutputTile tile = {
        p.out + static_cast<uint64_t>(batch) * p.out_stride_b + static_cast<uint64_t>(row) * p.out_stride_s +
            static_cast<uint64_t>(first_head) * p.out_stride_h,
        p.lse + (static_cast<uint64_t>(batch) * p.h_q + first_head) * p.s_q.divisor + row,
        first_head,
        q_rows.count,
        has_neighbours && tile_flags.answers_for_others() ? zero_heads_behind<C>(p, first_head, shared_address, lane) : 0,
    };
    PartialWeight<C> weight;
    ptx::mbarrier_wait(shared_address + C::kLseBarrierOffset, 0);
    weight.load(acc, bias, shared_address, splits, lane);
    ptx::barrier_cluster_wait();
    send_partial<C>(acc, weight, shared_address, splits, warp, lane);
    if (keeps_sum && splits.rank == 0) write_lse<C>(p, tile, weight, lane);
    UnitWriter<C> writer;
    writer.load_sinks(weight, shared_address, lane);
    ptx::mbarrier_wait(shared_address + C::kPartialBarrierOffset, 0);
    __syncthreads();   // own units came by ordinary stores
    writer.write(p, tile, shared_address, splits, warp, lane);
    if constexpr (C::kHeadGroups == 2) {
        if (tile.skipped_heads > 0) {
            __syncthreads();
            writer.write_skipped(p, tile, shared_address, splits, warp, lane);
        }
    }
}

}  // namespace flash_mla::sm90::head16
