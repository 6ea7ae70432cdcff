// The splits of one head tile become one result: a reduce-scatter through distributed shared memory.
//
// Every CTA of the cluster owns some units (16 dims of all heads): unit u belongs to rank u % splits. A CTA sends
// each unit of its partial result, normalized by its own softmax sum, to the owner's shared memory, together with
// its log-sum-exp. The stores count towards a barrier of the owner, which then adds up what it got and writes it
// out. With one split the CTA is its own only peer.
#pragma once
#include "ptx/cluster.cuh"
#include "ptx/mbarrier.cuh"
#include "sm90/decode/sparse/head16/values.cuh"

namespace flash_mla::sm90::head16 {

struct SplitsOfTile {
    int rank, count;
    uint32_t magic;   // of SparseDecodeParams::splits_magic
    __device__ __forceinline__ int local(int unit) const { return static_cast<int>(unit * magic >> 16); }
    __device__ __forceinline__ int owner(int unit) const { return unit - local(unit) * count; }
    template <class C> __device__ __forceinline__ int units_per_owner() const { return local(C::kUnits + count - 1); }
    template <class C> __device__ __forceinline__ int own_units() const { return local(C::kUnits - 1 - rank + count); }
    // Where unit number `local` of an owner lies when it comes from split `from`, in bytes of kIncomingOffset.
    template <class C> __device__ __forceinline__ int incoming_offset(int from, int local) const {
        return (from * units_per_owner<C>() + local) * C::kUnitBytes;
    }
};

// By one thread, before the CTA first arrives at the barrier of the cluster.
template <class C>
__device__ __forceinline__ void expect_partials(char* shared, SplitsOfTile splits) {
    const uint32_t barrier = ptx::shared_address(shared + C::kMergeBarrierOffset);
    ptx::mbarrier_init(barrier, 1);
    ptx::fence_mbarrier_init();
    ptx::mbarrier_arrive_expect_tx(barrier, splits.count * (splits.own_units<C>() * C::kUnitBytes + C::kHeads * 4));
}

// By the warp that keeps the sum: {reference, sum} of every head, for sum * 2^reference.
template <class C>
__device__ __forceinline__ void publish_sum(RowSum<C> (&row_sum)[C::kHeadGroups], char* shared, int lane) {
    float2* own_stats = reinterpret_cast<float2*>(shared + C::kOwnStatsOffset);
#pragma unroll
    for (int n = 0; n < C::kHeadGroups; ++n) {
        row_sum[n].finish();
        if (lane % 4 == 0) own_stats[8 * n + lane / 4] = {row_sum[n].reference, row_sum[n].sum};
    }
}


__device__ __forceinline__ float lse_log2(float2 stats) {
    return stats.y == 0.f ? -INFINITY : stats.x + ptx::lg2(stats.y);
}

// What turns an accumulator into a partial result that is normalized by its split's own sum, for heads 2t and 2t + 1.
// Two factors, as their product alone may leave fp32's range.
template <class C>
struct Normalization {
    float inverse_sum[C::kHeadGroups][2];   // times 2^-kWeightBias
    float power[C::kHeadGroups][2];         // 2^(the accumulator's reference - the sum's)

    __device__ __forceinline__ void load(const Accumulator<C>& acc, const char* shared, int lane) {
        const float2* own_stats = reinterpret_cast<const float2*>(shared + C::kOwnStatsOffset);
        const int t = lane % 4;
#pragma unroll
        for (int n = 0; n < C::kHeadGroups; ++n) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const float2 stats = own_stats[8 * n + 2 * t + i];
                const float reference = __shfl_sync(0xffffffffu, acc.reference[n], 8 * t + 4 * i);
                static_assert(kWeightBias == 6.f);
                inverse_sum[n][i] = stats.y == 0.f ? 0.f : __fdividef(0x1p-6f, stats.y);
                power[n][i] = stats.y == 0.f ? 0.f : ptx::ex2(reference - stats.x);
            }
        }
    }
};

// Within a unit, dims by heads, heads in the order in which lanes hold them: 2t, 2t+1 (, 2t+8, 2t+9). A lane stores
// all heads of a dim at once, a warp 8 dims.
template <class C>
__device__ __forceinline__ void send_partial(const Accumulator<C>& acc, const Normalization<C>& norm, char* shared,
                                             SplitsOfTile splits, bool is_rope, int warp, int lane) {
    const int g = lane / 4, t = lane % 4;
    const uint32_t incoming = ptx::shared_address(shared + C::kIncomingOffset);
    const uint32_t barrier = ptx::shared_address(shared + C::kMergeBarrierOffset);
#pragma unroll
    for (int u = 0; u < C::kValueUnits; ++u) {
        const int unit = warp * C::kValueUnits + u, owner = splits.owner(unit);
        const uint32_t remote = ptx::mapa(incoming + splits.incoming_offset<C>(splits.rank, splits.local(unit)), owner);
        const uint32_t remote_barrier = ptx::mapa(barrier, owner);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float v[C::kHeadGroups][2];
#pragma unroll
            for (int n = 0; n < C::kHeadGroups; ++n) {
#pragma unroll
                for (int i = 0; i < 2; ++i) v[n][i] = acc.out[u][n][2 * half + i] * norm.inverse_sum[n][i] * norm.power[n][i];
            }
            const int dim = is_rope ? g + 8 * half : 2 * g + half;   // of accumulator row g + 8 half: see values.cuh
            const uint32_t at = remote + (dim * 4 + t) * (8 * C::kHeadGroups);
            if constexpr (C::kHeadGroups == 2) ptx::st_async(at, make_float4(v[0][0], v[0][1], v[1][0], v[1][1]), remote_barrier);
            else ptx::st_async(at, make_float2(v[0][0], v[0][1]), remote_barrier);
        }
    }
    // One thread per (peer, head) sends this split's log-sum-exp.
    const int thread = 32 * warp + lane;
    if (thread < splits.count * C::kHeads) {
        const int peer = thread / C::kHeads, head = thread % C::kHeads;
        const float2* own_stats = reinterpret_cast<const float2*>(shared + C::kOwnStatsOffset);
        const uint32_t at = ptx::shared_address(shared + C::kPeerLseOffset) + 4 * (splits.rank * C::kHeads + head);
        ptx::st_async(ptx::mapa(at, peer), lse_log2(own_stats[head]), ptx::mapa(barrier, peer));
    }
}

