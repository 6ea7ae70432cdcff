// Head tiles of 8 and 16 rows: compile-time shape of a CTA and its shared memory. See docs/sparse_decode.md.
#pragma once
#include <algorithm>

#include "kv_format.h"
#include "plan.h"
#include "sm90/decode/sparse/keys.cuh"
#include "sm90/decode/sparse/params.h"

namespace flash_mla::sm90::head16 {

// kHeadGroups: 8 heads each.  kKeys: keys of a block, which the CTA works on at a time.  kHasZeroColumn: none but zero rows follow
// the tile, in one of 64 rows; the zero row is one more column of its results.
//
// A block's scores are the work of 8 warps, the score warps, and its values that of 8 others, the value warps: while these
// multiply a block, the score warps compute the scores of the next one.
template <class Record_, int kHeadGroups_, int kKeys_, bool kHasZeroColumn_>
struct Config {
    using Record = Record_;
    static constexpr int kHeadGroups = kHeadGroups_;
    static constexpr int kKeys = kKeys_;
    static constexpr bool kHasZeroColumn = kHasZeroColumn_;
    static constexpr int kHeads = 8 * kHeadGroups;
    static constexpr bool kMayBeWide = !kHasZeroColumn;   // Q, see query.cuh: head64/padded_kernel.cuh leaves those to its other kind of tile
    // With the zero row, if there is one: rows that have a log-sum-exp, column groups of the results.
    static constexpr int kLseRows = kHeads + kHasZeroColumn, kColumnGroups = kHeadGroups + kHasZeroColumn;
    // The rows whose results the cluster may have to write.
    static constexpr int kMaxRows = kHasZeroColumn ? kLargeTile : kHeads;
    static constexpr int kKeyGroups = kKeys / kKeysPerGroup;
    static constexpr int kScoreWarps = 8, kValueWarps = 8;
    static constexpr int kWarps = kScoreWarps + kValueWarps;
    static constexpr int kThreads = 32 * kWarps;
    // Score warps that hold 16 rows of Q take registers over from the value warps. V3.2's hold RoPE as well and take more, but not where the value warps
    // have a column group more to accumulate.
    static constexpr bool kMovesRegisters = kHeadGroups == 2;
    static_assert(!kHasZeroColumn || kMovesRegisters);
    static constexpr int kScoreRegisters = Record::kRopeInV || kHasZeroColumn ? 152 : 160, kValueRegisters = 256 - kScoreRegisters;

    // Scores: a warp takes half of the dims (a part) of 8 or 16 keys.
    static constexpr int kDimParts = 2;
    static constexpr int kOctets = kKeys * kDimParts / (8 * kScoreWarps);   // its keys, 8 at a time: N of the matrix product
    static constexpr int kFragmentsPerTile = 2 * kHeadGroups;   // of Q: see query.cuh
    static constexpr int kTiles = Record::kDimV / kTileDims;
    static constexpr int kTilesPerPart = kTiles / kDimParts;
    static constexpr int kRopeWords = Record::kRopeInV ? 0 : 8 / kDimParts;   // V3.2: RoPE dims, shared among the parts

    // Scales, one row per tile in V4 (RoPE's is 1), one per two tiles in V3.2.
    static constexpr int kScaleRows = Record::kRopeInV ? Record::kNumScales + 1 : Record::kNumScales;
    static constexpr int kScaleRowsPerPart = kScaleRows / kDimParts;
    static constexpr int kTilesPerScale = kTiles / kScaleRows;
    static constexpr bool kHasMantissa = !Record::kScalesAfterRows;      // V3.2: fp32 scales; ue8m0 are bare exponents

    // Values: every warp accumulates its own dims of V over all keys.
    static constexpr int kValueDims = Record::kDimV / kValueWarps;
    static constexpr int kValueUnits = kValueDims / kUnitDims;
    static constexpr int kUnits = Record::kDimV / kUnitDims;

