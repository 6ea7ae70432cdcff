// What the host hands to every sparse decode kernel. Strides are in elements unless the name says otherwise.
#pragma once
#include <cstdint>

#include "plan.h"

namespace flash_mla {

// Keys are handled in groups of 16, the K of mma.m16n8k16. A group never spans two caches.
inline constexpr int kKeysPerGroup = 16;

inline constexpr int kMaxSharedBytes = 227 * 1024;   // of a CTA of SM90

inline constexpr int kMaxHeads = 128;   // h_q
inline constexpr int kLargeTile = 64;   // rows of the largest head tile

// Dims of a tile: 128 bytes of bf16, the width of a swizzle; of e4m3, what a lane quad covers with a 16-byte load per lane.
inline constexpr int kTileDims = 64;
inline constexpr int kUnitDims = 16;    // M of the values' matrix product: the grain in which splits share the merge

// The most that a CTA has of its units, from its peers and its own, over all numbers of splits. A unit of fp32 has `unit_bytes`, one of
// bf16, which peers may send, half of that.
constexpr int incoming_bytes(int unit_bytes, bool sends_bf16) {
    constexpr int kUnits = 32;
    int most = 0;
    for (int splits = 1; splits <= kMaxSplits; ++splits) {
        const int units = (kUnits + splits - 1) / splits, bytes = units * (unit_bytes + (splits - 1) * unit_bytes / (sends_bf16 ? 2 : 1));
        most = bytes > most ? bytes : most;
    }
    return most;
}
static_assert(incoming_bytes(2, false) == 45 * 2 && incoming_bytes(2, true) == 32 * 2);

// Exact n / d for 0 <= n < 2^31 as one multiplication and two shifts (Granlund and Montgomery's method, with
// 2n in place of n so that d = 1 needs no special case).
struct FastDivisor {
    uint32_t divisor = 1, magic = 0x80000000u, shift = 0;
#ifdef __CUDACC__
    __device__ __forceinline__ uint32_t divide(uint32_t n) const { return __umulhi(n << 1, magic) >> shift; }
#endif
};

inline FastDivisor make_fast_divisor(uint32_t d) {
    uint32_t shift = 0;
    while ((uint64_t{1} << shift) < d) ++shift;
    const uint64_t magic = ((uint64_t{1} << (31 + shift)) + d - 1) / d;
    return {d, static_cast<uint32_t>(magic), shift};
}

// One paged cache and, per token of q, the slots to attend to. A source without slots or indices is empty: width,
// groups and num_slots are 0, but `blocks` still points at a readable record if the other source is not empty too.
struct KeySource {
    const int32_t* indices = nullptr;      // [b, s_q, width]
    const int32_t* lengths = nullptr;      // [b], or null: every index counts
    const uint8_t* blocks = nullptr;
    uint32_t indices_stride_b = 0, indices_stride_s = 0;
    int32_t width = 0;                     // top-k
    int32_t groups = 0;                    // ceil(width / kKeysPerGroup)
    uint32_t block_stride16 = 0;           // in units of 16 bytes
    uint32_t num_slots = 0;                // a slot at or past this, or negative, is no key
    FastDivisor page;                      // page_block_size
};

// Strides are 32 bits wide: the product with an index is one instruction, and a larger stride is refused.
struct SparseDecodeParams {
    KeySource source[2];          // main, extra
    int32_t h_q = 0;
    int32_t splits = 1;
    uint32_t splits_magic = 0;    // floor(2^16 / splits) + 1: n / splits == n * magic >> 16 for n < 2^8
    int32_t groups_per_split = 0;
    FastDivisor s_q;
    float scale_log2 = 0;         // softmax scale * log2(e): scores are kept in powers of two
    const uint16_t* q = nullptr;  // [b, s_q, h_q, d_qk] bf16
    uint32_t q_stride_b = 0, q_stride_s = 0, q_stride_h = 0;
    bool q_aligned16 = false;     // every row of q starts at a multiple of 16 bytes
    bool out_aligned4 = false, out_aligned16 = false;   // every row of out starts at a multiple of so many bytes
    uint16_t* out = nullptr;      // [b, s_q, h_q, d_v] bf16
    uint32_t out_stride_b = 0, out_stride_s = 0, out_stride_h = 0;
    float* lse = nullptr;         // [b, h_q, s_q] contiguous
    const float* attn_sink = nullptr;  // [h_q], or null
};

}  // namespace flash_mla
