// Which keys a CTA reads, and where they lie.
#pragma once
#include "kv_format.h"
#include "ptx/memory.cuh"
#include "sm90/decode/sparse/params.h"
#include "sm90/decode/sparse/token_heads.cuh"

namespace flash_mla::sm90 {

__device__ __forceinline__ const int32_t* index_list(const KeySource& source, uint32_t batch, uint32_t row) {
    return source.indices + static_cast<uint64_t>(batch) * source.indices_stride_b +
           static_cast<uint64_t>(row) * source.indices_stride_s;
}

__device__ __forceinline__ int load_length(const KeySource& source, uint32_t batch) {
    return static_cast<int>(ptx::ld_global_u32_or(source.lengths + batch, source.lengths, source.width));
}

// The token's two index lists. (Members, not arrays: a run-time index would put them into local memory.)
struct IndexLists {
    const int32_t *main, *extra;
    int main_length, extra_length;

    __device__ __forceinline__ void find(const SparseDecodeParams& p, const TokenHeads& token) {
        main = index_list(p.source[0], token.batch, token.row), extra = index_list(p.source[1], token.batch, token.row);
    }
    __device__ __forceinline__ void load_lengths(const SparseDecodeParams& p, uint32_t batch) {
        const int main = load_length(p.source[0], batch), extra = load_length(p.source[1], batch);   // side by side
        main_length = max(0, min(main, p.source[0].width)), extra_length = max(0, min(extra, p.source[1].width));
    }
    // How many blocks of a split are worth visiting. Groups are numbered through, the main cache's first; a split's range follows from the
    // shapes, so that the first indices can be fetched together with the lengths, and the lengths only cut off its end. (A main length
    // below its width leaves groups without keys before the extra cache's: they are visited.)
    __device__ __forceinline__ int count_blocks(const SparseDecodeParams& p, int split, int groups_per_block) const {
        const auto groups = [](int keys) { return (keys + kKeysPerGroup - 1) / kKeysPerGroup; };
        const int end = extra_length > 0 ? p.source[0].groups + groups(extra_length) : groups(main_length);
        const int live = max(0, min(p.groups_per_split, end - split * p.groups_per_split));
        return (live + groups_per_block - 1) / groups_per_block;
    }
};

// A key of a block: in which cache, and where in its index list. What lies past the split's last group belongs to another
// split.
struct KeyPlace {
    bool extra, in_split;
    int position;

    __device__ __forceinline__ KeyPlace(const SparseDecodeParams& p, int split, int group, int key_of_group) {
        extra = group >= p.source[0].groups;
        in_split = group < (split + 1) * p.groups_per_split;
        position = (extra ? group - p.source[0].groups : group) * kKeysPerGroup + key_of_group;
    }
};

// Where the index list names the slot of that place, if it does.
struct SlotAddress {
    const int32_t* at;
    bool exists;

    __device__ __forceinline__ SlotAddress(const SparseDecodeParams& p, const IndexLists& lists, KeyPlace place)
        : at((place.extra ? lists.extra : lists.main) + place.position),
          exists(place.in_split && place.position < p.source[place.extra].width) {}
    __device__ __forceinline__ int32_t load() const { return static_cast<int32_t>(ptx::ld_global_u32_or(at, exists, ~0u)); }
};

// Whether that slot counts as a key.
__device__ __forceinline__ bool is_key(const SparseDecodeParams& p, const IndexLists& lists, KeyPlace place, int32_t slot) {
    return place.position < (place.extra ? lists.extra_length : lists.main_length) &&
           static_cast<uint32_t>(slot) < p.source[place.extra].num_slots;
}

// Where the bytes of a key lie.
struct KeyAddress {
    const uint8_t* row;         // null: no key
    uint32_t scales_from_row;
};

template <class Record>
__device__ __forceinline__ KeyAddress locate(const KeySource& source, uint32_t slot) {
    const uint32_t block = source.page.divide(slot);
    const uint32_t offset = slot - block * source.page.divisor;
    constexpr uint32_t kRowUnits = Record::kRowBytes / 16;
    const uint64_t units = static_cast<uint64_t>(block) * source.block_stride16 + offset * kRowUnits;
    // V4, from a row past the rows to its scales: less rows ahead, more scales, the larger the offset.
    const uint32_t to_scales = Record::kScalesAfterRows
                                   ? source.page.divisor * Record::kRowBytes - offset * (Record::kRowBytes - Record::kScaleBytes)
                                   : Record::kScaleOffset;
    return {source.blocks + units * 16, to_scales};
}

// Of what a list names at that place.
template <class Record>
__device__ __forceinline__ KeyAddress find_key(const SparseDecodeParams& p, const IndexLists& lists, KeyPlace place, int32_t slot) {
    const bool valid = is_key(p, lists, place, slot);
    const KeyAddress a = locate<Record>(p.source[place.extra], valid ? slot : 0);
    return {valid ? a.row : nullptr, a.scales_from_row};
}

}  // namespace flash_mla::sm90
