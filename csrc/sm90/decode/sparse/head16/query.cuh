// Q as B fragments of the scores' matrix product, in shared memory in the order in which lanes read them.
#pragma once
#include "ptx/convert.cuh"
#include "ptx/memory.cuh"
#include "sm90/decode/sparse/head16/config.h"

namespace flash_mla::sm90::head16 {

// A warp multiplies its 128 dims of Q with keys whose e4m3 values are used as f16, as they stand, so Q is needed
// as f16 too. A power of two per (head, part) takes any magnitude of bf16 into f16's range: the largest element
// of the 128 lands in [2^14, 2^15), and f16's 11 bits hold bf16's 8 down to 2^-31 of it. The power comes off
// again in fp32, together with the softmax scale.
//
// Which dims pair up in the matrix product is free as long as Q and K agree. Lane (g, t) holds the dims
// 64 * tile + 16 t .. + 15 of head g: the same ones that its 16-byte load of a key brings.

// Whether the second of part `part`'s two tiles is RoPE (bf16).
template <class Record>
__device__ __forceinline__ constexpr bool second_tile_is_rope(int part) {
    return Record::kRopeInV && part == kDimParts - 1;
}

// Pointers into shared memory, at this lane's place. A tile of a head group is two uint4 (4 k steps x 2 registers).
template <class C>
struct Query {
    uint4* tiles;        // [tile][head group][2][32 lanes]
    uint2* rope;         // [head group][32 lanes]: V3.2's 16 RoPE dims of this part, bf16
    float* unscale;      // [head]: softmax scale * log2(e) / the power of two

    __device__ __forceinline__ static Query at(char* shared, int part, int lane) {
        return {reinterpret_cast<uint4*>(shared + C::kQueryOffset) + part * (4 * C::kHeadGroups * 32) + lane,
                reinterpret_cast<uint2*>(shared + C::kQueryRopeOffset) + part * (C::kHeadGroups * 32) + lane,
                reinterpret_cast<float*>(shared + C::kUnscaleOffset) + part * C::kHeads};
    }
    __device__ __forceinline__ uint4& tile(int which, int head_group, int half) const {
        return tiles[((which * C::kHeadGroups + head_group) * 2 + half) * 32];
    }
};

// 16 contiguous bf16 as 8 registers. Rows of q that are not 16-byte aligned are read element by element.
__device__ __forceinline__ void load_16_bf16(uint32_t (&r)[8], const uint16_t* p, bool aligned16) {
    if (aligned16) {
        const uint4 a = ptx::ld_global_stream_v4(p), b = ptx::ld_global_stream_v4(p + 8);
        r[0] = a.x, r[1] = a.y, r[2] = a.z, r[3] = a.w, r[4] = b.x, r[5] = b.y, r[6] = b.z, r[7] = b.w;
    } else {
#pragma unroll
        for (int i = 0; i < 8; ++i) r[i] = __ldg(p + 2 * i) | static_cast<uint32_t>(__ldg(p + 2 * i + 1)) << 16;
    }
}

// The dims of one part as they come from memory. Loading is apart from storing, so that the keys' loads can be
// issued in between.
template <class C>
struct RawQuery {
    using Record = typename C::Record;
    uint32_t tile[C::kHeadGroups][2][8];
    uint2 rope[C::kHeadGroups];

    __device__ __forceinline__ void load(const SparseDecodeParams& p, const uint16_t* q_tile, int heads_left, int part,
                                         int lane) {
        const int g = lane / 4, t = lane % 4;
#pragma unroll
        for (int n = 0; n < C::kHeadGroups; ++n) {
#pragma unroll
            for (int i = 0; i < 8; ++i) tile[n][0][i] = tile[n][1][i] = 0;
            rope[n] = {0, 0};
            if (8 * n + g >= heads_left) continue;
            const uint16_t* row = q_tile + (8 * n + g) * p.q_stride_h;
#pragma unroll
            for (int which = 0; which < 2; ++which) {
                load_16_bf16(tile[n][which], row + (2 * part + which) * kTileDims + 16 * t, p.q_aligned16);
            }
            if constexpr (C::kRopeSteps) {
                const uint16_t* r = row + Record::kNopeDims + 16 * part + 4 * t;
                rope[n].x = __ldg(r) | static_cast<uint32_t>(__ldg(r + 1)) << 16;
                rope[n].y = __ldg(r + 2) | static_cast<uint32_t>(__ldg(r + 3)) << 16;
            }
        }
    }

    // Converts, and stores where `q` points.
    __device__ __forceinline__ void store(Query<C> q, float scale_log2, int part, int lane) const {
        const int g = lane / 4, t = lane % 4;
        const bool rope_tile = second_tile_is_rope<Record>(part);
#pragma unroll
        for (int n = 0; n < C::kHeadGroups; ++n) {
            // Positive bf16 order like integers, so the largest magnitude is an integer maximum per 16-bit half.
            uint32_t largest = 0;
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                largest = __vmaxu2(largest, tile[n][0][i] & 0x7fff7fffu);
                if (!rope_tile) largest = __vmaxu2(largest, tile[n][1][i] & 0x7fff7fffu);
            }
            largest = __vmaxu2(largest, __shfl_xor_sync(0xffffffffu, largest, 1));
            largest = __vmaxu2(largest, __shfl_xor_sync(0xffffffffu, largest, 2));
            const int exponent = max(largest & 0xffffu, largest >> 16) >> 7;   // biased by 127
            const int power = min(127 + 14 - exponent, 126);                   // so that 2^-power is no subnormal
            const float scale = __int_as_float((127 + power) << 23);
            if (t == 0) q.unscale[8 * n + g] = scale_log2 * __int_as_float((127 - power) << 23);
#pragma unroll
            for (int which = 0; which < 2; ++which) {
                uint32_t pairs[8];
#pragma unroll
                for (int i = 0; i < 8; ++i) {
                    const uint32_t pair = tile[n][which][i];
                    pairs[i] = which == 1 && rope_tile ? pair
                                                       : ptx::cvt_f16x2_f32(ptx::f32_of_bf16_lo(pair) * scale,
                                                                            ptx::f32_of_bf16_hi(pair) * scale);
                }
                q.tile(which, n, 0) = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
                q.tile(which, n, 1) = make_uint4(pairs[4], pairs[5], pairs[6], pairs[7]);
            }
            if constexpr (C::kRopeSteps) q.rope[n * 32] = rope[n];
        }
    }
};

}  // namespace flash_mla::sm90::head16
