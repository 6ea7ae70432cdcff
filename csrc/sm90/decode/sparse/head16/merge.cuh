// The splits of one head tile become one result: a reduce-scatter through distributed shared memory.
//
// First the score warps of the splits tell each other their log-sum-exps, while the value warps still multiply their last block. So
// each knows what its partial result counts, and sends it weighted: every CTA of the cluster owns some units (16 dims of all
// heads), unit u belongs to rank u % splits, and a CTA stores each unit where its owner will look for it. The stores count
// towards a barrier of the owner, which then adds up what it got and writes it out. With one split all units are the CTA's own.
#pragma once
#include <cfloat>
#include <cmath>

#include "sm90/decode/sparse/cluster_merge.cuh"
#include "sm90/decode/sparse/head16/softmax.cuh"
#include "sm90/decode/sparse/head16/zero_rows.cuh"

namespace flash_mla::sm90::head16 {

// Where a CTA's results go.
struct OutputTile {
    uint16_t* out;          // of the tile's first head
    float* lse;
    int heads;              // rows of the tile that exist; none in the cluster of the zero row
    uint32_t zero_tiles;    // bit i: tile i of the token gets the zero row's result

    template <class C>
    __device__ __forceinline__ static OutputTile make(const SparseDecodeParams& p, uint32_t shared, int lane) {
        // Anew, from shared memory: it costs less than registers in the loop.
        const ClusterWork<C> work(p, ptx::ld_shared_u32(shared + C::kTokenOffset));
        return {p.out + static_cast<uint64_t>(work.batch) * p.out_stride_b + static_cast<uint64_t>(work.row) * p.out_stride_s +
                    static_cast<uint64_t>(work.first_head) * p.out_stride_h,
                p.lse + (static_cast<uint64_t>(work.batch) * p.h_q + work.first_head) * p.s_q.divisor + work.row,
                work.is_zero_row ? 0 : work.heads, work.is_zero_row ? zero_tiles_of_token<C>(p, shared, lane) : 0};
    }
};

// By the score warps, when all log-sum-exps are there: what a value warp needs to know of the splits, what the sinks leave of the
// heads, in place of the sinks, both seen behind the next barrier; and, by the first split, the result's log-sum-exps.
template <class C>
__device__ __forceinline__ void merge_sums(const SparseDecodeParams& p, const Softmax<C>& softmax, uint32_t shared, SplitsOfTile splits,
                                           int warp, int lane) {
    const auto merged = softmax.merge(shared, splits, warp, lane);
    if (lane % kMaxSplits == 0) ptx::st_shared_f32(shared + C::kShareOffset + 4 * merged.head, merged.share);
    const OutputTile tile = OutputTile::make<C>(p, shared, lane);
    const bool is_zero_row = C::kSkipsZeros && tile.heads == 0;   // then all rows of the tile are, and there are all heads' sinks
    const int head = is_zero_row ? threadIdx.x : merged.head;
    const bool has_head = is_zero_row ? head < p.h_q : lane % kMaxSplits == 0;
    const uint32_t sink_at = shared + C::kSinkOffset + 4 * head;
    if (has_head) ptx::st_shared_f32(sink_at, sink_factor(ptx::ld_shared_f32(sink_at), merged.lse));
    tell_value_warps<C>();
    const bool writes_lse = is_zero_row ? tile.zero_tiles >> head / C::kHeads & 1 : head < tile.heads;
    if (splits.rank == 0 && has_head && writes_lse) tile.lse[head * static_cast<uint64_t>(p.s_q.divisor)] = merged.lse * 0.69314718f;
}

// What a lane's accumulators count, of heads 2t and 2t + 1. Two factors, as their product alone may leave fp32's range: what the
// split counts, and the exponent of the scales.
template <class C>
struct PartialWeight {
    float share[C::kHeadGroups][2], power;

