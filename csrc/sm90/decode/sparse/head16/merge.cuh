// The splits of one head tile become one result: a reduce-scatter through distributed shared memory.
//
// First the score warps of the splits tell each other their log-sum-exps, while the value warps still multiply their last block. So
// each knows what its partial result counts, and sends it weighted: every CTA of the cluster owns some units (16 dims of all
// heads), unit u belongs to rank u % splits, and a CTA stores each unit where its owner will look for it. The stores count
// towards a barrier of the owner, which then adds up what it got and writes it out. With one split, and no zero column, value warps write at once.
#pragma once
#include "sm90/decode/sparse/cluster_merge.cuh"
#include "sm90/decode/sparse/head16/softmax.cuh"

namespace flash_mla::sm90::head16 {

// Where a CTA's results go.
struct OutputTile {
    uint16_t* out;          // of the tile's first head
    float* lse;
    int heads;              // rows of the tile that exist
    int rows;               // the same, and those that get the zero row's result

    template <class C>
    __device__ __forceinline__ static OutputTile make(const SparseDecodeParams& p, uint32_t shared) {
        // Anew, from shared memory: it costs less than registers in the loop.
        const ClusterWork<C> work(p, ptx::ld_shared_u32(shared + C::kClusterOffset));
        return {work.out(p), work.lse(p), work.heads, work.rows};
    }
};

// By the score warps, when all log-sum-exps are there: what the value warps wait for, that is what the split counts, and in place of
// the sinks what these leave of the heads; and, by the first split, the result's log-sum-exps.
template <class C>
__device__ __forceinline__ void merge_sums(const SparseDecodeParams& p, const Softmax<C>& softmax, uint32_t shared, SplitsOfTile splits,
                                           int warp, int lane) {
    const float lse = softmax.merge(shared, splits, warp, lane);
    const int head = softmax.head_of_lane(warp, lane);
    const bool has_head = softmax.is_first_of_head(lane);
    const auto replace_sink = [&](int row, float lse_of_row) {
        const uint32_t at = shared + C::kSinkOffset + 4 * row;
        ptx::st_shared_f32(at, sink_factor(ptx::ld_shared_f32(at), lse_of_row));
    };
    if (has_head) replace_sink(head, lse);
    ptx::mbarrier_arrive(shared + C::kShareBarrierOffset);   // the value warps wait for that
    if (splits.rank != 0 && !(C::kHasZeroColumn && warp == 0)) return;
    const OutputTile tile = OutputTile::make<C>(p, shared);
    const auto write_lse = [&](int row, float lse_of_row) { tile.lse[row * static_cast<uint64_t>(p.s_q.divisor)] = lse_of_row * 0.69314718f; };
    if (splits.rank == 0 && has_head && head < tile.heads) write_lse(head, lse);
    if (C::kHasZeroColumn && warp == 0) {
        const float zero_lse = __shfl_sync(0xffffffffu, lse, softmax.kZeroLane);
        // (Opaque: or ptxas keeps the sum from the beginning, where the sample of head64/padding.cuh has the same, and spills.)
        for (int row = C::kHeads + ptx::opaque(lane); row < tile.rows; row += 32) {
            replace_sink(row, zero_lse);
            if (splits.rank == 0) write_lse(row, zero_lse);
        }
        ptx::mbarrier_arrive(shared + C::kZeroRowBarrierOffset);   // who writes the rows waits for that
    }
}

// What a lane's accumulators count, of heads 2t and 2t + 1. Two factors, as their product alone may leave fp32's range: what the
// split counts, and the accumulators' units (see weights.cuh).
template <class C>
struct PartialWeight {
    float share[C::kColumnGroups][2], power;

