// Keys: from global memory to registers, and from there both into the scores and into shared memory as V.
#pragma once
#include <cmath>

#include "ptx/convert.cuh"
#include "ptx/memory.cuh"
#include "ptx/mma.cuh"
#include "sm90/decode/sparse/head16/query.cuh"
#include "sm90/decode/sparse/keys.cuh"

namespace flash_mla::sm90::head16 {

// What one lane holds of two keys (rows g and g + 8 of a group): its part's two tiles as raw bytes, and scales.
template <class C>
struct KeySlice {
    using Record = typename C::Record;
    static constexpr int kTileRegs = Record::kRopeInV ? 8 : 4;   // a RoPE tile is bf16, twice the bytes

    uint32_t first[2][4];           // 16 e4m3
    uint32_t second[2][kTileRegs];  // 16 e4m3 or 16 bf16
    uint32_t rope[2][2];            // V3.2: 4 bf16
    uint32_t scales[2];             // V4: two ue8m0 bytes.  V3.2: one fp32
    bool valid[2];
};

__device__ __forceinline__ void copy_regs(uint32_t* r, uint4 v) { r[0] = v.x, r[1] = v.y, r[2] = v.z, r[3] = v.w; }

// Keys that do not count are all zeros, so that whatever lies in their slots (NaN bytes too) has no effect.
template <class C>
__device__ __forceinline__ void load_keys(KeySlice<C>& k, const SparseDecodeParams& p, const IndexLists& lists,
                                          const Slots& slots, int group, int part, int lane) {
    using Record = typename C::Record;
    const int g = lane / 4, t = lane % 4;
    const bool extra = group >= p.source[0].groups;
    const int position = (extra ? group - p.source[0].groups : group) * kKeysPerGroup + g;
    const bool rope_tile = second_tile_is_rope<Record>(part);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const KeyAddress a =
            locate<Record>(p.source[extra], slots.slot[i], position + 8 * i < (extra ? lists.extra_length : lists.main_length));
        k.valid[i] = a.valid;
#pragma unroll
        for (int j = 0; j < 4; ++j) k.first[i][j] = 0;
#pragma unroll
        for (int j = 0; j < KeySlice<C>::kTileRegs; ++j) k.second[i][j] = 0;
        k.rope[i][0] = k.rope[i][1] = 0;
        k.scales[i] = 0;
        if (!a.valid) continue;
        const uint8_t* tiles = a.row + 2 * part * kTileDims + 16 * t;
        copy_regs(k.first[i], ptx::ld_global_stream_v4(tiles));
        if constexpr (Record::kRopeInV) {
            if (rope_tile) {
                const uint8_t* rope = a.row + Record::kRopeOffset + 32 * t;
                copy_regs(k.second[i], ptx::ld_global_stream_v4(rope));
                copy_regs(k.second[i] + 4, ptx::ld_global_stream_v4(rope + 16));
            } else {
                copy_regs(k.second[i], ptx::ld_global_stream_v4(tiles + kTileDims));
            }
            k.scales[i] = __ldg(reinterpret_cast<const uint16_t*>(a.scales) + part);
        } else {
            copy_regs(k.second[i], ptx::ld_global_stream_v4(tiles + kTileDims));
            const uint2 rope = ptx::ld_global_stream_v2(a.row + Record::kRopeOffset + 32 * part + 8 * t);
            k.rope[i][0] = rope.x, k.rope[i][1] = rope.y;
            k.scales[i] = __ldg(reinterpret_cast<const uint32_t*>(a.scales) + part);
        }
    }
}

// 16 bytes holding dims [8 * chunk, 8 * chunk + 8) of V of one key. Chunks are xor-swizzled by key, so that the
// 8 rows of a matrix that ldmatrix fetches lie in different banks, and so do the chunks stored together here.
template <class C>
__device__ __forceinline__ uint32_t value_address(uint32_t value_buffer, int key, int chunk) {
    return value_buffer + key * C::kValueRowBytes + ((chunk ^ (key & 7)) << 4);
}

