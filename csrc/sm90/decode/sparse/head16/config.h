// The 16-row head tile: compile-time shape of a CTA and its shared memory. See docs/sparse_decode.md.
#pragma once
#include "kv_format.h"
#include "sm90/decode/sparse/params.h"

namespace flash_mla::sm90::head16 {

inline constexpr int kMaxSplits = 16;  // CTAs of a cluster (more than 8 is non-portable, and available on SM90)
inline constexpr int kDimParts = 4;    // the scores of 16 keys are computed by 4 warps, 128 dims each
inline constexpr int kTileDims = 64;   // dims that a lane quad covers with one 16-byte load of e4m3 per lane
inline constexpr int kUnitDims = 16;   // dims of one M tile of P V: the grain in which splits share the merge

// kHeadGroups: 8 heads each (N of the matrix products).  kKeyGroups: 16 keys each, held by the CTA at a time.
template <class Record_, int kHeadGroups_, int kKeyGroups_>
struct Config {
    using Record = Record_;
    static constexpr int kHeadGroups = kHeadGroups_;
    static constexpr int kKeyGroups = kKeyGroups_;
    static constexpr int kHeads = 8 * kHeadGroups;
    static constexpr int kKeys = kKeysPerGroup * kKeyGroups;
    static constexpr int kWarps = kDimParts * kKeyGroups;
    static constexpr int kThreads = 32 * kWarps;
    static constexpr int kCtasPerSm = 512 / kThreads;
    static constexpr int kValueDims = Record::kDimV / kWarps;   // dims of V that a warp accumulates
    static constexpr int kValueUnits = kValueDims / kUnitDims;
    static constexpr int kUnits = Record::kDimV / kUnitDims;

    // Shared memory, in bytes from its start. V is kept as f16 (RoPE as bf16), keys by dims, in two buffers;
    // the scores as one fp32 partial sum per dim part. After the last block of keys the second V buffer and
    // what lies behind it, up to Q, is free and receives the partial results of the peers.
    static constexpr int kValueRowBytes = Record::kDimV * 2;
    static constexpr int kValueBytes = kKeys * kValueRowBytes;
    static constexpr int kScoreStride = kKeys + 8;   // floats; 8 mod 32, so that reading pairs of keys is conflict-free
    static constexpr int kScoreBytes = kDimParts * kHeads * kScoreStride * 4;
    static constexpr bool kHasMantissa = !Record::kScalesAfterRows;   // V3.2: fp32 scales; ue8m0 are bare exponents
    static constexpr int kScaleBytes = Record::kNumScales * kKeys * (kHasMantissa ? 8 : 4);
    static constexpr bool kRopeSteps = !Record::kRopeInV;   // RoPE dims that are no part of V: 16 to each dim part
    static constexpr int kQueryBytes = kDimParts * kHeadGroups * 2 * 2 * 32 * 16;            // see query.cuh
    static constexpr int kQueryRopeBytes = kRopeSteps ? kDimParts * kHeadGroups * 32 * 8 : 0;
    static constexpr int kUnscaleBytes = kDimParts * kHeads * 4;
    static constexpr int kValueOffset = 0;
    static constexpr int kScoreOffset = 2 * kValueBytes;
    static constexpr int kScaleOffset = kScoreOffset + 2 * kScoreBytes;
    static constexpr int kQueryOffset = kScaleOffset + 2 * kScaleBytes;
    static constexpr int kQueryRopeOffset = kQueryOffset + kQueryBytes;
    static constexpr int kUnscaleOffset = kQueryRopeOffset + kQueryRopeBytes;
    static constexpr int kOwnStatsOffset = kUnscaleOffset + kUnscaleBytes;        // {reference, sum} per head
    static constexpr int kPeerLseOffset = kOwnStatsOffset + kHeads * 8;           // [split][head]
    static constexpr int kSharedBytes = kPeerLseOffset + kMaxSplits * kHeads * 4;
    static constexpr int kIncomingOffset = kValueBytes;                           // [split][unit][head][dim] fp32

    // Bytes of one unit (16 dims of every head) of a partial result, and of the most that a CTA can receive:
    // max over splits of splits * ceil(kUnits / splits) units, which is 45 (15 splits).
    static constexpr int kUnitBytes = kHeads * kUnitDims * 4;
    static_assert(kUnits == 32);
    static_assert(kIncomingOffset + 45 * kUnitBytes <= kQueryOffset);
    static_assert(kCtasPerSm * (kSharedBytes + 1024) <= 228 * 1024);
};

}  // namespace flash_mla::sm90::head16