    // Shared memory, in bytes from its start.
    //
    // A ring of blocks of keys as they are in the cache: a row of 16-byte chunks per key, V4's scales behind it. An odd
    // number of chunks, so that the same chunk of 8 keys lies in 8 different bank groups. Each stage has a barrier that
    // completes when its rows have come.
    static constexpr int kStages = kKeys == 32 ? 6 : 4;
    static constexpr int kKeysPerWarp = kKeys / kValueWarps;   // that a value warp fetches
    static constexpr int kBlocksPerRound = 32 / kKeysPerWarp;   // that it finds at once, a lane a key
    static_assert(kStages <= kBlocksPerRound);
    static constexpr bool kRefillsTogether = kHeadGroups == 2 && kKeys == 64 && !kHasZeroColumn;   // see KeyFeeder::refill
    static constexpr int kCopiesPerKey = Record::kScalesAfterRows ? 2 : 1;
    static constexpr int kRowPitch = Record::kScalesAfterRows ? Record::kRowBytes + 16 : Record::kRowBytes;
    static constexpr int kScaleInRow = Record::kScalesAfterRows ? Record::kRowBytes : Record::kScaleOffset;
    static constexpr int kStageBytes = kKeys * kRowPitch;
    static_assert(kRowPitch % 32 == 16);
    // Scores: one fp32 partial sum per dim part, in two buffers. In the beginning, Q passes through the weights' place. When the
    // last block has been weighed and multiplied, everything from the scores to what has been handed over is free to receive the partial results of
    // the peers, [peer][unit][lane] of 16 bytes, and the own ones, in fp32: [unit][head group][lane].
    static constexpr int kScoreStride = kKeys + 8;   // floats; 8 mod 32, so that 4 heads x 4 pairs of keys never conflict
    static constexpr int kScoreBytes = kDimParts * kHeads * kScoreStride * 4;
    static constexpr int kUnitBytes = kHeads * kUnitDims * 4;
    static constexpr bool kSendsBf16 = kHeadGroups == 2;   // see send_partial
    static constexpr int kLseArrivals = 0, kPartialArrivals = 32 * kValueWarps;   // see expect_peers; a warp alone reads log-sum-exps that it has stored
    // What the score warps hand over with a block, in a place for each stage. Weights as B fragments, [head][key] in
    // f16 and in bf16; by what accumulators are to be rescaled. See softmax.cuh.
    static constexpr int kOwnHeads = kHeads / kScoreWarps;   // whose softmax a score warp computes
    static constexpr int kWeightBytes = kHeads * kKeys * 2;
    static constexpr int kHeadRescaleOffset = 2 * kWeightBytes;                  // [head], from the place's start
    static constexpr int kUpdateFlagsOffset = kHeadRescaleOffset + kHeads * 4;   // [score warp] bytes
    static_assert(kUpdateFlagsOffset % 16 == 0);
    static constexpr int kWeightPlaceBytes = kUpdateFlagsOffset + (kScoreWarps + 15) / 16 * 16;
    static constexpr int kQueryBytes = kTiles * kFragmentsPerTile * 512;   // [tile][fragment][32 lanes] of 16 bytes
    static constexpr int kUnscaleBytes = kTiles * kHeads * 4;              // [tile][head]
    static constexpr int kScaleStride = kKeys + 8;                        // floats; as kScoreStride
    static constexpr int kScaleBytes = kScaleRows * kScaleStride * 4;

