// What the host hands to every sparse decode kernel. Strides are in elements unless the name says bytes.
#pragma once
#include <cstdint>

namespace flash_mla {

// Keys are handled in groups of 16, the M of mma.m16n8k16. A group never spans two caches.
inline constexpr int kKeysPerGroup = 16;

// Exact n / d for 0 <= n < 2^31 as one multiplication and two shifts (Granlund and Montgomery's method, with
// 2n in place of n so that d = 1 needs no special case).
struct FastDivisor {
    uint32_t divisor, magic, shift;
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

// One paged cache and, per token of q, the slots to attend to.
struct KeySource {
    const uint8_t* blocks = nullptr;
    int64_t block_stride_bytes = 0;
    FastDivisor page{1, 0x80000000u, 0};   // page_block_size
    uint32_t num_slots = 0;                // a slot at or past this, or negative, is no key
    const int32_t* indices = nullptr;      // [b, s_q, width]
    int64_t indices_stride_b = 0, indices_stride_s = 0;
    const int32_t* lengths = nullptr;      // [b], or null: every index counts
    int32_t width = 0;                     // top-k
    int32_t groups = 0;                    // ceil(width / kKeysPerGroup)
};

struct SparseDecodeParams {
    const uint16_t* q = nullptr;  // [b, s_q, h_q, d_qk] bf16
    int64_t q_stride_b = 0, q_stride_s = 0, q_stride_h = 0;
    uint16_t* out = nullptr;      // [b, s_q, h_q, d_v] bf16
    int64_t out_stride_b = 0, out_stride_s = 0, out_stride_h = 0;
    float* lse = nullptr;         // [b, h_q, s_q] contiguous
    const float* attn_sink = nullptr;  // [h_q], or null
    KeySource source[2];          // main, extra
    FastDivisor s_q{1, 0x80000000u, 0};
    int32_t h_q = 0;
    int32_t splits = 1;
    uint32_t splits_magic = 0;    // floor(2^16 / splits) + 1: n / splits == n * magic >> 16 for n < 2^8
    int32_t groups_per_split = 0;
    float scale_log2 = 0;         // softmax scale * log2(e): scores are kept in powers of two
    bool q_aligned16 = false;     // every row of q starts at a multiple of 16 bytes
    bool out_aligned4 = false;    // every row of out starts at a multiple of 4 bytes
};

}  // namespace flash_mla