// Where a CTA's results go: the first row of its head tile.
struct OutputTile {
    uint16_t* out;
    uint32_t out_stride_h;
    bool out_aligned4;
    float* lse;
    uint32_t lse_stride_h;
    const float* attn_sink;   // of the tile's first head, or null
    int heads;                // rows of the tile that exist
};

// What each split's partial result counts, the sink included: [split][head]. Writes lse.
template <class C>
__device__ __forceinline__ void weigh_splits(const OutputTile& tile, char* shared, SplitsOfTile splits, int thread) {
    static_assert(kMaxSplits * C::kHeads <= C::kThreads);
    if (thread >= splits.count * C::kHeads) return;
    const int split = thread / C::kHeads, head = thread % C::kHeads;
    const float* lse_of_split = reinterpret_cast<const float*>(shared + C::kPeerLseOffset) + head;
    float largest = -FLT_MAX, sum = 0.f;   // finite also where no split has a valid key
    for (int s = 0; s < splits.count; ++s) largest = fmaxf(largest, lse_of_split[s * C::kHeads]);
    for (int s = 0; s < splits.count; ++s) sum += ptx::ex2_ftz(lse_of_split[s * C::kHeads] - largest);
    const float lse = largest + ptx::lg2(sum);
    float weight = 0.f;
    if (sum != 0.f && head < tile.heads) {
        weight = __fdividef(ptx::ex2_ftz(lse_of_split[split * C::kHeads] - largest), sum);
        if (tile.attn_sink) weight *= __fdividef(1.f, 1.f + ptx::ex2_ftz(__ldg(tile.attn_sink + head) * 1.44269504f - lse));
    }
    reinterpret_cast<float*>(shared + C::kWeightOffset)[thread] = weight;
    if (splits.rank == 0 && split == 0 && head < tile.heads) {
        tile.lse[static_cast<uint64_t>(head) * tile.lse_stride_h] = sum == 0.f ? INFINITY : lse * 0.69314718f;
    }
}

// Adds up the CTA's own units and writes them: a warp takes a unit at a time, a lane two dims of its heads.
template <class C>
__device__ __forceinline__ void write_units(const OutputTile& tile, const char* shared, SplitsOfTile splits, int warp, int lane) {
    const int dim = 2 * (lane / 4), t = lane % 4;
    const float* weights = reinterpret_cast<const float*>(shared + C::kWeightOffset) + 2 * t;
    for (int local = warp; local < splits.own_units<C>(); local += C::kWarps) {
        const char* incoming = shared + C::kIncomingOffset + splits.incoming_offset<C>(0, local) + (dim * 4 + t) * (8 * C::kHeadGroups);
        float2 x[C::kHeadGroups][2] = {};   // [head group][dim], heads 2t and 2t + 1
        const int stride = splits.incoming_offset<C>(1, 0);
#pragma unroll 4
        for (int s = 0; s < splits.count; ++s) {
#pragma unroll
            for (int n = 0; n < C::kHeadGroups; ++n) {
                const float2 weight = *reinterpret_cast<const float2*>(weights + s * C::kHeads + 8 * n);
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    const float2 part = *reinterpret_cast<const float2*>(incoming + s * stride + (4 * i * C::kHeadGroups + n) * 8);
                    x[n][i].x = fmaf(weight.x, part.x, x[n][i].x), x[n][i].y = fmaf(weight.y, part.y, x[n][i].y);
                }
            }
        }
        const int first_dim = (local * splits.count + splits.rank) * kUnitDims + dim;
#pragma unroll
        for (int n = 0; n < C::kHeadGroups; ++n) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const int head = 8 * n + 2 * t + i;
                if (head >= tile.heads) continue;
                const uint32_t pair = i == 0 ? ptx::cvt_bf16x2_f32(x[n][0].x, x[n][1].x) : ptx::cvt_bf16x2_f32(x[n][0].y, x[n][1].y);
                uint16_t* at = tile.out + static_cast<uint64_t>(head) * tile.out_stride_h + first_dim;
                if (tile.out_aligned4) *reinterpret_cast<uint32_t*>(at) = pair;
                else at[0] = static_cast<uint16_t>(pair), at[1] = static_cast<uint16_t>(pair >> 16);
            }
        }
    }
}

template <class C>
__device__ __forceinline__ void receive_and_write(const OutputTile& tile, char* shared, SplitsOfTile splits, int warp, int lane) {
    ptx::mbarrier_wait(ptx::shared_address(shared + C::kMergeBarrierOffset), 0);
    weigh_splits<C>(tile, shared, splits, 32 * warp + lane);
    __syncthreads();
    write_units<C>(tile, shared, splits, warp, lane);
}

}  // namespace flash_mla::sm90::head16
