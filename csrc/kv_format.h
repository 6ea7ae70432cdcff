// One traits struct per KV cache record: the only place in C++ that knows a byte offset of a record.
//
// Host-only C++ (no CUDA headers): kernels, the argument checks and a test that compares every constant with
// flash_mla/kv_cache.py all include this file. The formats are DeepSeek's, as FlashMLA documents them.
#pragma once

namespace flash_mla {

// DeepSeek V4: 448 e4m3 values, 64 bf16 RoPE values, and one ue8m0 scale byte per 64 e4m3 values.
// A block holds the rows of all its tokens first, then the scales of all its tokens, so a token's scales lie at
// page_block_size * kRowBytes + offset * kScaleBytes. The RoPE part belongs to V.
struct V4Record {
    static constexpr int kDimQK = 512;
    static constexpr int kDimV = 512;
    static constexpr int kBytesPerToken = 584;
    static constexpr int kNopeDims = 448;
    static constexpr int kRopeDims = 64;
    static constexpr int kRopeOffset = 448;   // bytes from the start of the row
    static constexpr int kRowBytes = 576;     // bytes from one row of a block to the next
    static constexpr int kScaleGroup = 64;    // dims that share a scale
    static constexpr int kNumScales = 7;
    static constexpr int kScaleBytes = 8;     // 7 ue8m0 bytes and one of padding
    static constexpr int kScaleOffset = 0;    // within the scales of a token, which follow the rows
    static constexpr bool kScalesAfterRows = true;
    static constexpr bool kRopeInV = true;
    static constexpr int kBlockAlign = 576;   // callers round the block stride up to a multiple of this
};

// DeepSeek V3.2: 512 e4m3 values, 4 fp32 scales (one per 128 values), 64 bf16 RoPE values, token by token.
// V is the 512 quantized dims; the RoPE part only takes part in the scores.
struct V32Record {
    static constexpr int kDimQK = 576;
    static constexpr int kDimV = 512;
    static constexpr int kBytesPerToken = 656;
    static constexpr int kNopeDims = 512;
    static constexpr int kRopeDims = 64;
    static constexpr int kRopeOffset = 528;
    static constexpr int kRowBytes = 656;
    static constexpr int kScaleGroup = 128;
    static constexpr int kNumScales = 4;
    static constexpr int kScaleBytes = 16;
    static constexpr int kScaleOffset = 512;
    static constexpr bool kScalesAfterRows = false;
    static constexpr bool kRopeInV = false;
    static constexpr int kBlockAlign = 1;
};

// Rows are read 16 bytes at a time, so every row of every block starts at a multiple of this.
inline constexpr int kRowAlign = 16;

// Bytes that a block of `page_block_size` tokens occupies (the block stride may be larger).
template <class Record>
constexpr long long block_bytes(long long page_block_size) {
    return page_block_size * Record::kBytesPerToken;
}

static_assert(V4Record::kRowBytes + V4Record::kScaleBytes == V4Record::kBytesPerToken);
static_assert(V32Record::kRopeOffset + 2 * V32Record::kRopeDims == V32Record::kBytesPerToken);
static_assert(V4Record::kRowBytes % kRowAlign == 0 && V32Record::kRowBytes % kRowAlign == 0);

}  // namespace flash_mla