    __device__ __forceinline__ PartialWeight(int exponent, const WarpRole<C>& role, uint32_t shared, int lane) {
        const float unbias = role.value_is_rope ? power_of_two(-kBf16Bias) : power_of_two(-kBias);
        power = role.value_is_rope ? 1.f : ptx::ex2(static_cast<float>(exponent));
#pragma unroll
        for (int n = 0; n < C::kHeadGroups; ++n) {
            const float2 v = ptx::ld_shared_f32x2(shared + C::kShareOffset + 32 * n + 8 * (lane % 4));
            share[n][0] = v.x * unbias, share[n][1] = v.y * unbias;
        }
        if constexpr (C::kHasZeroColumn) share[C::kHeadGroups][0] = share[C::kHeadGroups][1] = ptx::ld_shared_f32(shared + C::kShareOffset + 4 * C::kHeads) * unbias;
    }
    // Element i of a unit's accumulator for group n.
    __device__ __forceinline__ float apply(const float (&unit)[C::kColumnGroups][4], int n, int i) const { return apply(unit[n][i], n, i); }
    __device__ __forceinline__ float apply(float element, int n, int i) const { return element * share[n][i % 2] * power; }
};

// Where the zero row's partial result of a unit lies, dim by dim in fp32.
template <class C>
__device__ __forceinline__ uint32_t incoming_zero_unit(uint32_t shared, SplitsOfTile splits, int from, int local) {
    return shared + C::kZeroIncomingOffset + (from * splits.units_per_owner<C>() + local) * C::kZeroUnitBytes;
}

// All lanes of a quad hold the same two dims of all the warp's units: each sends those of one. Rounded if the heads' are.
template <class C>
__device__ __forceinline__ void send_partial_zero_row(const Accumulator<C>& acc, const PartialWeight<C>& weight, const WarpRole<C>& role,
                                                      uint32_t shared, SplitsOfTile splits, int lane) {
    static_assert(C::kValueUnits == 4);
    const int u = lane % 4, unit = role.value_warp * C::kValueUnits + u;
    const UnitPlace place = unit_place<C>(shared, unit);
    float x[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const auto of_unit = [&](int n) { return acc.out[n][C::kColumnGroups - 1][2 * i]; };
        x[i] = weight.apply(u < 2 ? (u == 0 ? of_unit(0) : of_unit(1)) : (u == 2 ? of_unit(2) : of_unit(3)), C::kColumnGroups - 1, 2 * i);
        if (!place.is_own()) x[i] = ptx::f32_of_bf16_lo(ptx::cvt_bf16x2_f32(x[i], 0.f));
    }
    // Dims 2g and 2g + 1, of RoPE g and g + 8.
    const uint32_t at = incoming_zero_unit<C>(shared, splits, splits.rank, splits.local(unit)) + lane / 4 * (role.value_is_rope ? 4 : 8);
    const uint32_t in_owner = place.in_owner<C>(at - shared), barrier = place.in_owner<C>(C::kZeroRowBarrierOffset);
    if (role.value_is_rope) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            if (place.is_own()) ptx::st_shared_f32(at + 32 * i, x[i]);
            else ptx::st_async(in_owner + 32 * i, x[i], barrier);
        }
    } else if (place.is_own()) {
        ptx::st_shared_f32x2(at, {x[0], x[1]});
    } else {
        ptx::st_async(in_owner, float2{x[0], x[1]}, barrier);
    }
    ptx::mbarrier_arrive(shared + C::kZeroRowBarrierOffset);
}

// Within a unit, pairs of dims by heads, as lanes hold them: a lane stores 16 bytes a unit and head group, two dims of its heads, or, to
// peers as bf16, 16 bytes of both groups.
template <class C>
__device__ __forceinline__ void send_partial(const Accumulator<C>& acc, int exponent, const WarpRole<C>& role, uint32_t shared, SplitsOfTile splits, int lane) {
    const PartialWeight<C> weight(exponent, role, shared, lane);
    if constexpr (C::kHasZeroColumn) send_partial_zero_row<C>(acc, weight, role, shared, splits, lane);   // first: its rows are many
#pragma unroll
    for (int u = 0; u < C::kValueUnits; ++u) {
        const UnitPlace place = unit_place<C>(shared, role.value_warp * C::kValueUnits + u);
        const uint32_t at = place.address + 16 * lane;
        float4 v[C::kHeadGroups];
#pragma unroll
        for (int n = 0; n < C::kHeadGroups; ++n) {
            const auto of = [&](int i) { return weight.apply(acc.out[u], n, i); };
            v[n] = make_float4(of(0), of(1), of(2), of(3));
        }
        if (place.is_own()) {
#pragma unroll
            for (int n = 0; n < C::kHeadGroups; ++n) ptx::st_shared_v4(at + 512 * n, v[n]);
        } else if constexpr (C::kSendsBf16) {
            const auto pair = [](float a, float b) { return __uint_as_float(ptx::cvt_bf16x2_f32(a, b)); };
            ptx::st_async(at, make_float4(pair(v[0].x, v[0].y), pair(v[0].z, v[0].w), pair(v[1].x, v[1].y), pair(v[1].z, v[1].w)), place.barrier);
        } else {
            ptx::st_async(at, v[0], place.barrier);
        }
    }
    ptx::mbarrier_arrive(shared + C::kPartialBarrierOffset);
}

