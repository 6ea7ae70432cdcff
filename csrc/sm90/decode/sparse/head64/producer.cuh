// Keys from global memory to dequantized blocks in shared memory.
//
// All producer warps work on each block, so that it is filled in the least time: a warp has 8 keys, a lane quad one, and
// lane t of the quad 16 bytes of every tile. Raw bytes wait in registers: as soon as those of half a block have been converted,
// those of the next block are fetched, and travel meanwhile and while the producers wait for a free stage. A block earlier
// the follower (consumer.cuh), which waits for weights anyway, has prefetched them to L2.
//
// Finding keys (slot, address, validity) is one lane's work a key: a warp finds its keys of four blocks, a batch, at once,
// and keeps them in a table in shared memory. The next batch is found in the second block of a batch.
#pragma once
#include <cmath>
#include <type_traits>
#include <utility>

#include "ptx/mbarrier.cuh"
#include "ptx/warpgroup.cuh"
#include "sm90/decode/sparse/head64/dequantize.cuh"
#include "sm90/decode/sparse/keys.cuh"

namespace flash_mla::sm90::head64 {

// The keys that a CTA works on.
struct SplitKeys {
    IndexLists lists;
    int split, first_group, blocks;

    // And with them how many blocks there are.
    __device__ __forceinline__ void load_lengths(const SparseDecodeParams& p, uint32_t batch) {
        lists.load_lengths(p, batch);
        blocks = static_cast<int>(ptx::uniform(lists.count_blocks(p, split, kGroupsPerBlock)));
    }
    __device__ __forceinline__ KeyPlace place(const SparseDecodeParams& p, int block, int key) const {
        return KeyPlace(p, split, first_group + kGroupsPerBlock * block + key / kKeysPerGroup, key % kKeysPerGroup);
    }
};

// f(std::integral_constant<int, kFrom>()) and so on.
template <int kFrom, int kTo, class F>
__device__ __forceinline__ void unrolled(F f) {
    [&]<int... kI>(std::integer_sequence<int, kI...>) {
        (f(std::integral_constant<int, kFrom + kI>()), ...);
    }(std::make_integer_sequence<int, kTo - kFrom>());
}

template <class C>
struct KeyFinder {
    static constexpr int kBatch = 32 / C::kKeysPerWarp;   // blocks

    // Of the key of a batch that this lane finds.
    __device__ __forceinline__ static KeyPlace place(const SparseDecodeParams& p, const SplitKeys& keys, int batch, int warp, int lane) {
        return keys.place(p, kBatch * batch + lane / C::kKeysPerWarp, C::kKeysPerWarp * warp + lane % C::kKeysPerWarp);
    }
    __device__ __forceinline__ static int32_t load_slot(const SparseDecodeParams& p, const SplitKeys& keys, int batch, int warp, int lane) {
        return SlotAddress(p, keys.lists, place(p, keys, batch, warp, lane)).load();
    }
    // Where a key's entry lies: its address, 0 for what is no key; and, if they do not follow, where its scales are from there.
    __device__ __forceinline__ static uint32_t entry(uint32_t shared, int block, int warp, int key) {
        const int batch = block / kBatch, n = block % kBatch * C::kKeysPerWarp + key;
        return shared + C::kFoundOffset + ((batch % 2 * (C::kProducers / 32) + warp) * 32 + n) * C::kFoundBytes;
    }
    __device__ __forceinline__ static void find(const SparseDecodeParams& p, const SplitKeys& keys, int batch, int32_t slot,
                                                uint32_t shared, int warp, int lane) {
        enter(find_key<typename C::Record>(p, keys.lists, place(p, keys, batch, warp, lane), slot), batch, shared, warp, lane);
    }
    // What this lane has found of a batch, into the table.
    __device__ __forceinline__ static void enter(KeyAddress a, int batch, uint32_t shared, int warp, int lane) {
        const uint64_t row = reinterpret_cast<uint64_t>(a.row);
        const uint32_t to = entry(shared, kBatch * batch, warp, lane);
        if constexpr (C::kFoundBytes == 16) {
            ptx::st_shared_v4(to, static_cast<uint32_t>(row), static_cast<uint32_t>(row >> 32), a.scales_from_row, 0);
        } else {
            ptx::st_shared_v2(to, make_uint2(static_cast<uint32_t>(row), static_cast<uint32_t>(row >> 32)));
        }
        __syncwarp();
    }
    // Behind the end there is no key.
    __device__ __forceinline__ static KeyAddress look_up(uint32_t shared, int block, int warp, int key) {
        const uint32_t from = entry(shared, block, warp, key);
        const uint2 row = ptx::ld_shared_v2(from);
        return {reinterpret_cast<const uint8_t*>(static_cast<uint64_t>(row.y) << 32 | row.x),
                C::kFoundBytes == 16 ? ptx::ld_shared_u32(from + 8) : static_cast<uint32_t>(C::Record::kScaleOffset)};
    }
    // By any warp that the table is visible to: 8 lanes have a key each.
    __device__ __forceinline__ static void prefetch(uint32_t shared, int block, int warp, int lane) {
        if (lane >= C::kKeysPerWarp) return;
        const uint8_t* row = look_up(shared, block, warp, lane).row;
        if (row) ptx::prefetch_bulk_l2(row, C::Record::kRowBytes);
    }
};

// Where a lane's share of a key lies in a block: two chunks of an e4m3 tile, 2t and 2t + 1; two of RoPE, t and t + 4, of
// which the odd rows take t + 4 first. So 8 lanes store to 8 different places of 16 bytes.
template <class C>
struct LaneOfKey {
    uint32_t t, key;
    uint32_t data_at, rope_at;   // from the start of a stage; the second chunks lie at ^ 16 and at ^ 64
    uint32_t rope_from;          // of its RoPE in the record; the second chunk comes from ^ 64

