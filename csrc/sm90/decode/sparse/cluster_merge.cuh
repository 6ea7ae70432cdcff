// What the kernels share of the merge: the splits of a head tile, a cluster, become one result by a reduce-scatter through
// distributed shared memory. The result is cut into units of 16 dims, and unit u belongs to rank u % splits.
#pragma once
#include <cfloat>
#include <cmath>

#include "ptx/cluster.cuh"
#include "ptx/convert.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/memory.cuh"
#include "ptx/reduce.cuh"
#include "plan.h"
#include "sm90/decode/sparse/params.h"

namespace flash_mla::sm90 {

struct SplitsOfTile {
    int rank, count;
    uint32_t magic;   // of SparseDecodeParams::splits_magic
    __device__ __forceinline__ explicit SplitsOfTile(const SparseDecodeParams& p)
        : rank(ptx::cluster_ctarank()), count(p.splits), magic(p.splits_magic) {}
    __device__ __forceinline__ int local(int unit) const { return static_cast<int>(unit * magic >> 16); }
    __device__ __forceinline__ int owner(int unit) const { return unit - local(unit) * count; }
    __device__ __forceinline__ int own_unit(int local) const { return local * count + rank; }
    template <class C> __device__ __forceinline__ int units_per_owner() const { return local(C::kUnits + count - 1); }
    template <class C> __device__ __forceinline__ int own_units() const { return local(C::kUnits - 1 - rank + count); }
    // Where an owner has its unit number `local`, in bytes of its incoming area: what comes from each of its peers, which it numbers
    // without itself, and behind that its own, in fp32. The SMs send each other 16 bytes a cycle: tiles of 16 and 64 rows send bf16.
    template <class C> static constexpr int kSentUnitBytes = C::kSendsBf16 ? C::kUnitBytes / 2 : C::kUnitBytes;
    template <class C> __device__ __forceinline__ int incoming_offset(int peer, int local) const {
        return (peer * units_per_owner<C>() + local) * kSentUnitBytes<C>;
    }
    template <class C> __device__ __forceinline__ int sent_offset(int owner, int local) const {
        return incoming_offset<C>(rank - (rank > owner), local);
    }
    template <class C> __device__ __forceinline__ int own_offset(int local) const {
        return incoming_offset<C>(count - 1, 0) + local * C::kUnitBytes;
    }
};

// By one thread, before the CTA first arrives at the barrier of the cluster. From each peer: log-sum-exps of C::kLseRows rows, and units. And
// arrivals of the CTA's own threads, behind ordinary stores of what is its own.
template <class C>
__device__ __forceinline__ void expect_peers(uint32_t shared, SplitsOfTile splits) {
    ptx::mbarrier_init(shared + C::kLseBarrierOffset, 1 + C::kLseArrivals);
    ptx::mbarrier_init(shared + C::kPartialBarrierOffset, 1 + C::kPartialArrivals);
    ptx::fence_mbarrier_init();
    ptx::mbarrier_arrive_expect_tx(shared + C::kLseBarrierOffset, (splits.count - 1) * C::kLseRows * 4);
    ptx::mbarrier_arrive_expect_tx(shared + C::kPartialBarrierOffset, (splits.count - 1) * splits.own_units<C>() * splits.kSentUnitBytes<C>);
}

// A head's log-sum-exp of this split (base 2; -inf without keys) to a CTA of the cluster. To the own one by an ordinary store, behind
// which C::kLseArrivals threads arrive (of tiles of 8 and 16 rows none: only the storing warp reads it): memcheck takes a cluster of one CTA
// for none.
template <class C>
__device__ __forceinline__ void send_lse(float lse, int head, uint32_t shared, SplitsOfTile splits, int peer) {
    const uint32_t at = shared + C::kPeerLseOffset + 4 * (head * kMaxSplits + splits.rank);
    if (peer == splits.rank) ptx::st_shared_f32(at, lse);
    else ptx::st_async(ptx::mapa(at, peer), lse, ptx::mapa(shared + C::kLseBarrierOffset, peer));
}

// 8 dims of a row of out.
__device__ __forceinline__ void write_dims(uint16_t* to, const uint32_t (&pairs)[4], bool aligned16, bool aligned4) {
    if (aligned16) {
        *reinterpret_cast<uint4*>(to) = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
        return;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        if (aligned4) *reinterpret_cast<uint32_t*>(to + 2 * i) = pairs[i];
        else to[2 * i] = static_cast<uint16_t>(pairs[i]), to[2 * i + 1] = static_cast<uint16_t>(pairs[i] >> 16);
    }
}

// Where a unit of the own partial result goes: an address in the owner's shared memory, and the barrier there; 0 if the owner is this CTA.
// A table of all units is made once, by a warp, for whoever comes behind a barrier: it would take much code to work it out at each store.
struct UnitPlace {
    uint32_t address, barrier;
    __device__ __forceinline__ bool is_own() const { return barrier == 0; }
    // What lies so many bytes from the start of a peer's shared memory.
    template <class C> __device__ __forceinline__ uint32_t in_owner(uint32_t offset) const { return barrier - C::kPartialBarrierOffset + offset; }
};
template <class C>
__device__ __forceinline__ uint32_t unit_place_at(uint32_t shared, int unit) { return shared + C::kUnitPlacesOffset + 8 * unit; }
template <class C>
__device__ __forceinline__ void find_unit_places(uint32_t shared, SplitsOfTile splits, int lane) {
    static_assert(C::kUnits == 32);
    const int owner = splits.owner(lane), local = splits.local(lane);
    const bool is_own = owner == splits.rank;
    const uint32_t in_owner = ptx::mapa(shared, owner), offset = is_own ? splits.own_offset<C>(local) : splits.sent_offset<C>(owner, local);
    ptx::st_shared_v2(unit_place_at<C>(shared, lane), {(is_own ? shared : in_owner) + C::kIncomingOffset + offset,
                                                       is_own ? 0 : in_owner + C::kPartialBarrierOffset});
}
template <class C>
__device__ __forceinline__ UnitPlace unit_place(uint32_t shared, int unit) {
    const uint2 v = ptx::ld_shared_v2(unit_place_at<C>(shared, unit));
    return {v.x, v.y};
}

// The log-sum-exp of a head over all splits, base 2, -inf without keys. `of_head`: its first split's in shared memory. By a
// quad, whose lanes (`t`) take every fourth.
__device__ __forceinline__ float lse_of_splits(uint32_t of_head, SplitsOfTile splits, int t) {
    float peer[kMaxSplits / 4], largest = -FLT_MAX, total = 0.f;   // finite also where no split has a key
#pragma unroll
    for (int i = 0; i < kMaxSplits / 4; ++i) {
        peer[i] = t + 4 * i < splits.count ? ptx::ld_shared_f32(of_head + 4 * (t + 4 * i)) : -INFINITY;
        largest = fmaxf(largest, peer[i]);
    }
    largest = ptx::quad_max(largest);
#pragma unroll
    for (int i = 0; i < kMaxSplits / 4; ++i) total += ptx::ex2_ftz(peer[i] - largest);
    total = ptx::quad_sum(total);
    return total == 0.f ? -INFINITY : largest + ptx::lg2(total);
}

__device__ __forceinline__ float load_sink(const SparseDecodeParams& p, int head) {
    return p.attn_sink ? ptx::ld_global_f32(p.attn_sink + head) : -INFINITY;
}
inline constexpr float kLog2E = 1.44269504f;   // sinks join log-sum-exps, which are base 2

// What the sink leaves of a head: 0 for one without keys, whose `lse` is an infinity.
__device__ __forceinline__ float sink_factor(float sink, float lse) {
    return fabsf(lse) == INFINITY ? 0.f : __fdividef(1.f, 1.f + ptx::ex2_ftz(sink - lse));
}

}  // namespace flash_mla::sm90
