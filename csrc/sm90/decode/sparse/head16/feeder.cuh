// Keeps the ring filled: finds a CTA's keys and starts their copies, kAhead blocks before they are used.
//
// Of the first kAhead blocks each warp finds its own keys, all in one go: lane kKeysPerWarp * b + k the k-th of block b.
// From then on the finder warps are a block ahead of the copies: while block i is worked on they find the keys of block
// i + kAhead, and all warps copy them behind the barrier of block i.
#pragma once
#include "sm90/decode/sparse/head16/ring.cuh"
#include "sm90/decode/sparse/head16/roles.cuh"

namespace flash_mla::sm90::head16 {

template <class C>
struct KeyFeeder {
    const SparseDecodeParams& p;
    const Ring<C> ring;
    const int rank, warp, lane;
    const bool finds_keys;
    const int found_key;             // of a finder's lane
    const int first_group;
    const int first_block, first_key;
    IndexLists lists;
    SlotAddress first_slot;
    FoundKey<C> found = {};
    int32_t slot;                    // of the first key, then of the next one to find
    int first_blocks;                // that are fetched whether or not the lengths leave them keys

    // Addresses only: nothing that the kernel before may have written.
    __device__ __forceinline__ KeyFeeder(const SparseDecodeParams& params, uint32_t shared, const ClusterWork<C>& work, bool is_finder,
                                         int cluster_rank, int warp_id, int lane_id)
        : p(params), ring{shared}, rank(cluster_rank), warp(warp_id), lane(lane_id), finds_keys(is_finder),
          found_key(static_cast<int>(threadIdx.x) - (C::kThreads - C::kKeys)), first_group(cluster_rank * params.groups_per_split),
          first_block(lane_id / C::kKeysPerWarp), first_key(C::kKeysPerWarp * warp_id + lane_id % C::kKeysPerWarp),
          lists{ptx::opaque(index_list(params.source[0], work.batch, work.row)), ptx::opaque(index_list(params.source[1], work.batch, work.row)), 0, 0},
          first_slot(params, lists, first_place()) {
        first_slot.at = ptx::opaque(first_slot.at);
    }

    // The first slots and the lengths, side by side.
    __device__ __forceinline__ void load_first(uint32_t batch) {
        slot = first_slot.load();
        lists.main_length = index_list_length(p.source[0], batch);
        lists.extra_length = index_list_length(p.source[1], batch);
    }
    __device__ __forceinline__ void locate_first() {
        const int groups = min(p.groups_per_split, p.source[0].groups + p.source[1].groups - first_group);
        first_blocks = min(C::kAhead, (groups + C::kKeyGroups - 1) / C::kKeyGroups);
        if (first_blocks > 0) found.locate(p, lists, first_place(), slot);
    }
    __device__ __forceinline__ void copy_first(int i) const {
        const uint32_t lanes = ((1u << C::kKeysPerWarp) - 1) << (C::kKeysPerWarp * i);
        if (i < first_blocks) ring.copy(Stage::make<C>(i), first_key, found.row, found.valid, lanes, lane);
    }
    // Before a barrier of the CTA.
    __device__ __forceinline__ void store_first_scales_and_masks() const {
        if (C::kSharesWeights && threadIdx.x == 0) lists.store(ring.shared + C::kListsOffset);
        if (first_block < first_blocks) ring.store_scales_and_mask(Stage::make<C>(first_block), first_key, found);
    }

    // How many blocks there are, now that the lengths are known; and the slots of the first one to find.
    __device__ __forceinline__ int begin_loop() {
        const int live = max(0, live_groups(p, rank, lists.main_length, lists.extra_length));
        // Opaque: or the compiler keeps what it follows from for later, instead of the one number.
        const int blocks = ptx::opaque((live + C::kKeyGroups - 1) / C::kKeyGroups);
        slot = -1;
        load_slot(C::kAhead, found_key, blocks);
        return blocks;
    }
    // Before the barrier of block i. `found` is of block i + kAhead - 1, whose copies have started into `told`; then the
    // next one.
    __device__ __forceinline__ void find_ahead(int i, int blocks, Stage told) {
        const int ahead = i + C::kAhead;
        if (!finds_keys) return;
        // Where registers are short, the lists are kept in shared memory, and addresses are worked out anew.
        if (C::kSharesWeights) lists.load(ring.shared + C::kListsOffset);
        const int key = C::kSharesWeights ? ptx::opaque(found_key) : found_key;
        if (i > 0 && ahead - 1 < blocks) ring.store_scales_and_mask(told, key, found);
        if (ahead < blocks) {
            found.locate(p, lists, place_of(ahead, key), slot);
            ring.tell(ahead, key, found);
            load_slot(ahead + 1, key, blocks);
        }
    }
    // Behind it, into the stage of block i - 1, which nobody needs any more.
    __device__ __forceinline__ void copy_ahead(int i, int blocks, Stage free) const {
        const int ahead = i + C::kAhead;
        if (ahead < blocks) ring.copy_as_told(free, ahead, warp, lane);
    }

   private:
    __device__ __forceinline__ KeyPlace place_of(int block, int key) const {
        return KeyPlace(p, rank, first_group + block * C::kKeyGroups + key / kKeysPerGroup, key % kKeysPerGroup);
    }
    __device__ __forceinline__ KeyPlace first_place() const { return place_of(first_block, first_key); }
    __device__ __forceinline__ void load_slot(int block, int key, int blocks) {
        if (finds_keys && block < blocks) slot = SlotAddress(p, lists, place_of(block, key)).load();
    }
};

}  // namespace flash_mla::sm90::head16