// One tile of both keys, as 16-bit pairs: multiplied with Q into `d` and stored as V.
template <class C, bool kIsBf16>
__device__ __forceinline__ void multiply_and_store_tile(float (&d)[C::kHeadGroups][4], const uint32_t (&k)[2][8],
                                                        Query<C> q, int which, uint32_t value_buffer, int key,
                                                        int tile, int t) {
#pragma unroll
    for (int n = 0; n < C::kHeadGroups; ++n) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const uint4 b4 = q.tile(which, n, half);
            const uint32_t b[2][2] = {{b4.x, b4.y}, {b4.z, b4.w}};
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const int pair = 4 * half + 2 * i;
                const uint32_t a[4] = {k[0][pair], k[1][pair], k[0][pair + 1], k[1][pair + 1]};
                if constexpr (kIsBf16) ptx::mma_m16n8k16_bf16(d[n], a, b[i]);
                else ptx::mma_m16n8k16_f16(d[n], a, b[i]);
            }
        }
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const int chunk = tile * (kTileDims / 8) + 2 * t;
        ptx::st_shared_v4(value_address<C>(value_buffer, key + 8 * i, chunk), k[i][0], k[i][1], k[i][2], k[i][3]);
        ptx::st_shared_v4(value_address<C>(value_buffer, key + 8 * i, chunk + 1), k[i][4], k[i][5], k[i][6], k[i][7]);
    }
}

__device__ __forceinline__ void dequantize(uint32_t (&pairs)[2][8], const uint32_t* k0, const uint32_t* k1) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        ptx::cvt_f16x4_e4m3x4(pairs[0][2 * j], pairs[0][2 * j + 1], k0[j]);
        ptx::cvt_f16x4_e4m3x4(pairs[1][2 * j], pairs[1][2 * j + 1], k1[j]);
    }
}

// A ue8m0 byte is a biased exponent and nothing else: 2^(e - 127).
__device__ __forceinline__ float exponent_of_ue8m0(uint32_t e) { return static_cast<float>(static_cast<int>(e) - 127); }
__device__ __forceinline__ float f32_of_ue8m0(uint32_t e) { return __uint_as_float(e == 0 ? 0x00400000u : e << 23); }

// An fp32 scale as 2^exponent * mantissa, |mantissa| < 2, exactly.
struct SplitScale {
    float exponent, mantissa;
};
__device__ __forceinline__ SplitScale split_f32(uint32_t bits) {
    const int biased = (bits >> 23) & 0xff;
    if (biased == 0) return {-127.f, __uint_as_float(bits) * 0x1p127f};   // a subnormal (or zero), brought up
    if (biased == 255) return {0.f, __uint_as_float(bits)};               // an infinity or NaN goes on as it is
    return {static_cast<float>(biased - 127), __uint_as_float((bits & 0x807fffffu) | 0x3f800000u)};
}

// Shared memory of one block of keys.
struct BlockBuffers {
    uint32_t value;     // [key][dim] f16/bf16, swizzled
    float* score;       // [part][head][key]
    float* exponent;    // [scale][key]; V3.2: followed by the mantissas, likewise
};

