// Keys from global memory into the ring, as they are, some blocks ahead of their use.
#pragma once
#include <cmath>

#include "ptx/memory.cuh"
#include "sm90/decode/sparse/head16/config.h"
#include "sm90/decode/sparse/keys.cuh"

namespace flash_mla::sm90::head16 {

// Eight lanes fetch one key, 128 contiguous bytes at a time. What is no key becomes zeros, so that whatever lies in its
// slot, NaN bytes too, has no effect; its mask makes its score -inf.
template <class C>
struct RingWriter {
    using Record = typename C::Record;
    const SparseDecodeParams& p;
    const IndexLists& lists;
    int split;
    uint32_t row_at, mask_at;   // of stage 0: this lane's place in its key's row, and its key's mask
    int row, lane_of_key;

    __device__ __forceinline__ RingWriter(const SparseDecodeParams& p, const IndexLists& lists, int split, uint32_t shared)
        : p(p), lists(lists), split(split), row(threadIdx.x / kThreadsPerKey), lane_of_key(threadIdx.x % kThreadsPerKey) {
        row_at = shared + C::kRingOffset + row * C::kRowPitch + 16 * lane_of_key;
        mask_at = shared + C::kMaskOffset + 4 * column_of_row(row);
    }

    __device__ __forceinline__ KeyPlace place(int block_group) const {
        return KeyPlace(p, split, block_group + row / kKeysPerGroup, row % kKeysPerGroup);
    }
    __device__ __forceinline__ int32_t load_slot(int block_group) const {
        return sm90::load_slot(p, lists, place(block_group));
    }

    // Starts fetching the block whose first group is `block_group`; `slot` is what load_slot returned for it.
    __device__ __forceinline__ void fetch(int stage, int block_group, int32_t slot) const {
        const KeyPlace at = place(block_group);
        const bool valid = is_key(p, lists, at, slot);
        const KeyAddress a = locate<Record>(p.source[at.extra], valid ? slot : 0);
        const uint32_t bytes = valid ? 16 : 0;
        const uint32_t to = row_at + stage * C::kStageBytes;
        const uint8_t* from = a.row + 16 * lane_of_key;
        constexpr int kChunks = Record::kRowBytes / 16;
#pragma unroll
        for (int i = 0; i < kChunks / kThreadsPerKey; ++i) ptx::cp_async_16(to + 128 * i, from + 128 * i, bytes);
        constexpr int kDone = kChunks / kThreadsPerKey * kThreadsPerKey, kLeft = kChunks - kDone;
        if (lane_of_key < kLeft) {
            ptx::cp_async_16(to + 16 * kDone, from + 16 * kDone, bytes);
        } else if (Record::kScalesAfterRows && lane_of_key == kLeft) {
            ptx::cp_async_8(to + 16 * kDone, a.scales, bytes / 2);   // this lane's next chunk is the one behind the row
        }
        if (lane_of_key == kThreadsPerKey - 1) ptx::st_shared_f32(mask_at + 4 * stage * C::kKeys, valid ? 0.f : -INFINITY);
    }
};

}  // namespace flash_mla::sm90::head16