    __device__ __forceinline__ PartialWeight(const WarpRole<C>& role, uint32_t shared, int lane) {
        const float unbias = role.value_is_rope ? power_of_two(-kRopeBias) : power_of_two(-kBias);
        power = role.value_is_rope ? 1.f : ptx::ex2(ptx::ld_shared_f32(shared + C::kRowExponentOffset + 4 * role.value_scale_row));
#pragma unroll
        for (int n = 0; n < C::kHeadGroups; ++n) {
            const float2 v = ptx::ld_shared_f32x2(shared + C::kShareOffset + 32 * n + 8 * (lane % 4));
            share[n][0] = v.x * unbias, share[n][1] = v.y * unbias;
        }
    }
    // Element i of a unit's accumulator for group n.
    __device__ __forceinline__ float apply(const float (&unit)[C::kHeadGroups][4], int n, int i) const { return unit[n][i] * share[n][i % 2] * power; }
};

// Within a unit, pairs of dims by heads, as lanes hold them: a lane sends 16 bytes a unit, two dims of its heads. Of 8 heads in
// fp32; of 16 rounded to bf16, which adds about what the rounding of the result costs: the SMs send each other 16 bytes a cycle.
template <class C>
__device__ __forceinline__ void send_partial(const Accumulator<C>& acc, const WarpRole<C>& role, uint32_t shared, SplitsOfTile splits, int lane) {
    const PartialWeight<C> weight(role, shared, lane);
#pragma unroll
    for (int u = 0; u < C::kValueUnits; ++u) {
        const int unit = role.value_warp * C::kValueUnits + u, owner = splits.owner(unit);
        const uint32_t at = shared + C::kIncomingOffset + splits.incoming_offset<C>(splits.rank, splits.local(unit)) + 16 * lane;
        auto v = [&](int n, int i) { return weight.apply(acc.out[u], n, i); };
        float4 bytes;
        if constexpr (C::kHeadGroups == 1) {
            bytes = {v(0, 0), v(0, 1), v(0, 2), v(0, 3)};
        } else {
            auto pair = [&](int n, int i) { return __uint_as_float(ptx::cvt_bf16x2_f32(v(n, i), v(n, i + 1))); };
            bytes = {pair(0, 0), pair(0, 2), pair(1, 0), pair(1, 2)};
        }
        send<C>(bytes, at, owner, shared, splits);
    }
}

// Two dims of a head: `first` and the next one, or in a RoPE unit the 8th from there.
__device__ __forceinline__ void write_two_dims(const SparseDecodeParams& p, const OutputTile& tile, int head, int first, bool is_rope, float a, float b) {
    const uint32_t pair = ptx::cvt_bf16x2_f32(a, b);
    uint16_t* to = tile.out + static_cast<uint64_t>(head) * p.out_stride_h + first;
    if (p.out_aligned4 && !is_rope) *reinterpret_cast<uint32_t*>(to) = pair;
    else to[0] = static_cast<uint16_t>(pair), to[is_rope ? 8 : 1] = static_cast<uint16_t>(pair >> 16);
}

// One split: nothing to add up.
template <class C>
__device__ __forceinline__ void write_alone(const SparseDecodeParams& p, const Accumulator<C>& acc, const WarpRole<C>& role, uint32_t shared, int lane) {
    const PartialWeight<C> weight(role, shared, lane);
    const OutputTile tile = OutputTile::make<C>(p, shared, lane);
    const int g = lane / 4, t = lane % 4;
#pragma unroll
    for (int n = 0; n < C::kHeadGroups; ++n) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int head = 8 * n + 2 * t + i;
            if (head >= tile.heads) continue;
            const float factor = ptx::ld_shared_f32(shared + C::kSinkOffset + 4 * head);
#pragma unroll
            for (int u = 0; u < C::kValueUnits; ++u) {
                const int first = (role.value_warp * C::kValueUnits + u) * kUnitDims + (role.value_is_rope ? g : 2 * g);
                write_two_dims(p, tile, head, first, role.value_is_rope, weight.apply(acc.out[u], n, i) * factor, weight.apply(acc.out[u], n, 2 + i) * factor);
            }
        }
    }
}