template <class C>
__device__ __forceinline__ bool is_rope_unit(int unit) { return C::Record::kRopeInV && unit * kUnitDims >= C::Record::kNopeDims; }

// Where two dims of a head go: two neighbours, or in a RoPE unit the one and the 8th from there. Of unit u those of lanes g.
struct TwoDims {
    uint16_t* to;
    bool is_rope;

    template <class C>
    __device__ __forceinline__ static TwoDims make(const SparseDecodeParams& p, const OutputTile& tile, int head, int unit, int g) {
        const bool is_rope = is_rope_unit<C>(unit);
        return {tile.out + static_cast<uint64_t>(head) * p.out_stride_h + unit * kUnitDims + (is_rope ? g : 2 * g), is_rope};
    }
    __device__ __forceinline__ void write(const SparseDecodeParams& p, float a, float b) const {
        const uint32_t pair = ptx::cvt_bf16x2_f32(a, b);
        if (p.out_aligned4 && !is_rope) *reinterpret_cast<uint32_t*>(to) = pair;
        else to[0] = static_cast<uint16_t>(pair), to[is_rope ? 8 : 1] = static_cast<uint16_t>(pair >> 16);
    }
};

// One split: nothing to add up. All units of a warp are RoPE, or none.
template <class C>
__device__ __forceinline__ void write_alone(const SparseDecodeParams& p, const Accumulator<C>& acc, int exponent, const WarpRole<C>& role, uint32_t shared, int lane) {
    const PartialWeight<C> weight(exponent, role, shared, lane);
    const OutputTile tile = OutputTile::make<C>(p, shared);
#pragma unroll
    for (int n = 0; n < C::kHeadGroups; ++n) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int head = 8 * n + 2 * (lane % 4) + i;
            if (head >= tile.heads) continue;
            const float factor = ptx::ld_shared_f32(shared + C::kSinkOffset + 4 * head);
            TwoDims dims = TwoDims::make<C>(p, tile, head, role.value_warp * C::kValueUnits, lane / 4);
#pragma unroll
            for (int u = 0; u < C::kValueUnits; ++u) {
                dims.write(p, weight.apply(acc.out[u], n, i) * factor, weight.apply(acc.out[u], n, 2 + i) * factor);
                dims.to += kUnitDims;
            }
        }
    }
}

// A thread's part in adding up the CTA's own units and writing them: what a lane has sent of a unit, two dims of some heads.
template <class C>
struct UnitPart {
    uint32_t own, incoming;
    TwoDims dims[C::kHeadGroups][2];   // of heads 8 n + 2t and + 2t + 1
    float factor[C::kHeadGroups][2];
    bool exists[C::kHeadGroups][2];

