// Which keys a CTA reads, and where they lie.
#pragma once
#include "kv_format.h"
#include "sm90/decode/sparse/params.h"

namespace flash_mla::sm90 {

// The blocks of key groups that one split visits. The split's range follows from the shapes, so that the first
// indices can be fetched together with the lengths; the lengths only cut off what lies behind them. The groups
// of the main cache come first, so a short main length leaves a hole before the extra groups.
struct BlockRange {
    int begin, end;          // groups of this split, those past the extra length cut off
    int blocks_before_hole;  // blocks [0, blocks_before_hole) and [blocks_after_hole, ..) have live keys
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
        const bool extra_is_live = extra_end > main_groups;
        const int blocks_to_extra_end = extra_is_live ? blocks_up_to(extra_end) : 0;
        r.count = r.blocks_before_hole + max(0, blocks_to_extra_end - r.first_after_hole);
        r.end = min(range_end, extra_is_live ? extra_end : main_live);
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

__device__ __forceinline__ const int32_t* index_list(const KeySource& source, int batch, int row) {
    return source.indices + batch * source.indices_stride_b + row * source.indices_stride_s;
}

__device__ __forceinline__ int index_list_length(const KeySource& source, int batch) {
    const int n = source.lengths ? __ldg(source.lengths + batch) : source.width;
    return max(0, min(n, source.width));
}

// The two keys of a group that a lane works for (rows g and g + 8 of the matrix product): their slots as the
// index list names them, -1 where the list has ended.
struct Slots {
    int32_t slot[2];
};

__device__ __forceinline__ Slots load_slots(const SparseDecodeParams& p, const IndexLists& lists, int group, int g) {
    const bool extra = group >= p.source[0].groups;
    const int position = (extra ? group - p.source[0].groups : group) * kKeysPerGroup + g;
    const int32_t* list = extra ? lists.extra : lists.main;
    const int width = p.source[extra].width;
    Slots s;
#pragma unroll
    for (int i = 0; i < 2; ++i) s.slot[i] = position + 8 * i < width ? __ldg(list + position + 8 * i) : -1;
    return s;
}

// Where the bytes of those keys lie. A key that does not count has valid = false and addresses that are not to
// be followed.
struct KeyAddress {
    const uint8_t* row;
    const uint8_t* scales;
    bool valid;
};

template <class Record>
__device__ __forceinline__ KeyAddress locate(const KeySource& source, int32_t slot, bool in_length) {
    const uint32_t block = source.page.divide(static_cast<uint32_t>(slot) & 0x7fffffffu);
    const uint32_t offset = static_cast<uint32_t>(slot) - block * source.page.divisor;
    const uint8_t* base = source.blocks + static_cast<int64_t>(block) * source.block_stride_bytes;
    KeyAddress a;
    a.valid = in_length && static_cast<uint32_t>(slot) < source.num_slots;
    a.row = base + offset * Record::kRowBytes;
    a.scales = Record::kScalesAfterRows
                   ? base + source.page.divisor * Record::kRowBytes + offset * Record::kScaleBytes
                   : a.row + Record::kScaleOffset;
    return a;
}

}  // namespace flash_mla::sm90