    __device__ __forceinline__ LaneOfKey(int warp, uint32_t lane) {
        const uint32_t g = lane / 4;
        t = lane % 4, key = C::kKeysPerWarp * warp + g;
        data_at = key * 128 + ((2 * t) ^ g) * 16;
        rope_at = C::kDataTiles * C::kTileBytes + key * 128 + ((t + 4 * (g % 2)) ^ g) * 16;
        rope_from = 16 * t + 64 * (g % 2);
    }
};

// The first batch of keys is in the table.
template <class C>
__device__ __forceinline__ void produce(const SparseDecodeParams& p, const SplitKeys& keys, uint32_t shared, int warp, int lane) {
    using Record = typename C::Record;
    using Finder = KeyFinder<C>;
    uint4 data[C::kDataTiles];
#pragma unroll
    for (int j = 0; j < C::kDataTiles; ++j) data[j] = make_uint4(0, 0, 0, 0);
    int32_t slot = Finder::load_slot(p, keys, 1, warp, lane);
    KeyAddress found = Finder::look_up(shared, 0, warp, lane / 4);
    // What is no key is not loaded, and its scale is 0, which makes zeros of what is in the registers.
    const auto load_tile = [&](auto j) {
        ptx::ld_global_v4_if<kTileDims * j.value>(data[j.value], found.row + 16 * (lane % 4), found.row);
    };
    unrolled<0, C::kDataTiles>(load_tile);
    // Scales take the way through shared memory, one lane's work a key.
    const auto fetch_scales = [&](int key) {
        const uint8_t* from = found.row ? found.row + found.scales_from_row : p.source[0].blocks;   // some address that exists
        if (lane % 4 == 0) ptx::cp_async<Record::kScaleBytes>(shared + C::kScalesOffset + Record::kScaleBytes * key, from, found.row);
        ptx::cp_async_commit();
    };
    fetch_scales(C::kKeysPerWarp * warp + lane / 4);
    Finder::prefetch(shared, 1, warp, lane);

#pragma unroll 1
    for (int i = 0; i < keys.blocks; ++i) {
        const int stage = i % C::kStages;
        const LaneOfKey<C> at(warp, ptx::opaque(static_cast<uint32_t>(lane)));   // anew: registers are short
        const uint32_t stage_at = shared + C::kKeyOffset + stage * C::kStageBytes;
        const uint32_t to = stage_at + at.data_at, to_second = to ^ 16, full = shared + C::kFullOffset + 16 * stage;
        const uint8_t* row = Finder::look_up(shared, i, warp, at.key % C::kKeysPerWarp).row;
        const bool valid = row;
        if (!valid) row = p.source[0].blocks;   // some address that exists
        ptx::mbarrier_wait(shared + C::kEmptyOffset + 8 * stage, (i / C::kStages & 1) ^ 1);
        // RoPE needs no conversion. What is no key must be zeros, as its bytes might be NaN.
#pragma unroll
        for (int n = 0; n < 2; ++n) {
            ptx::cp_async<16>((stage_at + at.rope_at) ^ (64 * n), row + Record::kRopeOffset + (at.rope_from ^ (64 * n)), valid);
        }
        ptx::cp_async_commit();
        ptx::cp_async_wait<1>();   // not for RoPE, but for the scales, fetched a block ahead
        __syncwarp();
        Scales<Record> scales;
        scales.load(shared + C::kScalesOffset + Record::kScaleBytes * at.key, lane);
        uint32_t nan = 0;
        const auto convert_tile = [&]<bool kWide>(auto j, std::bool_constant<kWide>) {
            const uint32_t factor = scales.template of_tile<kWide>(j.value, valid);
            const uint4& raw = data[j.value];
            uint32_t r[8];
            spread(raw.x, r[0], r[1]), spread(raw.y, r[2], r[3]), spread(raw.z, r[4], r[5]), spread(raw.w, r[6], r[7]);
#pragma unroll
            for (int n = 0; n < 8; ++n) r[n] = Scales<Record>::template apply<kWide>(factor, r[n]);
            ptx::st_shared_v4(to + j.value * C::kTileBytes, r[0], r[1], r[2], r[3]);
            ptx::st_shared_v4(to_second + j.value * C::kTileBytes, r[4], r[5], r[6], r[7]);
            nan |= has_nan(raw.x) | has_nan(raw.y) | has_nan(raw.z) | has_nan(raw.w);
        };
        const bool wide = __any_sync(0xffffffffu, scales.is_wide());
        if (wide) scales.template prepare<true>();
        else scales.template prepare<false>();
        const auto convert = [&]<int kFrom, int kTo>(std::integer_sequence<int, kFrom, kTo>) {
            if (wide) unrolled<kFrom, kTo>([&](auto j) { convert_tile(j, std::true_type()); });
            else unrolled<kFrom, kTo>([&](auto j) { convert_tile(j, std::false_type()); });
        };
        const auto hand_over = [&](uint32_t barrier) {
            ptx::fence_proxy_async();
            ptx::mbarrier_arrive(barrier);
        };
        convert(std::integer_sequence<int, 0, C::kFirstTiles>());
        // Now, and not with the others': the bytes would have to be kept, and new ones could not take their registers.
        uint32_t nan_lanes = __ballot_sync(0xffffffffu, nan & 0x80808080u);
        nan = 0;
        // Loads come before the fence: behind it, ptxas puts them off for long.
        found = Finder::look_up(shared, i + 1, warp, at.key % C::kKeysPerWarp);
        __syncwarp();   // every lane has had the scales of this block
        fetch_scales(at.key);
        unrolled<0, C::kFirstTiles>(load_tile);
        hand_over(full);
        convert(std::integer_sequence<int, C::kFirstTiles, C::kDataTiles>());
        // The mask joins the scores: 0 for a key, -inf for what is none, NaN for a key with NaN among its e4m3 values.
        nan_lanes |= __ballot_sync(0xffffffffu, nan & 0x80808080u);
        if (at.t == 0) {
            const float mask = !valid ? -INFINITY : nan_lanes >> 4 * (at.key % C::kKeysPerWarp) & 15u ? __int_as_float(0x7fffffff) : 0.f;
            ptx::st_shared_f32(shared + C::kMaskOffset + 4 * (C::kKeys * stage + at.key), mask);
        }
        ptx::cp_async_wait<1>();   // RoPE; not the next scales
        hand_over(full + 8);
        found = Finder::look_up(shared, i + 1, warp, at.key % C::kKeysPerWarp);
        unrolled<C::kFirstTiles, C::kDataTiles>(load_tile);
        if (i % Finder::kBatch == 1) {
            Finder::find(p, keys, i / Finder::kBatch + 1, slot, shared, warp, lane);
            slot = Finder::load_slot(p, keys, i / Finder::kBatch + 2, warp, lane);
        }
    }
    ptx::cp_async_wait<0>();   // nothing of this thread is on its way behind this
}

}  // namespace flash_mla::sm90::head64
