// The splits of one head tile become one result: a reduce-scatter through distributed shared memory.
//
// First the splits tell each other their log-sum-exp, while they still multiply their last block. So each knows what its
// partial result counts, and sends it weighted: every CTA of the cluster owns some units (16 dims of all heads), unit u
// belongs to rank u % splits, and a CTA stores each unit where its owner will look for it. The stores count towards a
// barrier of the owner, which then adds up what it got and writes it out. With one split all units are the CTA's own.
#pragma once
#include <cfloat>
#include <cmath>

#include "sm90/decode/sparse/cluster_merge.cuh"
#include "sm90/decode/sparse/head16/softmax.cuh"
#include "sm90/decode/sparse/head16/zero_rows.cuh"

namespace flash_mla::sm90::head16 {

// What turns a lane's accumulators into its share of the result, for heads 2t and 2t + 1. Two factors, as their product
// alone may leave fp32's range.
template <class C>
struct PartialWeight {
    float share[C::kHeadGroups][2];   // of this split in the softmax over all, over this split's sum, times 2^-bias
    float power;                      // 2^(what the accumulators' reference is above the sum's: the exponent of the row's scales)
    float lse[C::kHeadGroups];        // of head g + 8 n over all splits, base 2; +inf without keys

    __device__ __forceinline__ void load(const WarpRole<C>& role, uint32_t shared, SplitsOfTile splits, int lane) {
        const float unbias = role.value_is_rope ? power_of_two(-kRopeBias) : power_of_two(-kBias);
        const int g = lane / 4, t = lane % 4;
        power = role.value_is_rope ? 1.f : ptx::ex2(ptx::ld_shared_f32(shared + C::kRowExponentOffset + 4 * role.value_scale_row));
#pragma unroll
        for (int n = 0; n < C::kHeadGroups; ++n) {
            const float all = lse_of_splits(shared + C::kPeerLseOffset + 4 * kMaxSplits * (8 * n + g), splits, t);
            lse[n] = all == -INFINITY ? INFINITY : all;
            const float2 own = ptx::ld_shared_f32x2(shared + C::kOwnStatsOffset + 8 * (8 * n + g));
            // 2^(own reference - all): the split's own sum cancels.
            const float to_all = own.y == 0.f ? -INFINITY : own.x - all;
#pragma unroll
            for (int i = 0; i < 2; ++i) {   // heads 2t and 2t + 1 are rows 8t and 8t + 4
                const int from = 8 * t + 4 * i;
                share[n][i] = __shfl_sync(0xffffffffu, unbias * ptx::ex2(to_all), from);
            }
        }
    }
};

// Within a unit, pairs of dims by heads, as lanes hold them: a lane sends 16 bytes a unit, two dims of its heads. Of 8 heads in
// fp32; of 16 rounded to bf16, which adds about what the rounding of the result costs: the SMs send each other 16 bytes a cycle.
template <class C>
__device__ __forceinline__ void send_partial(const Accumulator<C>& acc, const PartialWeight<C>& weight, uint32_t shared,
                                             SplitsOfTile splits, int value_warp, int lane) {
#pragma unroll
    for (int u = 0; u < C::kValueUnits; ++u) {
        const int unit = value_warp * C::kValueUnits + u, owner = splits.owner(unit);
        const uint32_t at = shared + C::kIncomingOffset + splits.incoming_offset<C>(splits.rank, splits.local(unit)) + 16 * lane;
        float v[C::kHeadGroups][4];   // rows g and g + 8 of the accumulator, heads 2t and 2t + 1
#pragma unroll
        for (int n = 0; n < C::kHeadGroups; ++n) {
#pragma unroll
            for (int i = 0; i < 4; ++i) v[n][i] = acc.out[u][n][i] * weight.share[n][i % 2] * weight.power;
        }
        float4 bytes = {v[0][0], v[0][1], v[0][2], v[0][3]};
        if constexpr (C::kHeadGroups == 2) {
            bytes = {__uint_as_float(ptx::cvt_bf16x2_f32(v[0][0], v[0][1])), __uint_as_float(ptx::cvt_bf16x2_f32(v[0][2], v[0][3])),
                     __uint_as_float(ptx::cvt_bf16x2_f32(v[1][0], v[1][1])), __uint_as_float(ptx::cvt_bf16x2_f32(v[1][2], v[1][3]))};
        }
        send<C>(bytes, at, owner, shared, splits);
    }
}

// Adds what a lane has sent.
template <class C>
__device__ __forceinline__ void add_partial(float (&sum)[C::kHeadGroups][4], uint4 sent) {
    const uint32_t words[4] = {sent.x, sent.y, sent.z, sent.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        if constexpr (C::kHeadGroups == 2) {
            sum[i / 2][i % 2 * 2] += ptx::f32_of_bf16_lo(words[i]), sum[i / 2][i % 2 * 2 + 1] += ptx::f32_of_bf16_hi(words[i]);
        } else {
            sum[0][i] += __uint_as_float(words[i]);
        }
    }
}

// Where a CTA's results go.
struct OutputTile {
    uint16_t* out;          // of the tile's first head
    float* lse;
    int heads;              // rows of the tile that exist; none in the cluster of the zero row
    uint32_t zero_tiles;    // bit i: tile i of the token gets the zero row's result
};

// By one warp of one CTA of the cluster.
template <class C>
__device__ __forceinline__ void write_lse(const SparseDecodeParams& p, const OutputTile& tile, const PartialWeight<C>& weight, int lane) {
    const uint64_t stride = p.s_q.divisor;
    float zero_row = 0.f;
#pragma unroll
    for (int n = 0; n < C::kHeadGroups; ++n) {
        const int head = 8 * n + lane / 4;
        const float lse = weight.lse[n] * 0.69314718f;
        if (lane % 4 == 0 && head < tile.heads) tile.lse[head * stride] = lse;
        zero_row = __shfl_sync(0xffffffffu, lse, 0);
    }
    if constexpr (C::kSkipsZeros) {
        for (int head = lane; tile.zero_tiles != 0 && head < p.h_q; head += 32) {
            if (tile.zero_tiles >> head / C::kHeads & 1) tile.lse[head * stride] = zero_row;
        }
    }
}

// Adds up the CTA's own units and writes them: a warp takes a unit at a time, a lane what lane `lane` of every split
// stored: dims 2g and 2g + 1 in an e4m3 unit, g and g + 8 in a RoPE unit.
template <class C>
struct UnitWriter {
    float factor[C::kHeadGroups][2];   // the sinks' of heads 2t and 2t + 1

