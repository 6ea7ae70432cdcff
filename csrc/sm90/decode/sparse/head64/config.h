// The 64-row head tile: compile-time shape of a CTA and its shared memory. See docs/head64.md.
#pragma once
#include "kv_format.h"
#include "sm90/decode/sparse/head16/config.h"
#include "plan.h"
#include "sm90/decode/sparse/params.h"

namespace flash_mla::sm90::head64 {

inline constexpr int kWarpgroup = 128;        // threads
inline constexpr int kGroupsPerBlock = 4;     // of kKeysPerGroup keys
inline constexpr int kConsumerBarrier = 1;    // a named barrier of the CTA

template <class Record_>
struct Config {
    using Record = Record_;
    // What a tile is if the rows behind those of this one are zero.
    using SmallTile = head16::Config<Record, 2, 16 * kGroupsPerBlock, true>;
    static constexpr int kHeads = kLargeTile, kLseRows = kHeads;
    static constexpr int kKeyGroups = kGroupsPerBlock;
    static constexpr int kKeys = kKeyGroups * kKeysPerGroup;   // of a block

    // Two warpgroups multiply: the first computes scores and weights, each accumulates half of the dims of V. Two fetch and
    // dequantize.
    static constexpr int kConsumers = 2 * kWarpgroup, kProducers = 2 * kWarpgroup;
    static constexpr int kThreads = kConsumers + kProducers;
    static constexpr int kConsumerRegisters = 192, kProducerRegisters = 64, kCommonRegisters = 128;
    static_assert(kConsumers * kConsumerRegisters + kProducers * kProducerRegisters <= 65536);
    static constexpr int kValueDims = Record::kDimV / 2;        // of a consumer warpgroup
    static constexpr int kKeysPerWarp = kKeys / (kProducers / 32);   // 8: four lanes a key

    // Tiles of dims. Of the e4m3 tiles a lane fetches 16 bytes each, of RoPE 2 x 16 bytes.
    static constexpr int kTiles = Record::kDimQK / kTileDims;
    static constexpr int kDataTiles = Record::kNopeDims / kTileDims;
    static_assert(kTiles == kDataTiles + 1 && Record::kRopeDims == kTileDims);
    // A block is handed over in two parts: the scores of the first tiles begin while the others are still being filled.
    static constexpr int kFirstTiles = 4;

    // Shared memory, in bytes from its start, which is aligned to 1024. Q and a block of keys: [tile][row][64 dims] bf16,
    // swizzled. When the last block has been multiplied, both are free to receive the partial results of the peers, bf16
    // [peer][unit][thread] of 16 bytes, and the own ones, fp32 [unit][half][thread].
    static constexpr int kTileBytes = 64 * 128;
    static constexpr int kStages = 2;
    static constexpr int kStageBytes = kTiles * kTileBytes;
    static constexpr int kQueryOffset = 0;
    static constexpr int kKeyOffset = kTiles * kTileBytes;
    // Weights of a block, as A fragments, [stage][16 keys][thread] of 16 bytes. Where RoPE is no part of V, its place is free
    // as soon as the scores are there.
    static constexpr int kWeightBytes = kHeads * kKeys * 2;
    static constexpr int kWeightStageBytes = Record::kRopeInV ? kWeightBytes : kStageBytes;
    static constexpr int kWeightOffset = kKeyOffset + (Record::kRopeInV ? kStages * kStageBytes : kDataTiles * kTileBytes);
    static_assert(kWeightBytes == kTileBytes);
    static constexpr int kWeightEnd = kKeyOffset + kStages * (kStageBytes + (Record::kRopeInV ? kWeightBytes : 0));
    static constexpr int kFactorOffset = kWeightEnd;                                    // [stage][head], see consumer.cuh
    static constexpr int kRowSumOffset = kFactorOffset + kStages * kHeads * 4;          // [head] {shift, sum}
    static constexpr int kMaskOffset = kRowSumOffset + kHeads * 8;                      // [stage][key], see producer.cuh
    static constexpr int kSinkOffset = kMaskOffset + kStages * kKeys * 4;               // [head], base 2
    static constexpr int kPeerLseOffset = kSinkOffset + kHeads * 4;                     // [head][split], base 2
    static constexpr int kFoundOffset = kPeerLseOffset + kHeads * kMaxSplits * 4;       // [batch % 2][warp][lane], see producer.cuh
    static constexpr int kFoundBytes = Record::kScalesAfterRows ? 16 : 8;
    static constexpr int kScalesOffset = kFoundOffset + 2 * kProducers * kFoundBytes;   // [key], as in the record
    static constexpr int kFullOffset = kScalesOffset + kKeys * Record::kScaleBytes;     // barriers: [stage][part]
    static constexpr int kEmptyOffset = kFullOffset + 16 * kStages;                     // [stage]
    static constexpr int kWeighedOffset = kEmptyOffset + 8 * kStages;                   // [stage]
    static constexpr int kLseBarrierOffset = kWeighedOffset + 8 * kStages;
    static constexpr int kPartialBarrierOffset = kLseBarrierOffset + 8;
    static constexpr int kSharedBytes = kPartialBarrierOffset + 8;
    // The barriers of both kinds of tile are apart from all that either uses: the one may follow the other.
    static_assert(kSharedBytes <= SmallTile::kBarriersOffset && SmallTile::kDataEnd <= kFullOffset);
    static_assert(kThreads == SmallTile::kThreads && kConsumers == 32 * SmallTile::kScoreWarps && kKeys == SmallTile::kKeys);

    static constexpr int kUnitPlacesOffset = kFactorOffset;   // [unit], of the own partial result, when the last factors have been read
    static constexpr int kIncomingOffset = 0;
    static constexpr int kUnits = Record::kDimV / kUnitDims;
    static_assert(8 * kUnits <= kStages * kHeads * 4);
    static constexpr int kUnitBytes = kHeads * kUnitDims * 4;
    static constexpr bool kSendsBf16 = true;
    static constexpr int kLseArrivals = kWarpgroup, kPartialArrivals = kConsumers;   // see expect_peers
    static_assert(kUnits == 32 && incoming_bytes(kUnitBytes, kSendsBf16) <= kFactorOffset);
    // Of one split alone: rows of bf16 on their way out, per consumer warpgroup; padded so that 8 rows lie in different banks.
    static constexpr int kOutPitch = kValueDims * 2 + 16;
    static_assert(2 * kHeads * kOutPitch <= kFactorOffset);
};

}  // namespace flash_mla::sm90::head64
