// The splits of one head tile become one result: a reduce-scatter through distributed shared memory.
//
// Every CTA of the cluster owns some units (16 dims of all heads): unit u belongs to rank u % splits. A CTA sends
// each unit of its partial result, normalized by its own softmax sum, to the owner's shared memory, together with
// its log-sum-exp; after one cluster barrier each owner adds up what it got and writes it out. With one split the
// CTA is its own only peer.
#pragma once
#include "ptx/cluster.cuh"
#include "sm90/decode/sparse/head16/values.cuh"

namespace flash_mla::sm90::head16 {

// Softmax sum of a head in a split, as {reference, sum}: sum * 2^reference.
__device__ __forceinline__ float lse_log2(float2 stats) {
    return stats.y == 0.f ? -INFINITY : stats.x + ptx::lg2(stats.y);
}

// Within a unit, [head][dim] with heads and dims permuted so that the 4 x 8 values that a warp stores at once, dims
// g of heads 2t (or 2t + 1), lie in 32 banks.
__device__ __forceinline__ int unit_row_of_head(int head) { return (head & ~7) | ((head & 1) << 2) | ((head & 7) >> 1); }
__device__ __forceinline__ int head_of_unit_row(int row) { return (row & ~7) | ((row & 3) << 1) | ((row >> 2) & 1); }
__device__ __forceinline__ int unit_swizzle(int head) { return ((head >> 2) & 1) << 3; }   // xor on the dim

struct SplitsOfTile {
    int rank, count;
    uint32_t magic;   // of SparseDecodeParams::splits_magic
    __device__ __forceinline__ int owner(int unit) const { return unit - local(unit) * count; }
    __device__ __forceinline__ int local(int unit) const { return static_cast<int>(unit * magic >> 16); }
    template <class C> __device__ __forceinline__ int units_per_owner() const { return local(C::kUnits + count - 1); }
    // Where unit number `local` of an owner lies when it comes from split `from`, in bytes of kIncomingOffset.
    template <class C> __device__ __forceinline__ int incoming_offset(int from, int local) const {
        return (from * units_per_owner<C>() + local) * C::kUnitBytes;
    }
};

template <class C>
__device__ __forceinline__ void send_partial(const Accumulator<C>& acc, const float2* own_stats, char* shared,
                                             SplitsOfTile splits, int warp, int lane) {
    const int g = lane / 4, t = lane % 4;
    float factor[C::kHeadGroups][2];   // for heads 2t, 2t+1: 2^-bias / sum
    float power[C::kHeadGroups][2];    // 2^(the accumulator's reference - the sum's reference)
#pragma unroll
    for (int n = 0; n < C::kHeadGroups; ++n) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const float2 stats = own_stats[8 * n + 2 * t + i];
            const float reference = __shfl_sync(0xffffffffu, acc.reference[n], 8 * t + 4 * i);
            factor[n][i] = stats.y == 0.f ? 0.f : __fdividef(0.015625f, stats.y);
            power[n][i] = stats.y == 0.f ? 0.f : ptx::ex2(reference - stats.x);
        }
    }
    static_assert(kWeightBias == 6.f);
    const uint32_t incoming = ptx::shared_address(shared + C::kIncomingOffset);
#pragma unroll
    for (int u = 0; u < C::kValueUnits; ++u) {
        const int unit = warp * C::kValueUnits + u;
        const uint32_t remote = ptx::mapa(incoming + splits.incoming_offset<C>(splits.rank, splits.local(unit)),
                                          splits.owner(unit));
#pragma unroll
        for (int n = 0; n < C::kHeadGroups; ++n) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int head = 8 * n + 2 * t + i % 2, dim = g + 8 * (i / 2);
                const float value = acc.out[u][n][i] * factor[n][i % 2] * power[n][i % 2];
                ptx::st_cluster_f32(remote + 4 * (unit_row_of_head(head) * kUnitDims + (dim ^ unit_swizzle(head))), value);
            }
        }
    }
    // One thread per (peer, head) sends this split's log-sum-exp.
    const int thread = 32 * warp + lane;
    if (thread < splits.count * C::kHeads) {
        const int peer = thread / C::kHeads, head = thread % C::kHeads;
        const uint32_t at = ptx::shared_address(shared + C::kPeerLseOffset) + 4 * (splits.rank * C::kHeads + head);
        ptx::st_cluster_f32(ptx::mapa(at, peer), lse_log2(own_stats[head]));
    }
}

