// Keys from global memory into the ring, as they are, some blocks ahead of their use.
//
// A copy is one instruction a key, but a warp starts one after the other, so every warp copies four keys of each block.
// Finding keys, that is slot, address and validity, is best done a warp at a time: the last kFinders warps do it, one lane
// per key, a block ahead of copying, and tell the others through a table in shared memory. feeder.cuh says when.
#pragma once
#include <cmath>

#include "ptx/mbarrier.cuh"
#include "ptx/memory.cuh"
#include "sm90/decode/sparse/head16/config.h"
#include "sm90/decode/sparse/keys.cuh"

namespace flash_mla::sm90::head16 {

// A stage of the ring as offsets: of its rows, its masks, its barrier; and the parity of the barrier's phase.
struct Stage {
    uint32_t rows = 0, mask = 0, barrier = 0, parity = 0;

    template <class C>
    __device__ __forceinline__ static Stage make(int i) {
        return {static_cast<uint32_t>(i * C::kStageBytes), static_cast<uint32_t>(i * C::kKeys * 4), static_cast<uint32_t>(8 * i), 0};
    }
    template <class C>
    __device__ __forceinline__ Stage next() const {
        const bool last = barrier == 8 * (C::kStages - 1);
        return {last ? 0 : rows + C::kStageBytes, last ? 0 : mask + C::kKeys * 4, last ? 0 : barrier + 8, parity ^ last};
    }
};

// A key on its way, in the hands of the lane that found it.
template <class C>
struct FoundKey {
    using Record = typename C::Record;
    const uint8_t* row;
    bool valid;
    uint2 scales;   // V4's 8 bytes; V3.2's lie in the row

    __device__ __forceinline__ void locate(const SparseDecodeParams& p, const IndexLists& lists, KeyPlace place, int32_t slot) {
        valid = is_key(p, lists, place, slot);
        const KeyAddress a = sm90::locate<Record>(p.source[place.extra], valid ? slot : 0);
        row = a.row;
        if constexpr (Record::kScalesAfterRows) scales = ptx::ld_global_v2(a.row + a.scales_from_row);
    }
};

template <class C>
struct Ring {
    using Record = typename C::Record;
    static constexpr uint32_t kRowBytes = Record::kRowBytes;
    uint32_t shared;

    __device__ __forceinline__ uint32_t barrier(Stage s) const { return shared + C::kStageBarrierOffset + s.barrier; }
    __device__ __forceinline__ uint32_t row(Stage s, int key) const { return shared + C::kRingOffset + s.rows + key * C::kRowPitch; }

    // By one thread, once.
    __device__ __forceinline__ void init_barriers() const {
#pragma unroll
        for (int i = 0; i < C::kStages; ++i) ptx::mbarrier_init(shared + C::kStageBarrierOffset + 8 * i, C::kWarps);
    }
    __device__ __forceinline__ void wait(Stage s) const { ptx::mbarrier_wait(barrier(s), s.parity); }

    // By every warp, whose keys of the block are those of `lanes`. What is no key becomes zeros, so
    // that whatever lies in its slot, NaN bytes too, has no effect. The zeros do not count towards the barrier of the stage:
    // readers see them because at least one barrier of the CTA lies between a block's copies and its use (kAhead).
    __device__ __forceinline__ void copy(Stage s, int key, const uint8_t* from, bool valid, uint32_t lanes, int lane) const {
        const uint32_t valid_lanes = __ballot_sync(0xffffffffu, valid) & lanes;
        if (!(lanes >> lane & 1)) return;
        if (lane == __ffs(lanes) - 1) ptx::mbarrier_arrive_expect_tx(barrier(s), __popc(valid_lanes) * kRowBytes);
        const uint32_t to = row(s, key);
        if (valid) {
            ptx::cp_async_bulk(to, from, kRowBytes, barrier(s));
        } else {
#pragma unroll 1
            for (uint32_t i = 0; i < kRowBytes; i += 16) ptx::st_shared_v4(to + i, 0, 0, 0, 0);
            ptx::fence_proxy_async();   // the next block of this stage may bring a key
        }
    }

    // By the lane that has found the key: its scales, and its mask, which makes the score of what is no key -inf.
    __device__ __forceinline__ void store_scales_and_mask(Stage s, int key, const FoundKey<C>& found) const {
        if constexpr (Record::kScalesAfterRows) {
            ptx::st_shared_v2(row(s, key) + kRowBytes, found.valid ? found.scales : make_uint2(0, 0));
        }
        ptx::st_shared_f32(shared + C::kMaskOffset + s.mask + 4 * column_of_row(key), found.valid ? 0.f : -INFINITY);
    }

    // The table, with room for two blocks: the address of a key, 0 for what is no key.
    __device__ __forceinline__ uint32_t table(int block, int key) const {
        return shared + C::kFetchTableOffset + 8 * ((block & 1) * C::kKeys + key);
    }
    __device__ __forceinline__ void tell(int block, int key, const FoundKey<C>& found) const {
        const uint64_t row = found.valid ? reinterpret_cast<uint64_t>(found.row) : 0;
        ptx::st_shared_v2(table(block, key), make_uint2(static_cast<uint32_t>(row), static_cast<uint32_t>(row >> 32)));
    }
    __device__ __forceinline__ void copy_as_told(Stage s, int block, int warp, int lane) const {
        const int key = C::kKeysPerWarp * warp + lane % C::kKeysPerWarp;
        const uint2 v = ptx::ld_shared_v2(table(block, key));
        const uint64_t row = static_cast<uint64_t>(v.y) << 32 | v.x;
        copy(s, key, reinterpret_cast<const uint8_t*>(row), row != 0, (1u << C::kKeysPerWarp) - 1, lane);
    }
};

}  // namespace flash_mla::sm90::head16
