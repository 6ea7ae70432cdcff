// Keys from global memory to dequantized blocks in shared memory.
//
// All producer warps work on each block, so that it is filled in the least time: a warp has 8 keys, a lane quad one, and
// lane t of the quad 16 bytes of every tile. Raw bytes wait in registers: the bytes of a block are fetched as soon as those of
// the block before have been converted, and travel while the producers wait for a free stage. Its index is fetched one
// block earlier still.
#pragma once
#include <cmath>
#include <type_traits>
#include <utility>

#include "ptx/mbarrier.cuh"
#include "sm90/decode/sparse/head64/dequantize.cuh"
#include "sm90/decode/sparse/keys.cuh"

namespace flash_mla::sm90::head64 {

// Which keys the CTA works on.
struct SplitKeys {
    IndexLists lists;
    int split, first_group, blocks;

    __device__ __forceinline__ KeyPlace place(const SparseDecodeParams& p, int block, int key) const {
        return KeyPlace(p, split, first_group + 4 * block + key / kKeysPerGroup, key % kKeysPerGroup);
    }
};

// f(std::integral_constant<int, 0>()) and so on.
template <int kCount, class F>
__device__ __forceinline__ void unrolled(F f) {
    [&]<int... kI>(std::integer_sequence<int, kI...>) { (f(std::integral_constant<int, kI>()), ...); }(std::make_integer_sequence<int, kCount>());
}

// Which key of a block a lane has a share of, and where that lies in a block: two chunks of an e4m3 tile, 2t and 2t + 1;
// two of RoPE, t and t + 4, of which the odd rows take t + 4 first. So 8 lanes store to 8 different places of 16 bytes.
template <class C>
struct LaneOfKey {
    int t, key;
    uint32_t data_at, rope_at;   // from the start of a stage; the second chunks lie at ^ 16 and at ^ 64
    uint32_t rope_from;          // of its RoPE in the record; the second chunk comes from ^ 64

    __device__ __forceinline__ LaneOfKey(int warp, int lane) {
        const int g = lane / 4;
        t = lane % 4, key = C::kKeysPerWarp * warp + g;
        data_at = key * 128 + ((2 * t) ^ g) * 16;
        rope_at = C::kDataTiles * C::kTileBytes + key * 128 + ((t + 4 * (g % 2)) ^ g) * 16;
        rope_from = 16 * t + 64 * (g % 2);
    }
};

template <class C>
__device__ __forceinline__ void produce(const SparseDecodeParams& p, const SplitKeys& keys, int32_t first_slot, uint32_t shared,
                                        int warp, int lane) {
    using Record = typename C::Record;
    const auto key_of_lane = [&] { return C::kKeysPerWarp * warp + static_cast<int>(ptx::opaque(static_cast<uint32_t>(lane)) / 4); };
    const auto load_slot = [&](int block) { return SlotAddress(p, keys.lists, keys.place(p, block, key_of_lane())).load(); };
    uint4 data[C::kDataTiles];
    Scales<Record> scales;
    const uint8_t* row;
    bool valid;
    // What is no key is not loaded, and its scale is 0, which makes zeros of what is in the registers.
    const auto load = [&](int block, int32_t slot) {
        const KeyPlace place = keys.place(p, block, key_of_lane());
        valid = is_key(p, keys.lists, place, slot);
        const KeyAddress a = sm90::locate<Record>(p.source[place.extra], valid ? slot : 0);
        scales.load(a.row, a.scales_from_row, valid, lane);
        const uint8_t* lane_data = a.row + 16 * (lane % 4);
        unrolled<C::kDataTiles>([&](auto j) { ptx::ld_global_v4_if<kTileDims * j.value>(data[j.value], lane_data, valid); });
        // RoPE is loaded when some of these registers are free again; it comes to L2 now.
        row = a.row;
        ptx::prefetch_global_l2_if<Record::kRopeOffset>(a.row + 32 * (lane % 4), valid);
    };
#pragma unroll
    for (int j = 0; j < C::kDataTiles; ++j) data[j] = make_uint4(0, 0, 0, 0);
    load(0, first_slot);
    int32_t slot = load_slot(1);

#pragma unroll 1
    for (int i = 0; i < keys.blocks; ++i) {
        const int stage = i % C::kStages;
        const LaneOfKey<C> at(warp, ptx::opaque(static_cast<uint32_t>(lane)));   // anew: registers are short
        const uint32_t stage_at = shared + C::kKeyOffset + stage * C::kStageBytes;
        const uint32_t to = stage_at + at.data_at, to_second = to ^ 16;
        ptx::mbarrier_wait(shared + C::kEmptyOffset + 8 * stage, (i / C::kStages & 1) ^ 1);
        scales.prepare();
        uint32_t nan = 0;
        uint4 rope[2];
#pragma unroll
        for (int j = 0; j < C::kDataTiles; ++j) {
            if (j == 2) {
#pragma unroll
                for (int n = 0; n < 2; ++n) {
                    rope[n] = make_uint4(0, 0, 0, 0);   // where it is no key, any bytes might be NaN
                    ptx::ld_global_v4_if<Record::kRopeOffset>(rope[n], row + (at.rope_from ^ (64 * n)), valid);
                }
            }
            const auto scale = scales.of_tile(j, valid, lane);
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const uint32_t x = half ? data[j].z : data[j].x, y = half ? data[j].w : data[j].y;
                uint32_t r[4];
                spread(x, r[0], r[1]), spread(y, r[2], r[3]);
#pragma unroll
                for (int n = 0; n < 4; ++n) r[n] = scale.apply(r[n]);
                ptx::st_shared_v4((half ? to_second : to) + j * C::kTileBytes, r[0], r[1], r[2], r[3]);
                nan |= has_nan(x) | has_nan(y);
            }
        }
#pragma unroll
        for (int n = 0; n < 2; ++n) ptx::st_shared_v4((stage_at + at.rope_at) ^ (64 * n), rope[n].x, rope[n].y, rope[n].z, rope[n].w);
        // The mask joins the scores: 0 for a key, -inf for what is none, NaN for a key with NaN among its e4m3 values.
        const uint32_t nan_lanes = __ballot_sync(0xffffffffu, valid && (nan & 0x80808080u)) >> (lane & ~3) & 15u;
        if (at.t == 0) {
            const float mask = !valid ? -INFINITY : nan_lanes ? __int_as_float(0x7fffffff) : 0.f;
            ptx::st_shared_f32(shared + C::kMaskOffset + 4 * (C::kKeys * stage + at.key), mask);
        }
        ptx::fence_proxy_async();
        __syncwarp();
        if (lane == 0) ptx::mbarrier_arrive(shared + C::kFullOffset + 8 * stage);
        if (i + 1 == keys.blocks) break;
        load(i + 1, slot);
        slot = load_slot(i + 2);
    }
}

}  // namespace flash_mla::sm90::head64
