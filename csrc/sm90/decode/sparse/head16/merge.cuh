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
    const OutputTile tile = OutputTile::make<C>(p, shared, lane);
    const uint64_t stride = p.s_q.divisor;
    const float lse = merged.lse * 0.69314718f;
    if (C::kSkipsZeros && tile.heads == 0) {   // all heads of the token; all rows of this tile are the zero row
        const uint32_t at = shared + C::kSinkOffset + 4 * threadIdx.x;
        if (static_cast<int>(threadIdx.x) < p.h_q) {
            ptx::st_shared_f32(at, sink_factor(ptx::ld_shared_f32(at), merged.lse));
            if (splits.rank == 0 && (tile.zero_tiles >> threadIdx.x / C::kHeads & 1)) tile.lse[threadIdx.x * stride] = lse;
        }
        if (lane == 0) ptx::st_shared_f32(shared + C::kShareOffset + 4 * merged.head, merged.share);
    } else if (lane % kMaxSplits == 0) {
        const uint32_t at = shared + C::kSinkOffset + 4 * merged.head;
        ptx::st_shared_f32(shared + C::kShareOffset + 4 * merged.head, merged.share);
        ptx::st_shared_f32(at, sink_factor(ptx::ld_shared_f32(at), merged.lse));
        if (splits.rank == 0 && merged.head < tile.heads) tile.lse[merged.head * stride] = lse;
    }
}

// Within a unit, pairs of dims by heads, as lanes hold them: a lane sends 16 bytes a unit, two dims of its heads. Of 8 heads in
// fp32; of 16 rounded to bf16, which adds about what the rounding of the result costs: the SMs send each other 16 bytes a cycle.
template <class C>
__device__ __forceinline__ void send_partial(const Accumulator<C>& acc, const WarpRole<C>& role, uint32_t shared, SplitsOfTile splits, int lane) {
    // Two factors, as their product alone may leave fp32's range: what the split counts, and the exponent of the scales.
    const float unbias = role.value_is_rope ? power_of_two(-kRopeBias) : power_of_two(-kBias);
    const float power = role.value_is_rope ? 1.f : ptx::ex2(ptx::ld_shared_f32(shared + C::kRowExponentOffset + 4 * role.value_scale_row));
    float share[C::kHeadGroups][2];
#pragma unroll
    for (int n = 0; n < C::kHeadGroups; ++n) {
        const float2 v = ptx::ld_shared_f32x2(shared + C::kShareOffset + 32 * n + 8 * (lane % 4));
        share[n][0] = v.x * unbias, share[n][1] = v.y * unbias;
    }
#pragma unroll
    for (int u = 0; u < C::kValueUnits; ++u) {
        const int unit = role.value_warp * C::kValueUnits + u, owner = splits.owner(unit);
        const uint32_t at = shared + C::kIncomingOffset + splits.incoming_offset<C>(splits.rank, splits.local(unit)) + 16 * lane;
        float v[C::kHeadGroups][4];   // rows g and g + 8 of the accumulator, heads 2t and 2t + 1
#pragma unroll
        for (int n = 0; n < C::kHeadGroups; ++n) {
#pragma unroll
            for (int i = 0; i < 4; ++i) v[n][i] = acc.out[u][n][i] * share[n][i % 2] * power;
        }
        float4 bytes = {v[0][0], v[0][1], v[0][2], v[0][3]};
        if constexpr (C::kHeadGroups == 2) {
            bytes = {__uint_as_float(ptx::cvt_bf16x2_f32(v[0][0], v[0][1])), __uint_as_float(ptx::cvt_bf16x2_f32(v[0][2], v[0][3])),
                     __uint_as_float(ptx::cvt_bf16x2_f32(v[1][0], v[1][1])), __uint_as_float(ptx::cvt_bf16x2_f32(v[1][2], v[1][3]))};
        }
        send<C>(bytes, at, owner, shared, splits);
    }
}

// Adds up the CTA's own units and writes them: a thread takes one word at a time of what lanes have sent, and two threads share
// two dims of one or two heads: dims 2g and 2g + 1 in an e4m3 unit, g and g + 8 in a RoPE unit.
template <class C>
__device__ __forceinline__ void write_units(const SparseDecodeParams& p, const OutputTile& tile, uint32_t shared, SplitsOfTile splits) {
    constexpr int kWords = C::kUnitBytes / 4;
    const uint32_t stride = splits.incoming_offset<C>(1, 0);
    for (int i = threadIdx.x; i < splits.own_units<C>() * kWords; i += C::kThreads) {
        const int local = i / kWords, lane = i % kWords / 4, word = i % 4, g = lane / 4, t = lane % 4;
        const uint32_t incoming = shared + C::kIncomingOffset + splits.incoming_offset<C>(0, local) + 4 * (i % kWords);
        float first = 0.f, second = 0.f;   // of two dims of a head
        int head;
        bool writes = true;
        if constexpr (C::kHeadGroups == 1) {   // a word: dim word / 2 of head 2t + word % 2
#pragma unroll 4
            for (int s = 0; s < splits.count; ++s) first += ptx::ld_shared_f32(incoming + s * stride);
            second = __shfl_xor_sync(0xffffffffu, first, 2);
            head = 2 * t + word % 2, writes = word < 2;
        } else {                               // dim word % 2 of heads 2t and 2t + 1 of group word / 2
            float other = 0.f;
#pragma unroll 4
            for (int s = 0; s < splits.count; ++s) {
                const uint32_t pair = ptx::ld_shared_u32(incoming + s * stride);
                first += ptx::f32_of_bf16_lo(pair), other += ptx::f32_of_bf16_hi(pair);
            }
            const bool is_second = word % 2 != 0;   // it takes the second head, and gives the first one's dim away
            const float given = __shfl_xor_sync(0xffffffffu, is_second ? first : other, 1);
            second = is_second ? other : given, first = is_second ? given : first;
            head = 8 * (word / 2) + 2 * t + word % 2;
        }
        const int unit = splits.own_unit(local);
        const bool is_rope = C::Record::kRopeInV && unit * kUnitDims >= C::Record::kNopeDims;
        const int dim = is_rope ? g : 2 * g, next = is_rope ? 8 : 1;
        if (writes && head < tile.heads) {
            const float factor = ptx::ld_shared_f32(shared + C::kSinkOffset + 4 * head);
            const uint32_t pair = ptx::cvt_bf16x2_f32(first * factor, second * factor);
            uint16_t* to = tile.out + static_cast<uint64_t>(head) * p.out_stride_h + unit * kUnitDims + dim;
            if (p.out_aligned4 && !is_rope) *reinterpret_cast<uint32_t*>(to) = pair;
            else to[0] = static_cast<uint16_t>(pair), to[next] = static_cast<uint16_t>(pair >> 16);
        }
        if (C::kSkipsZeros && tile.zero_tiles != 0 && head == 0 && writes) {   // all rows are the zero row
            const uint32_t to = shared + C::kZeroRowOffset + 4 * (local * kUnitDims + dim);
            ptx::st_shared_f32(to, first);
            ptx::st_shared_f32(to + 4 * next, second);
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
