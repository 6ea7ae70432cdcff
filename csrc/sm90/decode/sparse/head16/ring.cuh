// Keys from global memory into the ring, as they are, some blocks ahead of their use.
#pragma once
#include <cmath>

#include "ptx/memory.cuh"
#include "sm90/decode/sparse/head16/config.h"
#include "sm90/decode/sparse/keys.cuh"

namespace flash_mla::sm90::head16 {

// Where a key's bytes come from, as it lies in shared memory. What is no key has 0 bytes to copy; the addresses are then
// those of slot 0.
struct alignas(16) FetchEntry {
    const uint8_t* row;
    uint32_t scales_from_row;   // distance
    uint32_t bytes;             // 16 or 0 for each chunk
};

template <class C>
__device__ __forceinline__ FetchEntry fetch_entry(const SparseDecodeParams& p, const IndexLists& lists, KeyPlace place,
                                                  int32_t slot) {
    const bool valid = is_key(p, lists, place, slot);
    const KeyAddress a = locate<typename C::Record>(p.source[place.extra], valid ? slot : 0);
    return {a.row, a.scales_from_row, valid ? 16u : 0u};
}

// Eight lanes fetch one key, 128 contiguous bytes at a time. What is no key becomes zeros, so that whatever lies in its
// slot, NaN bytes too, has no effect; its mask makes its score -inf.
template <class C>
struct RingWriter {
    using Record = typename C::Record;
    uint32_t row_at, mask_at;   // of stage 0: this lane's place in its key's row, and its key's mask
    int row, lane_of_key;

    __device__ __forceinline__ explicit RingWriter(uint32_t shared)
        : row(threadIdx.x / kThreadsPerKey), lane_of_key(threadIdx.x % kThreadsPerKey) {
        row_at = ptx::opaque(shared + C::kRingOffset + row * C::kRowPitch + 16 * lane_of_key);
        mask_at = ptx::opaque(shared + C::kMaskOffset + 4 * column_of_row(row));
    }

    // Starts fetching this lane's part of its key. `ring` and `mask`: offsets of the stage.
    __device__ __forceinline__ void fetch(const FetchEntry& entry, uint32_t ring, uint32_t mask) const {
        const uint32_t to = row_at + ring;
        const uint8_t* from = ptx::opaque(entry.row + 16 * lane_of_key);
        constexpr int kChunks = Record::kRowBytes / 16;
        constexpr int kDone = kChunks / kThreadsPerKey * kThreadsPerKey, kLeft = kChunks - kDone;
#pragma unroll
        for (int i = 0; i < kDone; i += kThreadsPerKey) ptx::cp_async_16(to + 16 * i, from + 16 * i, entry.bytes);
        if (lane_of_key < kLeft) {
            ptx::cp_async_16(to + 16 * kDone, from + 16 * kDone, entry.bytes);
        } else if (Record::kScalesAfterRows && lane_of_key == kLeft) {   // its next chunk is the one behind the row
            ptx::cp_async_8(to + 16 * kDone, entry.row + entry.scales_from_row, entry.bytes / 2);
        }
        if (lane_of_key == kThreadsPerKey - 1) ptx::st_shared_f32(mask_at + mask, entry.bytes ? 0.f : -INFINITY);
    }
};

// After the first blocks, whose keys every thread finds for itself, one lane per key finds it for all eight, a block
// ahead of the fetch: through a table in shared memory with room for two blocks.
template <class C>
struct FetchTable {
    uint32_t at;

    __device__ __forceinline__ explicit FetchTable(uint32_t shared) : at(ptx::opaque(shared + C::kFetchTableOffset)) {}
    __device__ __forceinline__ uint32_t entry(int block, int key) const { return at + 16 * ((block & 1) * C::kKeys + key); }

    __device__ __forceinline__ void store(int block, int key, const FetchEntry& e) const {
        const uint64_t row = reinterpret_cast<uint64_t>(e.row);
        ptx::st_shared_v4(entry(block, key), static_cast<uint32_t>(row), static_cast<uint32_t>(row >> 32), e.scales_from_row, e.bytes);
    }
    __device__ __forceinline__ FetchEntry load(int block, int key) const {
        const uint4 v = ptx::ld_shared_v4(entry(block, key));
        return {reinterpret_cast<const uint8_t*>(static_cast<uint64_t>(v.y) << 32 | v.x), v.z, v.w};
    }
};

}  // namespace flash_mla::sm90::head16