    // Barriers, and the flag of a rejected tile. Barriers of a tile with a zero row lie behind everything else, out of the way of head64/config.h's: its kernel has both.
    static constexpr int kBarrierBytes = 8 * (3 + 3 * kStages + 3 * kHasZeroColumn), kBarriersOffset = kHasZeroColumn ? kMaxSharedBytes - kBarrierBytes : 0;
    static constexpr int kLseBarrierOffset = kBarriersOffset;
    static constexpr int kPartialBarrierOffset = kLseBarrierOffset + 8;
    static constexpr int kStageBarrierOffset = kPartialBarrierOffset + 8;         // [stage]
    static constexpr int kWeighedBarrierOffset = kStageBarrierOffset + 8 * kStages;   // [stage]
    static constexpr int kFreeBarrierOffset = kWeighedBarrierOffset + 8 * kStages;    // [stage]
    static constexpr int kShareBarrierOffset = kFreeBarrierOffset + 8 * kStages;
    // With a zero column:
    static constexpr int kLookBarrierOffset = kShareBarrierOffset + 8;
    static constexpr int kZeroRowBarrierOffset = kLookBarrierOffset + 8, kZeroSumsBarrierOffset = kZeroRowBarrierOffset + 8;
    static_assert((kHasZeroColumn ? kZeroSumsBarrierOffset : kShareBarrierOffset) + 8 == kBarriersOffset + kBarrierBytes);
    static constexpr int kRejectedOffset = kHasZeroColumn ? 0 : kBarrierBytes;   // a flag, see zero_rows.cuh
    static constexpr int kClusterOffset = kRejectedOffset + (kHasZeroColumn ? 4 : 0);
    static constexpr int kRingOffset = (kClusterOffset + 4 + 127) / 128 * 128;
    static constexpr int kScoreOffset = kRingOffset + kStages * kStageBytes;
    static constexpr int kIncomingOffset = kScoreOffset;
    static constexpr int kScaleOffset = kScoreOffset + 2 * kScoreBytes;
    static constexpr int kMaskOffset = kScaleOffset + kScaleBytes;                      // [stage][key]: 0, or -inf for what is no key
    static constexpr int kFactorOffset = kMaskOffset + kStages * kKeys * 4;             // [value warp][key], see weights.cuh
    static constexpr int kWeightOffset = kFactorOffset + kValueWarps * kKeys * 2;
    static_assert(kWeightOffset % 16 == 0);
    // In the beginning. What value warps store meanwhile, masks and factors, lies ahead of it.
    static constexpr int kQueryOffset = kWeightOffset;
    static constexpr int kUnscaleOffset = kQueryOffset + kQueryBytes;
    static constexpr int kZeroIncomingOffset = kIncomingOffset + incoming_bytes(kUnitBytes, kSendsBf16);   // [split][unit][dim] fp32
    static constexpr int kZeroUnitBytes = kHasZeroColumn ? kUnitDims * 4 : 0, kZeroIncomingBytes = incoming_bytes(kZeroUnitBytes, false);
    static constexpr int kShareOffset =   // [row that has a log-sum-exp]: what the split counts
        std::max({kWeightOffset + kStages * kWeightPlaceBytes, kUnscaleOffset + kUnscaleBytes, kZeroIncomingOffset + kZeroIncomingBytes});
    static_assert(kShareOffset % 16 == 0);
    static constexpr int kPeerLseOffset = kShareOffset + (kLseRows + 3) / 4 * 16;   // [such a row][split]
    static constexpr int kSinkOffset = kPeerLseOffset + kLseRows * kMaxSplits * 4;   // [row], base 2
    static constexpr int kUnitPlacesOffset = (kSinkOffset + 4 * kMaxRows + 7) / 8 * 8;                // [unit], of the own partial result
    static constexpr int kDataEnd = kUnitPlacesOffset + 8 * kUnits, kSharedBytes = kHasZeroColumn ? kMaxSharedBytes : kDataEnd;
    static_assert(!kHasZeroColumn || kDataEnd <= kBarriersOffset);
    static constexpr int kZeroRowOffset = kRingOffset;   // [own unit][dim] fp32: the ring is free by then

    static_assert(kUnits == 32 && kTiles == kScoreWarps);   // a score warp converts a tile of Q
    static_assert(kSharedBytes <= kMaxSharedBytes && 2 * (kSharedBytes + 1024) > 228 * 1024);   // one CTA an SM
};

// Whether a part's last tile is RoPE (bf16, scale 1).
template <class C>
__device__ __forceinline__ bool last_tile_is_rope(int part) {
    return C::Record::kRopeInV && part == C::kDimParts - 1;
}

// Keys of an octet change places on their way into matrix products: column c of a product is row (c / 2) + 4 (c % 2).
// The 16-byte loads of lanes (c, t) and (c + 1, t) then meet rows 4 apart, whose chunks t lie in different banks.
__device__ __forceinline__ uint32_t row_of_column(uint32_t column) { return (column & ~7) | (column & 7) >> 1 | (column & 1) << 2; }
__device__ __forceinline__ uint32_t column_of_row(uint32_t row) { return (row & ~7) | (row & 3) << 1 | (row >> 2 & 1); }

}  // namespace flash_mla::sm90::head16