    __device__ __forceinline__ void load_sinks(const SparseDecodeParams& p, const OutputTile& tile, const PartialWeight<C>& weight,
                                               uint32_t shared, int lane) {
        if (C::kSkipsZeros && tile.heads == 0) {   // all heads' sinks become their factors, in place, for write_zero_tiles
            const float lse = __shfl_sync(0xffffffffu, weight.lse[0], 0);
            const uint32_t at = shared + C::kSinkOffset + 4 * threadIdx.x;
            if (static_cast<int>(threadIdx.x) < p.h_q) ptx::st_shared_f32(at, sink_factor(ptx::ld_shared_f32(at), lse));
            return;
        }
        const int t = lane % 4;
#pragma unroll
        for (int n = 0; n < C::kHeadGroups; ++n) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const float lse = __shfl_sync(0xffffffffu, weight.lse[n], 8 * t + 4 * i);
                factor[n][i] = sink_factor(ptx::ld_shared_f32(shared + C::kSinkOffset + 4 * (8 * n + 2 * t + i)), lse);
            }
        }
    }

    __device__ __forceinline__ void write(const SparseDecodeParams& p, const OutputTile& tile, uint32_t shared,
                                          SplitsOfTile splits, int warp, int lane) const {
        const int g = lane / 4, t = lane % 4;
        const uint32_t stride = splits.incoming_offset<C>(1, 0);
        for (int local = warp; local < splits.own_units<C>(); local += C::kWarps) {
            const uint32_t incoming = shared + C::kIncomingOffset + splits.incoming_offset<C>(0, local) + 16 * lane;
            float x[C::kHeadGroups][4] = {};
#pragma unroll 4
            for (int s = 0; s < splits.count; ++s) add_partial<C>(x, ptx::ld_shared_v4(incoming + s * stride));
            const int unit = splits.own_unit(local);
            const bool is_rope = C::Record::kRopeInV && unit * kUnitDims >= C::Record::kNopeDims;
            const int first = unit * kUnitDims + (is_rope ? g : 2 * g), second = first + (is_rope ? 8 : 1);
            auto write_pair = [&](int head, float a, float b, float factor) {
                const uint32_t pair = ptx::cvt_bf16x2_f32(a * factor, b * factor);
                uint16_t* to = tile.out + static_cast<uint64_t>(head) * p.out_stride_h;
                if (p.out_aligned4 && !is_rope) *reinterpret_cast<uint32_t*>(to + first) = pair;
                else to[first] = static_cast<uint16_t>(pair), to[second] = static_cast<uint16_t>(pair >> 16);
            };
#pragma unroll
            for (int n = 0; n < C::kHeadGroups; ++n) {
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    const int head = 8 * n + 2 * t + i;
                    if (head < tile.heads) write_pair(head, x[n][i], x[n][2 + i], factor[n][i]);
                }
            }
            if (C::kSkipsZeros && tile.zero_tiles != 0 && t == 0) {   // all rows are the zero row: head 0 of these lanes
                const uint32_t to = shared + C::kZeroRowOffset + 4 * (local * kUnitDims - unit * kUnitDims);
                ptx::st_shared_f32(to + 4 * first, x[0][0]);
                ptx::st_shared_f32(to + 4 * second, x[0][2]);
            }
        }
    }

    // After `write` and a barrier of the CTA: the zero row's result for the skipped tiles. A thread takes 8 dims of some
    // heads.
    __device__ __forceinline__ void write_zero_tiles(const SparseDecodeParams& p, const OutputTile& tile, uint32_t shared,
                                                     SplitsOfTile splits) const {
        const int chunks = splits.own_units<C>() * (kUnitDims / 8);   // of 8 dims, up to 64
        const int bits = 32 - __clz(chunks - 1);   // 2^bits threads a head
        const int chunk = threadIdx.x & ((1 << bits) - 1);
        if (chunk >= chunks) return;
        const int dim = splits.own_unit(chunk / 2) * kUnitDims + chunk % 2 * 8;
        float x[8];
#pragma unroll
        for (int i = 0; i < 8; i += 4) {
            const uint4 v = ptx::ld_shared_v4(shared + C::kZeroRowOffset + 32 * chunk + 4 * i);
            x[i] = __uint_as_float(v.x), x[i + 1] = __uint_as_float(v.y);
            x[i + 2] = __uint_as_float(v.z), x[i + 3] = __uint_as_float(v.w);
        }
#pragma unroll 4
        for (int head = threadIdx.x >> bits; head < p.h_q; head += C::kThreads >> bits) {
            if (!(tile.zero_tiles >> head / C::kHeads & 1)) continue;
            const float factor = ptx::ld_shared_f32(shared + C::kSinkOffset + 4 * head);
            uint32_t r[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) r[i] = ptx::cvt_bf16x2_f32(x[2 * i] * factor, x[2 * i + 1] * factor);
            uint16_t* to = tile.out + static_cast<uint64_t>(head) * p.out_stride_h + dim;
            if (p.out_aligned16) {
                *reinterpret_cast<uint4*>(to) = make_uint4(r[0], r[1], r[2], r[3]);
            } else {
#pragma unroll
                for (int i = 0; i < 4; ++i) to[2 * i] = static_cast<uint16_t>(r[i]), to[2 * i + 1] = static_cast<uint16_t>(r[i] >> 16);
            }
        }
    }
};

}  // namespace flash_mla::sm90::head16