// Adds up what the splits have sent of some words of the CTA's own units: `at`, those of the first split.
template <class C, int kWords>
__device__ __forceinline__ void add_splits(float (&sum)[C::kHeadGroups * kWords], uint32_t at, SplitsOfTile splits) {
    const uint32_t stride = splits.incoming_offset<C>(1, 0);
#pragma unroll 4
    for (int s = 0; s < splits.count; ++s) {
        uint32_t words[4];
        if constexpr (kWords == 1) {
            words[0] = ptx::ld_shared_u32(at + s * stride);
        } else {
            const uint4 v = ptx::ld_shared_v4(at + s * stride);
            words[0] = v.x, words[1] = v.y, words[2] = v.z, words[3] = v.w;
        }
#pragma unroll
        for (int i = 0; i < kWords; ++i) {
            if constexpr (C::kHeadGroups == 1) sum[i] += __uint_as_float(words[i]);
            else sum[2 * i] += ptx::f32_of_bf16_lo(words[i]), sum[2 * i + 1] += ptx::f32_of_bf16_hi(words[i]);
        }
    }
}

// Adds up the CTA's own units and writes them: dims 2g and 2g + 1 in an e4m3 unit, g and g + 8 in a RoPE unit. Of few units, a
// thread takes a word of what lanes have sent, so that many work on it; else a thread takes all that a lane has sent.
template <class C>
__device__ __forceinline__ void write_units(const SparseDecodeParams& p, const OutputTile& tile, uint32_t shared, SplitsOfTile splits) {
    const int units = splits.own_units<C>();
    auto write = [&](int local, int lane, int head, float a, float b) {
        const int unit = splits.own_unit(local);
        const bool is_rope = C::Record::kRopeInV && unit * kUnitDims >= C::Record::kNopeDims;
        const int dim = is_rope ? lane / 4 : lane / 4 * 2;
        if (head < tile.heads) {
            const float factor = ptx::ld_shared_f32(shared + C::kSinkOffset + 4 * head);
            write_two_dims(p, tile, head, unit * kUnitDims + dim, is_rope, a * factor, b * factor);
        }
        if (C::kSkipsZeros && tile.zero_tiles != 0 && head == 0) {   // all rows are the zero row
            const uint32_t to = shared + C::kZeroRowOffset + 4 * (local * kUnitDims + dim);
            ptx::st_shared_f32(to, a);
            ptx::st_shared_f32(to + (is_rope ? 32 : 4), b);
        }
    };
    auto incoming = [&](int local) { return shared + C::kIncomingOffset + splits.incoming_offset<C>(0, local); };
    if (units <= C::kThreads / 128) {
        const int local = threadIdx.x / 128, word = threadIdx.x % 128, lane = word / 4, i = word % 4, t = lane % 4;
        if (local >= units) return;
        float sum[C::kHeadGroups] = {};
        add_splits<C, 1>(sum, incoming(local) + 4 * word, splits);
        if constexpr (C::kHeadGroups == 1) {   // a word: dim i / 2 of head 2t + i % 2
            const float second = __shfl_xor_sync(0xffffffffu, sum[0], 2);
            if (i < 2) write(local, lane, 2 * t + i, sum[0], second);
        } else {                               // dim i % 2 of heads 2t and 2t + 1 of group i / 2: one thread writes the one, one the other
            const bool is_second = i % 2 != 0;
            const float given = __shfl_xor_sync(0xffffffffu, is_second ? sum[0] : sum[1], 1);
            write(local, lane, 8 * (i / 2) + 2 * t + i % 2, is_second ? given : sum[0], is_second ? sum[1] : given);
        }
        return;
    }
    for (int i = threadIdx.x; i < units * 32; i += C::kThreads) {
        const int local = i / 32, lane = i % 32, t = lane % 4;
        float sum[C::kHeadGroups * 4] = {};   // [group][dim][head]
        add_splits<C, 4>(sum, incoming(local) + 16 * lane, splits);
#pragma unroll
        for (int n = 0; n < C::kHeadGroups; ++n) {
#pragma unroll
            for (int j = 0; j < 2; ++j) write(local, lane, 8 * n + 2 * t + j, sum[4 * n + j], sum[4 * n + 2 + j]);
        }
    }
}

// After write_units and a barrier of the CTA: the zero row's result for the skipped tiles. A thread takes 8 dims of some heads.
template <class C>
__device__ __forceinline__ void write_zero_tiles(const SparseDecodeParams& p, const OutputTile& tile, uint32_t shared, SplitsOfTile splits) {
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

}  // namespace flash_mla::sm90::head16
