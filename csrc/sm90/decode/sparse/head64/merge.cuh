// From accumulators to results. The splits of a head tile are a cluster and merge by a reduce-scatter through distributed
// shared memory: they tell each other their log-sum-exp, so each knows what its partial result counts, and sends it
// weighted. Every CTA owns some units (16 dims of all heads): unit u belongs to rank u % splits. The owner adds up what it
// got, in a fixed order, and writes it; that is the work of all its warps. One split alone writes from its registers.
//
// Consumers are `thread` 0..127 of warpgroup `half`, which has dims 256 half .. + 255.
#pragma once
#include "ptx/warpgroup.cuh"
#include "sm90/decode/sparse/cluster_merge.cuh"
#include "sm90/decode/sparse/head64/consumer.cuh"

namespace flash_mla::sm90::head64 {

// Where a CTA's results go: of its first head, of which `heads` exist.
struct OutputTile {
    uint16_t* out;
    uint32_t out_stride;
    float* lse;
    uint32_t lse_stride;
    int heads;
    bool aligned16, aligned4;

    __device__ __forceinline__ uint16_t* row(int head) const { return out + static_cast<uint64_t>(head) * out_stride; }
    __device__ __forceinline__ void write_pair(int head, int dim, uint32_t pair) const {
        uint16_t* to = row(head) + dim;
        if (aligned4) *reinterpret_cast<uint32_t*>(to) = pair;
        else to[0] = static_cast<uint16_t>(pair), to[1] = static_cast<uint16_t>(pair >> 16);
    }
    // base 2, -inf without keys; to the natural logarithm, +inf without keys
    __device__ __forceinline__ void write_lse(int head, float lse2) const {
        lse[static_cast<uint64_t>(head) * lse_stride] = lse2 == -INFINITY ? INFINITY : lse2 * 0.69314718f;
    }
};

// The rows of a thread.
__device__ __forceinline__ int head_of(int thread, int r) { return thread / 32 * 16 + thread % 32 / 4 + 8 * r; }

// One split: normalize and write. Through shared memory, where nobody reads Q and the keys any more, so that rows are written in
// one piece; each warp has its own rows.
template <class C>
__device__ __forceinline__ void write_alone(const Accumulators<C>& out, const RowSums& rows, const OutputTile& tile, uint32_t shared,
                                            int half, int thread) {
    const int warp = thread / 32, lane = thread % 32;
    float factor[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const int head = head_of(thread, r);
        const float lse = rows.lse(r);
        // Divided after the sum is known not to be 0; NaN stays NaN.
        factor[r] = sink_factor(ptx::ld_shared_f32(shared + C::kSinkOffset + 4 * head), lse);
        if (rows.sum[r] != 0.f) factor[r] = __fdividef(factor[r], rows.sum[r]);
        if (half == 0 && lane % 4 == 0 && head < tile.heads) tile.write_lse(head, lse);
    }
    const uint32_t warp_at = shared + (half * C::kHeads + 16 * warp) * C::kOutPitch;
    const uint32_t matrix_row_at = warp_at + lane % 16 * C::kOutPitch + lane / 16 * 16;
#pragma unroll
    for (int n = 0; n < C::kValueDims / 8; n += 2) {   // 16 dims of 16 rows
        uint32_t r[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            r[i] = ptx::cvt_bf16x2_f32(element(out, 4 * n + 2 * i) * factor[i % 2], element(out, 4 * n + 2 * i + 1) * factor[i % 2]);
        }
        ptx::stmatrix_x4(matrix_row_at + 16 * n, r);
    }
    __syncwarp();
    const int rows_of_warp = min(16, tile.heads - 16 * warp), dim = C::kValueDims * half;
    if (tile.aligned16) {
#pragma unroll 4
        for (int i = 0; i < rows_of_warp; ++i) {
            const uint4 v = ptx::ld_shared_v4(warp_at + i * C::kOutPitch + 16 * lane);
            *reinterpret_cast<uint4*>(tile.row(16 * warp + i) + dim + 8 * lane) = v;
        }
    } else {
#pragma unroll 1
        for (int i = 0; i < rows_of_warp * (C::kValueDims / 64); ++i) {
            const int row = i % rows_of_warp, pair = i / rows_of_warp * 64 + 2 * lane;
            tile.write_pair(16 * warp + row, dim + pair, ptx::ld_shared_u32(warp_at + row * C::kOutPitch + 2 * pair));
        }
    }
}

// The log-sum-exp over all splits of a thread's row, base 2, when those of the other CTAs have come.
template <class C>
__device__ __forceinline__ float lse_of_head(uint32_t shared, SplitsOfTile splits, int thread, int r) {
    return lse_of_splits(shared + C::kPeerLseOffset + 4 * kMaxSplits * head_of(thread, r), splits, thread % 4);
}

// The split's log-sum-exp of every head, to every CTA of the cluster. By one warpgroup.
template <class C>
__device__ __forceinline__ void publish_lse(const RowSums& rows, uint32_t shared, SplitsOfTile splits, int thread) {
    const int t = thread % 4;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const float lse = rows.lse(r);
#pragma unroll 1
        for (int peer = t; peer < splits.count; peer += 4) send_lse<C>(lse, head_of(thread, r), shared, splits, peer);
    }
    ptx::mbarrier_arrive(shared + C::kLseBarrierOffset);
}

