// Keeps the ring filled: finds a CTA's keys and starts their copies, at first as many blocks as it has stages, then each a block late.
//
// A value warp finds its keys of kBlocksPerRound blocks at once: lane kKeysPerWarp * b + k the k-th of block b of the round.
// While it copies a round's blocks, one after the other, the slots of the next round are on their way.
#pragma once
#include "sm90/decode/sparse/head16/ring.cuh"
#include "sm90/decode/sparse/head16/roles.cuh"

namespace flash_mla::sm90::head16 {

template <class C>
struct KeyFeeder {
    const SparseDecodeParams& p;
    const Ring<C> ring;
    const int rank, first_group;
    const int first_key;             // of this warp
    const int block_of_round, key;   // of this lane
    IndexLists lists;
    SlotAddress first_slot;
    KeyAddress found;
    int32_t slot;                    // of the first round, then of the next one
    int blocks;                      // of the CTA

    // Addresses only: nothing that the kernel before may have written.
    __device__ __forceinline__ KeyFeeder(const SparseDecodeParams& params, uint32_t shared, const ClusterWork<C>& work, int cluster_rank,
                                         int value_warp, int lane)
        : p(params), ring{shared}, rank(cluster_rank), first_group(cluster_rank * params.groups_per_split),
          first_key(C::kKeysPerWarp * value_warp), block_of_round(lane / C::kKeysPerWarp), key(first_key + lane % C::kKeysPerWarp),
          lists(find_lists(params, work)),
          first_slot(params, lists, place_in_round(0)) {
        first_slot.at = ptx::opaque(first_slot.at);
    }

    // The first slots, by the value warps, and the lengths, by all, side by side.
    __device__ __forceinline__ void load_first(uint32_t batch, bool feeds) {
        if (feeds) slot = first_slot.load();
        lists.load_lengths(p, batch);
    }
    // Opaque: or the compiler keeps what it follows from for later, instead of the one number.
    __device__ __forceinline__ void count_blocks() { blocks = ptx::opaque(lists.count_blocks(p, rank, C::kKeyGroups)); }
    __device__ __forceinline__ void find_first() { found = find_key<typename C::Record>(p, lists, place_in_round(0), slot); }
    // Behind the copies of the first round's first blocks.
    __device__ __forceinline__ void load_next_slots(int first_block) {
        if constexpr (C::kHasZeroColumn) {   // registers are short: the lists' addresses are worked out anew
            lists.find(p, ClusterWork<C>(p, ptx::ld_shared_u32(ring.shared + C::kClusterOffset)));
        }
        SlotAddress address(p, lists, place_in_round(first_block));
        address.exists &= first_block < blocks;
        slot = address.load();   // always: a new value needs no register of the old one
    }

    // Block i of the first round, if there is one, into its stage. Block by block.
    __device__ __forceinline__ void copy(int i, Stage s) {
        if (i < blocks) copy_own(i, s, true);
    }

    // Block i, which there is, into a stage that is filled again. A bulk copy takes its operands from uniform registers: lane by lane that is a loop of
    // 52 cycles a key, from one lane 24 (C::kRefillsTogether: where that pays). At the start eight warps wait for the hardware either way.
    __device__ __forceinline__ void refill(int i, Stage s) {
        if (i % C::kBlocksPerRound == 0) {
            found = find_key<typename C::Record>(p, lists, place_in_round(i), slot);
            load_next_slots(i + C::kBlocksPerRound);
        }
        const bool together = C::kRefillsTogether && __all_sync(0xffffffffu, !is_own(i) || found.row != nullptr);
        if (together) ring.copy_rows(s, first_key, found, C::kKeysPerWarp * (i % C::kBlocksPerRound));
        copy_own(i, s, !together);
    }

   private:
    __device__ __forceinline__ bool is_own(int i) const { return block_of_round == i % C::kBlocksPerRound; }
    __device__ __forceinline__ void copy_own(int i, Stage s, bool with_row) const {
        if (is_own(i)) ring.copy(s, C::kHasZeroColumn ? ptx::opaque(key) : key, found, with_row);
        __syncwarp();
    }
    __device__ __forceinline__ static IndexLists find_lists(const SparseDecodeParams& p, const ClusterWork<C>& work) {
        IndexLists lists;
        lists.find(p, work);
        lists.main = ptx::opaque(lists.main), lists.extra = ptx::opaque(lists.extra);
        return lists;
    }
    __device__ __forceinline__ KeyPlace place_in_round(int first_block) const {
        const int group = first_group + (first_block + block_of_round) * C::kKeyGroups + key / kKeysPerGroup;
        return KeyPlace(p, rank, group, key % kKeysPerGroup);
    }
};

}  // namespace flash_mla::sm90::head16