    // Part number i, before there is anything to add up.
    __device__ __forceinline__ UnitPart(const SparseDecodeParams& p, const OutputTile& tile, uint32_t shared, SplitsOfTile splits, int i) {
        const int lane = i % 32, local = i / 32, first_head = 2 * (lane % 4);
        const uint32_t of_lane = shared + C::kIncomingOffset + 16 * lane;
        own = of_lane + splits.own_offset<C>(local), incoming = of_lane + splits.incoming_offset<C>(0, local);
#pragma unroll
        for (int n = 0; n < C::kHeadGroups; ++n) {
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                const int head = 8 * n + first_head + j;
                exists[n][j] = head < tile.heads;
                dims[n][j] = TwoDims::make<C>(p, tile, head, splits.own_unit(local), lane / 4);
                factor[n][j] = ptx::ld_shared_f32(shared + C::kSinkOffset + 4 * head);
            }
        }
    }

    __device__ __forceinline__ void add_and_write(const SparseDecodeParams& p, SplitsOfTile splits) const {
        float sum[C::kHeadGroups][2][2];   // [group][dim][head]
        add(sum, splits);
#pragma unroll
        for (int n = 0; n < C::kHeadGroups; ++n) {
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                if (exists[n][j]) dims[n][j].write(p, sum[n][0][j] * factor[n][j], sum[n][1][j] * factor[n][j]);
            }
        }
    }

   private:
    // First the own, then the peers'.
    __device__ __forceinline__ void add(float (&sum)[C::kHeadGroups][2][2], SplitsOfTile splits) const {
#pragma unroll
        for (int n = 0; n < C::kHeadGroups; ++n) {
            const float4 v = ptx::ld_shared_f32x4(own + 512 * n);
            sum[n][0][0] = v.x, sum[n][0][1] = v.y, sum[n][1][0] = v.z, sum[n][1][1] = v.w;
        }
        const uint32_t stride = splits.incoming_offset<C>(1, 0);
#pragma unroll 4
        for (int i = 0; i < splits.count - 1; ++i) {
            const uint4 v = ptx::ld_shared_v4(incoming + i * stride);
            const uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                if constexpr (C::kSendsBf16) {
                    float (&dim)[2] = sum[k / 2][k % 2];
                    dim[0] += ptx::f32_of_bf16_lo(words[k]), dim[1] += ptx::f32_of_bf16_hi(words[k]);
                } else {
                    sum[0][k / 2][k % 2] += __uint_as_float(words[k]);
                }
            }
        }
    }
};

// Adds up the CTA's own units of the zero row, and writes them to the rows behind the tile, each with its own sink. With units for at most
// three quarters of the warps that is the work of those that have none of the heads', else of all.
template <class C>
__device__ __forceinline__ void write_zero_rows(const SparseDecodeParams& p, const OutputTile& tile, uint32_t shared, SplitsOfTile splits) {
    const int units = splits.own_units<C>(), first = 4 * units <= 3 * C::kWarps ? 32 * units : 0;
    const int thread = threadIdx.x - first, threads = C::kThreads - first;
    if (thread < 0) return;
    ptx::mbarrier_wait(shared + C::kZeroRowBarrierOffset, 0);
    if (thread < units * (kUnitDims / 2)) {   // two dims
        const int local = thread / 8, g = thread % 8;
        const auto of_split = [&](int split) { return ptx::ld_shared_f32x2(incoming_zero_unit<C>(shared, splits, split, local) + 8 * g); };
        float2 sum = of_split(splits.rank);   // and then the peers, as UnitPart does
#pragma unroll 4
        for (int i = 0; i < splits.count - 1; ++i) {
            const float2 v = of_split(i + (i >= splits.rank));
            sum.x += v.x, sum.y += v.y;
        }
        ptx::st_shared_f32x2(shared + C::kZeroRowOffset + 8 * thread, sum);
        ptx::mbarrier_arrive(shared + C::kZeroSumsBarrierOffset);
    }
    ptx::mbarrier_wait(shared + C::kZeroSumsBarrierOffset, 0);
    // 8 dims of some rows a thread. (Rolled: most of it runs once, and waits for its instructions.)
    const int chunks = units * (kUnitDims / 8);   // up to 64
    const int bits = 32 - __clz(chunks - 1);      // 2^bits threads a row
    const int chunk = thread & ((1 << bits) - 1), dim = splits.own_unit(chunk / 2) * kUnitDims + chunk % 2 * 8;
    if (chunk >= chunks) return;
    const float4 a = ptx::ld_shared_f32x4(shared + C::kZeroRowOffset + 32 * chunk), b = ptx::ld_shared_f32x4(shared + C::kZeroRowOffset + 32 * chunk + 16);
#pragma unroll 2
    for (int row = C::kHeads + (thread >> bits); row < tile.rows; row += threads >> bits) {
        const float f = ptx::ld_shared_f32(shared + C::kSinkOffset + 4 * row);
        const uint32_t r[4] = {ptx::cvt_bf16x2_f32(a.x * f, a.y * f), ptx::cvt_bf16x2_f32(a.z * f, a.w * f),
                               ptx::cvt_bf16x2_f32(b.x * f, b.y * f), ptx::cvt_bf16x2_f32(b.z * f, b.w * f)};
        write_dims(tile.out + static_cast<uint64_t>(row) * p.out_stride_h + dim, r, p.out_aligned16, p.out_aligned4);
    }
}

}  // namespace flash_mla::sm90::head16
