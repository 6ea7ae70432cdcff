// Which keys a CTA reads, and where they lie.
#pragma once
#include "kv_format.h"
#include "sm90/decode/sparse/params.h"

namespace flash_mla::sm90 {

// The blocks of key groups that one split visits. The split's range follows from the shapes, so that the first
// indices can be fetched together with the lengths; the lengths only cut off what lies behind them. The groups
// of the main cache come first, so a short main length leaves a hole before the extra groups.
struct BlockRange {
    int begin;               // first group of this split
    int blocks_before_hole;  // blocks [0, blocks_before_hole) and [first_after_hole, ..) have live keys
    int first_after_hole;
    int count;               // blocks to visit

    template <int kGroupsPerBlock>
    __device__ __forceinline__ static BlockRange make(const SparseDecodeParams& p, int split, int main_length,
                                                      int extra_length) {
        const int main_groups = p.source[0].groups;
        const int main_live = (main_length + kKeysPerGroup - 1) / kKeysPerGroup;
        const int extra_end = main_groups + (extra_length + kKeysPerGroup - 1) / kKeysPerGroup;
        BlockRange r;
        r.begin = split * p.groups_per_split;
        const int range_end = min(r.begin + p.groups_per_split, main_groups + p.source[1].groups);
        auto blocks_up_to = [&](int group) {
            return max(0, min(group, range_end) - r.begin + kGroupsPerBlock - 1) / kGroupsPerBlock;
        };
        r.blocks_before_hole = blocks_up_to(main_live);
        r.first_after_hole = max(r.blocks_before_hole, max(0, main_groups - r.begin) / kGroupsPerBlock);
        const int blocks_to_extra_end = extra_end > main_groups ? blocks_up_to(extra_end) : 0;
        r.count = r.blocks_before_hole + max(0, blocks_to_extra_end - r.first_after_hole);
        return r;
    }

    // First group of the i-th block to visit.
    template <int kGroupsPerBlock>
    __device__ __forceinline__ int group_of(int i) const {
        const int block = i < blocks_before_hole ? i : i - blocks_before_hole + first_after_hole;
        return begin + block * kGroupsPerBlock;
    }
};

// The token's two index lists. (Members, not arrays: a run-time index would put them into local memory.)
struct IndexLists {
    const int32_t *main, *extra;
    int main_length, extra_length;
};

__device__ __forceinline__ const int32_t* index_list(const KeySource& source, uint32_t batch, uint32_t row) {
    return source.indices + static_cast<uint64_t>(batch) * source.indices_stride_b +
           static_cast<uint64_t>(row) * source.indices_stride_s;
}

__device__ __forceinline__ int index_list_length(const KeySource& source, uint32_t batch) {
    const int n = source.lengths ? __ldg(source.lengths + batch) : source.width;
    return max(0, min(n, source.width));
}

// A key of a block: in which cache, and where in its index list. Groups are numbered through, the main cache's first;
// what lies past the split's last group belongs to another split.
struct KeyPlace {
    bool extra, in_split;
    int position;

    __device__ __forceinline__ KeyPlace(const SparseDecodeParams& p, int split, int group, int key_of_group) {
        extra = group >= p.source[0].groups;
        in_split = group < (split + 1) * p.groups_per_split;
        position = (extra ? group - p.source[0].groups : group) * kKeysPerGroup + key_of_group;
    }
};

// The slot that the index list names there, -1 past its end.
__device__ __forceinline__ int32_t load_slot(const SparseDecodeParams& p, const IndexLists& lists, KeyPlace place) {
    const int32_t* list = place.extra ? lists.extra : lists.main;
    return place.in_split && place.position < p.source[place.extra].width ? __ldg(list + place.position) : -1;
}

// Whether that slot counts as a key.
__device__ __forceinline__ bool is_key(const SparseDecodeParams& p, const IndexLists& lists, KeyPlace place, int32_t slot) {
    return place.position < (place.extra ? lists.extra_length : lists.main_length) &&
           static_cast<uint32_t>(slot) < p.source[place.extra].num_slots;
}

// Where the bytes of a slot lie.
struct KeyAddress {
    const uint8_t* row;
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

}  // namespace flash_mla::sm90
