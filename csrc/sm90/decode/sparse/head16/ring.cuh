// Keys from global memory into the ring, as they are, some blocks ahead of their use.
//
// A copy is one instruction a key, but a warp starts one after the other, so the value warps share them: 4 or 8 keys of each
// block, a lane a key. Whatever belongs to a key is that lane's work, but rows where copy_rows starts them. feeder.cuh says when.
#pragma once
#include <cmath>

#include "ptx/mbarrier.cuh"
#include "ptx/memory.cuh"
#include "ptx/warpgroup.cuh"
#include "sm90/decode/sparse/head16/config.h"
#include "sm90/decode/sparse/keys.cuh"

namespace flash_mla::sm90::head16 {

// A stage of the ring as offsets: of its rows, its barriers (three, in step), its masks; and the parity of the barriers' phase.
struct Stage {
    uint32_t rows = 0, barrier = 0, parity = 0;

    template <class C>
    __device__ __forceinline__ static Stage make(int i) {
        return {static_cast<uint32_t>(i * C::kStageBytes), static_cast<uint32_t>(8 * i), 0};
    }
    template <class C>
    __device__ __forceinline__ Stage next() const {
        const bool last = barrier == 8 * (C::kStages - 1);
        return {last ? 0 : rows + C::kStageBytes, last ? 0 : barrier + 8, parity ^ last};
    }
    template <class C>
    __device__ __forceinline__ Stage previous() const {
        const bool first = barrier == 0;
        return {first ? (C::kStages - 1) * C::kStageBytes : rows - C::kStageBytes, first ? 8 * (C::kStages - 1) : barrier - 8, parity ^ first};
    }
    template <class C>
    __device__ __forceinline__ uint32_t mask() const { return barrier * (C::kKeys * 4 / 8); }
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
        for (int i = 0; i < C::kStages; ++i) {
            ptx::mbarrier_init(shared + C::kStageBarrierOffset + 8 * i, C::kKeys * C::kCopiesPerKey);
            ptx::mbarrier_init(shared + C::kWeighedBarrierOffset + 8 * i, 32 * C::kScoreWarps);
            ptx::mbarrier_init(shared + C::kFreeBarrierOffset + 8 * i, 32 * C::kValueWarps);
        }
    }
    __device__ __forceinline__ void wait(Stage s) const { ptx::mbarrier_wait(barrier(s), s.parity); }
    // By the value warps: one is done with the stage's block; all of them are.
    __device__ __forceinline__ void release(Stage s) const { ptx::mbarrier_arrive(shared + C::kFreeBarrierOffset + s.barrier); }
    __device__ __forceinline__ void wait_until_free(Stage s) const { ptx::mbarrier_wait(shared + C::kFreeBarrierOffset + s.barrier, s.parity); }

    // By the lane that has found the key: its row (or not, see copy_rows), its scales, and its mask, which makes the score of what is no key -inf. The row
    // of what is no key becomes zeros, so that whatever lies in its slot, NaN bytes too, has no effect.
    __device__ __forceinline__ void copy(Stage s, int key, const KeyAddress& found, bool with_row) const {
        const uint32_t to = row(s, key), at = barrier(s);
        const bool valid = found.row != nullptr;
        if constexpr (Record::kScalesAfterRows) ptx::cp_async<8>(to + kRowBytes, found.row + found.scales_from_row, valid);
        if (valid) {
            if (with_row) ptx::cp_async_bulk(to, found.row, kRowBytes, at);
        } else {
#pragma unroll 1
            for (uint32_t i = 0; i < kRowBytes; i += 16) ptx::st_shared_v4(to + i, 0, 0, 0, 0);
        }
        if constexpr (Record::kScalesAfterRows) ptx::cp_async_mbarrier_arrive(at);
        ptx::st_shared_f32(shared + C::kMaskOffset + s.mask<C>() + 4 * column_of_row(key), valid ? 0.f : -INFINITY);
        ptx::mbarrier_arrive_expect_tx(at, valid ? kRowBytes : 0);
        if (!valid) ptx::fence_proxy_async();   // the next block of this stage may bring a key
    }

    // By a whole warp: the rows alone of its keys of a block, all of which are keys, found by lanes from first_lane on.
    __device__ __forceinline__ void copy_rows(Stage s, int first_key, const KeyAddress& found, int first_lane) const {
        const uint8_t* rows[C::kKeysPerWarp];
#pragma unroll
        for (int k = 0; k < C::kKeysPerWarp; ++k) {
            rows[k] = reinterpret_cast<const uint8_t*>(__shfl_sync(0xffffffffu, reinterpret_cast<unsigned long long>(found.row), first_lane + k));
        }
        const uint32_t to = row(s, first_key), at = barrier(s);
        if (ptx::elect_one()) {
#pragma unroll
            for (int k = 0; k < C::kKeysPerWarp; ++k) ptx::cp_async_bulk(to + k * C::kRowPitch, rows[k], kRowBytes, at);
        }
    }
};

}  // namespace flash_mla::sm90::head16