// Where a thread's share of a unit lies: two dims of its two rows, and the same 8 dims on, in the order of the accumulators. From a peer
// as bf16, 16 bytes; the own in fp32, twice 16.
template <class C>
__device__ __forceinline__ void send_partial(const Accumulators<C>& out, const float (&weight)[2], uint32_t shared, int half, int thread) {
#pragma unroll
    for (int u = 0; u < C::kUnits / 2; ++u) {
        const UnitPlace place = unit_place<C>(shared, half * (C::kUnits / 2) + u);
        const uint32_t at = place.address + 16 * thread;
        float v[8];   // [8 dims][row][2 dims]
#pragma unroll
        for (int i = 0; i < 8; ++i) v[i] = element(out, 8 * u + i) * weight[i / 2 % 2];
        if (place.is_own()) {
#pragma unroll
            for (int i = 0; i < 2; ++i) ptx::st_shared_v4(at + i * (C::kUnitBytes / 2), make_float4(v[4 * i], v[4 * i + 1], v[4 * i + 2], v[4 * i + 3]));
        } else {
            auto pair = [&](int i) { return __uint_as_float(ptx::cvt_bf16x2_f32(v[i], v[i + 1])); };
            ptx::st_async(at, make_float4(pair(0), pair(2), pair(4), pair(6)), place.barrier);
        }
    }
    ptx::mbarrier_arrive(shared + C::kPartialBarrierOffset);
}

// By all consumers, after the last block: the split's partial result to those who own its units. Behind it each thread has as many
// registers as the producers.
template <class C>
__device__ __forceinline__ void send_to_owners(const Accumulators<C>& out, const RowSums& rows, uint32_t shared, SplitsOfTile splits, int half, int thread) {
    ptx::barrier_cluster_wait();   // all CTAs have begun
    if (half == 0) publish_lse<C>(rows, shared, splits, thread);
    else if (thread < 32) find_unit_places<C>(shared, splits, thread);
    ptx::barrier_sync(kConsumerBarrier, C::kConsumers);   // the places
    ptx::barrier_cluster_arrive_relaxed();
    ptx::mbarrier_wait(shared + C::kLseBarrierOffset, 0);
    float weight[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        // 2^(own shift - all): the split's own sum cancels.
        const float lse = lse_of_head<C>(shared, splits, thread, r);
        weight[r] = rows.sum[r] == 0.f ? 0.f : ptx::ex2(rows.shift[r] - lse);
    }
    ptx::barrier_cluster_wait();   // nobody in any CTA reads Q and the keys any more
    send_partial<C>(out, weight, shared, half, thread);
}

// What the producers do meanwhile.
__device__ __forceinline__ void stand_by_while_sending() {
    ptx::barrier_cluster_wait();
    ptx::barrier_cluster_arrive_relaxed();
    ptx::barrier_cluster_wait();
}

// By all, consumers and producers: adds up the CTA's own units and writes them. A warpgroup takes every fourth unit, a warp 16 of its rows.
template <class C>
__device__ __forceinline__ void write_units(const OutputTile& tile, uint32_t shared, SplitsOfTile splits) {
    const int thread = threadIdx.x % kWarpgroup, t = thread % 4;
    ptx::mbarrier_wait(shared + C::kLseBarrierOffset, 0);
    float factor[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const int head = head_of(thread, r);
        const float lse = lse_of_head<C>(shared, splits, thread, r);
        factor[r] = sink_factor(ptx::ld_shared_f32(shared + C::kSinkOffset + 4 * head), lse);
        if (splits.rank == 0 && static_cast<int>(threadIdx.x) < kWarpgroup && t == 0 && head < tile.heads) tile.write_lse(head, lse);
    }
    const int head = head_of(thread, t / 2);   // whose dims the thread writes: 8 of them, the first or the second of a unit
    const uint32_t stride = splits.incoming_offset<C>(1, 0), of_thread = shared + C::kIncomingOffset + 16 * thread;
    const int peers = splits.count - 1;
    ptx::mbarrier_wait(shared + C::kPartialBarrierOffset, 0);
#pragma unroll 1
    for (int local = threadIdx.x / kWarpgroup; local < splits.own_units<C>(); local += C::kThreads / kWarpgroup) {
        const uint32_t own = of_thread + splits.own_offset<C>(local), incoming = of_thread + splits.incoming_offset<C>(0, local);
        const float4 first = ptx::ld_shared_f32x4(own), second = ptx::ld_shared_f32x4(own + C::kUnitBytes / 2);
        float x[8] = {first.x, first.y, first.z, first.w, second.x, second.y, second.z, second.w};
#pragma unroll 2
        for (int i = 0; i < peers; ++i) {
            const uint4 v = ptx::ld_shared_v4(incoming + i * stride);
            const uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
            for (int k = 0; k < 4; ++k) x[2 * k] += ptx::f32_of_bf16_lo(words[k]), x[2 * k + 1] += ptx::f32_of_bf16_hi(words[k]);
        }
        // Word 2 r + i is two dims of row r, of its dims 8 i .. + 7; from the quad's lanes the thread gets all of its own.
        uint32_t words[4];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
#pragma unroll
            for (int i = 0; i < 2; ++i) words[2 * r + i] = ptx::cvt_bf16x2_f32(x[4 * i + 2 * r] * factor[r], x[4 * i + 2 * r + 1] * factor[r]);
        }
        ptx::quad_transpose(words, t);
        uint16_t* const to = tile.row(head) + splits.own_unit(local) * kUnitDims + 8 * (t % 2);
        if (head < tile.heads) write_dims(to, words, tile.aligned16, tile.aligned4);
    }
}

}  // namespace flash_mla::sm90::head64