// Where a CTA's results go: the first row of its head tile.
struct OutputTile {
    uint16_t* out;
    int64_t out_stride_h;
    bool out_aligned4;
    float* lse;
    int64_t lse_stride_h;
    const float* attn_sink;   // of the tile's first head, or null
    int heads;                // rows of the tile that exist
};

template <class C>
__device__ __forceinline__ void merge_and_write(const OutputTile& tile, const char* shared, SplitsOfTile splits, int thread) {
    constexpr int kPairs = kUnitDims / 2;
    static_assert(C::kThreads % (kPairs * C::kHeads) == 0);
    // A thread keeps its head: rows advance by a multiple of the rows of a unit.
    const int row = thread / kPairs % C::kHeads;
    const int head = head_of_unit_row(row);
    const float* peer_lse = reinterpret_cast<const float*>(shared + C::kPeerLseOffset) + head;
    if (head >= tile.heads) return;

    float largest = -INFINITY, sum = 0.f;
    for (int s = 0; s < splits.count; ++s) largest = fmaxf(largest, peer_lse[s * C::kHeads]);
    const float reference = fmaxf(largest, -FLT_MAX);   // -inf where no split has a valid key
    for (int s = 0; s < splits.count; ++s) sum += ptx::ex2(peer_lse[s * C::kHeads] - reference);
    const float lse = reference + ptx::lg2(sum);
    float factor = sum == 0.f ? 0.f : __fdividef(1.f, sum);
    if (tile.attn_sink) factor *= __fdividef(1.f, 1.f + ptx::ex2(__ldg(tile.attn_sink + head) * 1.44269504f - lse));

    const int units = splits.units_per_owner<C>();
    for (int local = thread / (kPairs * C::kHeads); local < units; local += C::kThreads / (kPairs * C::kHeads)) {
        const int unit = local * splits.count + splits.rank;
        if (unit >= C::kUnits) break;
        const char* incoming = shared + C::kIncomingOffset + 4 * (row * kUnitDims) + 8 * (thread % kPairs);
        float2 x = {0.f, 0.f};
#pragma unroll 4
        for (int s = 0; s < splits.count; ++s) {
            const float weight = ptx::ex2(peer_lse[s * C::kHeads] - reference);
            const float2 part = *reinterpret_cast<const float2*>(incoming + splits.incoming_offset<C>(s, local));
            x.x = fmaf(weight, part.x, x.x), x.y = fmaf(weight, part.y, x.y);
        }
        const uint32_t pair = sum == 0.f ? 0u : ptx::cvt_bf16x2_f32(x.x * factor, x.y * factor);
        const int dim = unit * kUnitDims + ((2 * (thread % kPairs)) ^ unit_swizzle(head));
        uint16_t* at = tile.out + head * tile.out_stride_h + dim;
        if (tile.out_aligned4) {
            *reinterpret_cast<uint32_t*>(at) = pair;
        } else {
            at[0] = static_cast<uint16_t>(pair), at[1] = static_cast<uint16_t>(pair >> 16);
        }
    }
    if (splits.rank == 0 && thread / (kPairs * C::kHeads) == 0 && thread % kPairs == 0) {
        tile.lse[head * tile.lse_stride_h] = sum == 0.f ? INFINITY : lse * 0.69314718f;
    }
}

}  // namespace flash_mla::sm90::head16
