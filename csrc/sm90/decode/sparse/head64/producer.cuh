// Keys from global memory to dequantized blocks in shared memory.
//
// All producer warps work on each block, so that it is filled in the least time: a warp has 8 keys, a lane quad one, and
// lane t of the quad 16 bytes of every tile. Raw bytes wait in registers: the bytes of a block are fetched chunk by chunk
// as those of the block before are converted, so a block's bytes travel while the block before is filled and while the
// producers wait for a free stage. Its index is fetched one block earlier still.
#pragma once
#include <cmath>

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

template <class C>
__device__ __forceinline__ void produce(const SparseDecodeParams& p, const SplitKeys& keys, int32_t first_slot, uint32_t shared,
                                        int warp, int lane) {
    using Record = typename C::Record;
    const int g = lane / 4, t = lane % 4, key = C::kKeysPerWarp * warp + g;
    // Where the lane's chunks lie in a tile: two of an e4m3 tile, 2t and 2t + 1; two of RoPE, t and t + 4, of which the odd
    // rows take t + 4 first: 8 lanes then store to 8 different places of 16 bytes, and so they do in e4m3 tiles.
    const uint32_t key_at = shared + C::kKeyOffset + key * 128;
    const uint32_t data_at = key_at + ((2 * t) ^ g) * 16;
    const int rope_chunk = t + 4 * (g % 2);
    const uint32_t rope_at = key_at + C::kDataTiles * C::kTileBytes + (rope_chunk ^ g) * 16;
    const uint32_t mask_at = shared + C::kMaskOffset + 4 * key;

    struct Location {
        const uint8_t* row;   // plus the lane's 16 t
        bool valid;
    };
    auto locate = [&](int block, int32_t slot, Scales<Record>& scales) {
        const KeyPlace place = keys.place(p, block, key);
        const bool valid = is_key(p, keys.lists, place, slot);
        const KeyAddress a = sm90::locate<Record>(p.source[place.extra], valid ? slot : 0);
        scales.load(a.row, a.scales_from_row, valid, lane);
        return Location{a.row + 16 * t, valid};
    };
    auto load_slot = [&](int block) { return SlotAddress(p, keys.lists, keys.place(p, block, key)).load(); };
    uint4 data[C::kDataTiles], rope[2];
    auto load_data = [&](int tile, Location from) { ptx::ld_global_v4_if(data[tile], from.row + kTileDims * tile, from.valid); };
    auto load_rope = [&](int i, Location from) {
        rope[i] = make_uint4(0, 0, 0, 0);   // may be NaN where it is no key, so not just scaled by 0
        ptx::ld_global_v4_if(rope[i], from.row + Record::kRopeOffset + 64 * (g % 2 ^ i), from.valid);
    };

    int32_t slot = load_slot(1);
    Scales<Record> scales, next_scales;
    Location location = locate(0, first_slot, scales);
#pragma unroll
    for (int j = 0; j < C::kDataTiles; ++j) data[j] = make_uint4(0, 0, 0, 0), load_data(j, location);
    load_rope(0, location), load_rope(1, location);

    for (int i = 0; i < keys.blocks; ++i) {
        const int stage = i % C::kStages;
        const uint32_t stage_offset = stage * C::kStageBytes;
        Location next = locate(i + 1, i + 1 < keys.blocks ? slot : -1, next_scales);
        slot = load_slot(i + 2);
        scales.prepare();
        ptx::mbarrier_wait(shared + C::kEmptyOffset + 8 * stage, (i / C::kStages & 1) ^ 1);

        const uint32_t to = data_at + stage_offset, to_second = to ^ 16;
        uint32_t nan = 0;
#pragma unroll
        for (int j = 0; j < C::kDataTiles; ++j) {
            const auto scale = scales.of_tile(j, lane);
            const uint4 raw = data[j];
            uint32_t r[8];
            spread(raw.x, r[0], r[1]), spread(raw.y, r[2], r[3]), spread(raw.z, r[4], r[5]), spread(raw.w, r[6], r[7]);
#pragma unroll
            for (int n = 0; n < 8; ++n) r[n] = scale.apply(r[n]);
            ptx::st_shared_v4(to + j * C::kTileBytes, r[0], r[1], r[2], r[3]);
            ptx::st_shared_v4(to_second + j * C::kTileBytes, r[4], r[5], r[6], r[7]);
            nan |= has_nan(raw.x) | has_nan(raw.y) | has_nan(raw.z) | has_nan(raw.w);
            load_data(j, next);
        }
#pragma unroll
        for (int n = 0; n < 2; ++n) {
            ptx::st_shared_v4((rope_at + stage_offset) ^ (64 * n), rope[n].x, rope[n].y, rope[n].z, rope[n].w);
            load_rope(n, next);
        }
        // The mask joins the scores: 0 for a key, -inf for what is none, NaN for a key with NaN among its e4m3 values.
        const uint32_t nan_lanes = __ballot_sync(0xffffffffu, location.valid && (nan & 0x80808080u)) >> (lane & ~3) & 15u;
        if (t == 0) {
            const float mask = !location.valid ? -INFINITY : nan_lanes ? __int_as_float(0x7fffffff) : 0.f;
            ptx::st_shared_f32(mask_at + 4 * C::kKeys * stage, mask);
        }
        ptx::fence_proxy_async();
        __syncwarp();
        if (lane == 0) ptx::mbarrier_arrive(shared + C::kFullOffset + 8 * stage);
        location = next, scales = next_scales;
    }
}

}  // namespace flash_mla::sm90::head64