template <class C>
__device__ __forceinline__ void compute_scores(const KeySlice<C>& k, Query<C> q, float scale_log2, BlockBuffers buffers,
                                               int key_group, int part, int lane) {
    using Record = typename C::Record;
    const int g = lane / 4, t = lane % 4;
    const int key = key_group * kKeysPerGroup + g;
    const bool rope_tile = second_tile_is_rope<Record>(part);
    float s[C::kHeadGroups][4];
    float2 unscale[C::kHeadGroups];   // of heads 2t, 2t + 1
#pragma unroll
    for (int n = 0; n < C::kHeadGroups; ++n) unscale[n] = *reinterpret_cast<const float2*>(q.unscale + 8 * n + 2 * t);
    // Adds d, scaled by the scale of its keys (rows g: d[0], d[1]; g + 8: d[2], d[3]) and freed of Q's power of
    // two. In this order, since d * scale alone may leave fp32's range.
    auto add_scaled = [&](const float(&d)[C::kHeadGroups][4], float scale0, float scale1, bool first) {
#pragma unroll
        for (int n = 0; n < C::kHeadGroups; ++n) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float x = d[n][i] * (i % 2 ? unscale[n].y : unscale[n].x), scale = i < 2 ? scale0 : scale1;
                s[n][i] = first ? x * scale : fmaf(x, scale, s[n][i]);
            }
        }
    };

    float scale[2][2];  // [tile][key]
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        if constexpr (Record::kRopeInV) {
            scale[0][i] = f32_of_ue8m0(k.scales[i] & 0xff);
            scale[1][i] = f32_of_ue8m0(k.scales[i] >> 8);
        } else {
            scale[0][i] = scale[1][i] = __uint_as_float(k.scales[i]);
        }
    }

    uint32_t pairs[2][8];
    float d[C::kHeadGroups][4] = {};
    dequantize(pairs, k.first[0], k.first[1]);
    multiply_and_store_tile<C, false>(d, pairs, q, 0, buffers.value, key, 2 * part, t);
    if constexpr (Record::kScaleGroup == kTileDims) {
        add_scaled(d, scale[0][0], scale[0][1], true);
#pragma unroll
        for (int n = 0; n < C::kHeadGroups; ++n) d[n][0] = d[n][1] = d[n][2] = d[n][3] = 0.f;
    }
    if (rope_tile) {
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            pairs[0][j] = k.second[0][j % KeySlice<C>::kTileRegs];
            pairs[1][j] = k.second[1][j % KeySlice<C>::kTileRegs];
        }
        multiply_and_store_tile<C, true>(d, pairs, q, 1, buffers.value, key, 2 * part + 1, t);
#pragma unroll
        for (int n = 0; n < C::kHeadGroups; ++n) {
#pragma unroll
            for (int i = 0; i < 4; ++i) s[n][i] = fmaf(d[n][i], scale_log2, s[n][i]);
        }
    } else {
        dequantize(pairs, k.second[0], k.second[1]);
        multiply_and_store_tile<C, false>(d, pairs, q, 1, buffers.value, key, 2 * part + 1, t);
        add_scaled(d, scale[1][0], scale[1][1], Record::kScaleGroup != kTileDims);
    }
    if constexpr (C::kRopeSteps) {
        const uint32_t a[4] = {k.rope[0][0], k.rope[1][0], k.rope[0][1], k.rope[1][1]};
#pragma unroll
        for (int n = 0; n < C::kHeadGroups; ++n) {
            float r[4] = {};
            const uint2 pairs = q.rope[n * 32];
            const uint32_t b[2] = {pairs.x, pairs.y};
            ptx::mma_m16n8k16_bf16(r, a, b);
#pragma unroll
            for (int i = 0; i < 4; ++i) s[n][i] = fmaf(r[i], scale_log2, s[n][i]);
        }
    }

    float* score = buffers.score + part * C::kHeads * C::kScoreStride + key;
#pragma unroll
    for (int n = 0; n < C::kHeadGroups; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            score[(8 * n + 2 * t + i % 2) * C::kScoreStride + 8 * (i / 2)] = k.valid[i / 2] ? s[n][i] : -INFINITY;
        }
    }
    // Lane t writes the scale of tile t / 2 (V3.2: of both tiles at once) for key t % 2.
    const uint32_t scales = t % 2 ? k.scales[1] : k.scales[0];
    const int scale_key = key + 8 * (t % 2);
    if constexpr (Record::kRopeInV) {
        const int index = 2 * part + t / 2;
        if (index < Record::kNumScales) {   // the last byte of a token's scales is padding
            buffers.exponent[index * C::kKeys + scale_key] = exponent_of_ue8m0(t / 2 ? scales >> 8 : scales & 0xff);
        }
    } else if (t < 2) {
        const SplitScale x = split_f32(scales);
        buffers.exponent[part * C::kKeys + scale_key] = x.exponent;
        buffers.exponent[(Record::kNumScales + part) * C::kKeys + scale_key] = x.mantissa;
    }
}

}  // namespace flash_mla::sm90::head16
