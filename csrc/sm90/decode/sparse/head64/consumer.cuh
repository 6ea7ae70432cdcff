// Scores and values: what the two consumer warpgroups do with the blocks.
//
// The scorer computes the scores of a block, 64 heads x 64 keys, and weighs them; the follower takes the weights over from it
// through shared memory, each thread those of the thread in the same place. Both multiply them by their half of the dims of V.
// While the follower does, the scorer goes on with the scores of the next block.
#pragma once
#include "ptx/mbarrier.cuh"
#include "ptx/warpgroup.cuh"
#include "ptx/wgmma.cuh"
#include "sm90/decode/sparse/head64/producer.cuh"
#include "sm90/decode/sparse/head64/softmax.cuh"

namespace flash_mla::sm90::head64 {

// D fragments of [64 heads x 256 dims], in two halves: ptxas refuses instructions of more registers than a thread has at the
// kernel's start, 128.
template <class C>
using Accumulators = float[2][C::kValueDims / 4];

// The four registers of 8 dims follow each other.
template <int kCount>
__device__ __forceinline__ float& element(float (&out)[2][kCount], int i) { return out[i / kCount][i % kCount]; }
template <int kCount>
__device__ __forceinline__ const float& element(const float (&out)[2][kCount], int i) { return out[i / kCount][i % kCount]; }
template <int kCount>
__device__ __forceinline__ void pin(float (&out)[2][kCount]) { ptx::pin(out[0]), ptx::pin(out[1]); }

// s = or += Q K^T over some tiles.
template <class C, int kFrom, int kTo>
__device__ __forceinline__ void multiply_scores(float (&s)[32], ptx::Swizzled128 query, ptx::Swizzled128 keys) {
#pragma unroll
    for (int tile = kFrom; tile < kTo; ++tile) {
#pragma unroll
        for (int k = 0; k < kTileDims / 16; ++k) {
            const uint32_t at = tile * C::kTileBytes + 32 * k;
            if (at == 0) ptx::wgmma_m64n64k16_ss<false>(s, query, keys);
            else ptx::wgmma_m64n64k16_ss<true>(s, query + at, keys + at);
        }
    }
}

// out = P V if `is_first`, or +=. V is the keys' own block, read across rows: 16 keys are 2048 bytes.
template <class C>
__device__ __forceinline__ void multiply_values(Accumulators<C>& out, const uint32_t (&weights)[16], ptx::Swizzled128 values, bool is_first) {
#pragma unroll
    for (int k = 0; k < C::kKeyGroups; ++k) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            ptx::wgmma_m64n128k16_rs(out[i], weights + 4 * k, values + (2048 * k + i * C::kValueDims / 128 * C::kTileBytes),
                                      k > 0 || !is_first);
        }
    }
}

template <int kCount>
__device__ __forceinline__ void rescale(float (&out)[2][kCount], const float (&factor)[2]) {
#pragma unroll
    for (int n = 0; n < kCount; ++n) out[0][n] *= factor[n / 2 % 2], out[1][n] *= factor[n / 2 % 2];
}

// Rows without a key become 0: without a block there is nothing in them, and scores that are no numbers may have spoilt them.
template <int kCount>
__device__ __forceinline__ void clear_rows_without_keys(float (&out)[2][kCount], const RowSums& rows) {
    if (!__any_sync(0xffffffffu, rows.sum[0] == 0.f || rows.sum[1] == 0.f)) return;
#pragma unroll
    for (int n = 0; n < kCount; ++n) {
        if (rows.sum[n / 2 % 2] == 0.f) out[0][n] = out[1][n] = 0.f;
    }
}

// A consumer's place in shared memory; `thread` is that of the warpgroup.
template <class C>
struct Consumer {
    uint32_t shared;
    int half, thread, warp, lane;   // half: which dims of V

    __device__ __forceinline__ uint32_t full(int stage) const { return shared + C::kFullOffset + 16 * stage; }
    __device__ __forceinline__ uint32_t weighed(int stage) const { return shared + C::kWeighedOffset + 8 * stage; }
    // The thread's weights: of 16 keys each, kWarpgroup * 16 bytes apart. Its rows' factors, 8 heads apart, and sums.
    __device__ __forceinline__ uint32_t weights(int stage) const {
        return shared + C::kWeightOffset + stage * C::kWeightStageBytes + 16 * thread;
    }
    __device__ __forceinline__ uint32_t factor(int stage) const {
        return shared + C::kFactorOffset + 4 * (C::kHeads * stage + 16 * warp + lane / 4);
    }
    __device__ __forceinline__ uint32_t row_sum(int r) const {
        return shared + C::kRowSumOffset + 8 * (16 * warp + lane / 4 + 8 * r);
    }

    __device__ __forceinline__ void accumulate(Accumulators<C>& out, const uint32_t (&weights)[16], int stage, bool is_first) const {
        const uint32_t at = shared + C::kKeyOffset + half * (C::kValueDims / kTileDims * C::kTileBytes) + stage * C::kStageBytes;
        ptx::wgmma_fence();
        multiply_values<C>(out, weights, ptx::Swizzled128(ptx::opaque(at), C::kTileBytes), is_first);
        ptx::wgmma_commit();
        ptx::wgmma_wait<0>();
        pin(out);
        ptx::mbarrier_arrive(shared + C::kEmptyOffset + 8 * stage);
    }
};

template <class C>
__device__ __forceinline__ void score(const Consumer<C>& self, Accumulators<C>& out, RowSums& rows, int blocks, float scale_log2) {
    float s[32];
    uint32_t weights[16];
    rows.clear();
#pragma unroll 1
    for (int i = 0; i < blocks; ++i) {
        const int stage = i % C::kStages, parity = i / C::kStages & 1;
        // Opaque: the compiler would keep dozens of descriptors in registers.
        const ptx::Swizzled128 query(ptx::opaque(self.shared + C::kQueryOffset));
        const ptx::Swizzled128 keys(ptx::opaque(self.shared + C::kKeyOffset + stage * C::kStageBytes));
        ptx::mbarrier_wait(self.full(stage), parity);
        ptx::wgmma_fence();
        multiply_scores<C, 0, C::kFirstTiles>(s, query, keys);
        ptx::mbarrier_wait(self.full(stage) + 8, parity);
        multiply_scores<C, C::kFirstTiles, C::kTiles>(s, query, keys);
        ptx::wgmma_commit();
        ptx::wgmma_wait<0>();
        ptx::pin(s);
        float factor[2];
        const uint32_t mask_at = self.shared + C::kMaskOffset + 4 * C::kKeys * stage + 8 * (self.lane % 4);
        const bool stays = weigh<C>(s, weights, factor, rows, scale_log2, mask_at);
#pragma unroll
        for (int k = 0; k < C::kKeyGroups; ++k) {
            const uint32_t* w = weights + 4 * k;
            ptx::st_shared_v4(self.weights(stage) + 16 * kWarpgroup * k, w[0], w[1], w[2], w[3]);
        }
        if (self.lane % 4 == 0) {
            ptx::st_shared_f32(self.factor(stage), factor[0]);
            ptx::st_shared_f32(self.factor(stage) + 32, factor[1]);
        }
        ptx::mbarrier_arrive(self.weighed(stage));
        if (!stays && i > 0) rescale(out, factor);
        ptx::pin(weights), pin(out);
        self.accumulate(out, weights, stage, i == 0);
    }
    rows.complete();
    if (self.lane % 4 == 0) {
        ptx::st_shared_f32x2(self.row_sum(0), {rows.shift[0], rows.sum[0]});
        ptx::st_shared_f32x2(self.row_sum(1), {rows.shift[1], rows.sum[1]});
    }
}

template <class C>
__device__ __forceinline__ void follow(const Consumer<C>& self, Accumulators<C>& out, int blocks) {
    uint32_t weights[16];
#pragma unroll 1
    for (int i = 0; i < blocks; ++i) {
        const int stage = i % C::kStages, parity = i / C::kStages & 1;
        ptx::mbarrier_wait(self.full(stage) + 8, parity);
        // The producers fetch this block next but one. (Its keys have been found: see KeyFinder.)
        KeyFinder<C>::prefetch(self.shared, i + 2, self.warp, self.lane);
        KeyFinder<C>::prefetch(self.shared, i + 2, self.warp + 4, self.lane);
        ptx::mbarrier_wait(self.weighed(stage), parity);
#pragma unroll
        for (int k = 0; k < C::kKeyGroups; ++k) {
            const uint4 v = ptx::ld_shared_v4(self.weights(stage) + 16 * kWarpgroup * k);
            weights[4 * k] = v.x, weights[4 * k + 1] = v.y, weights[4 * k + 2] = v.z, weights[4 * k + 3] = v.w;
        }
        const float factor[2] = {ptx::ld_shared_f32(self.factor(stage)), ptx::ld_shared_f32(self.factor(stage) + 32)};
        if (__any_sync(0xffffffffu, factor[0] != 1.f || factor[1] != 1.f) && i > 0) rescale(out, factor);
        ptx::pin(weights), pin(out);
        self.accumulate(out, weights, stage, i == 0);
    }
}

// After the last block, by both: the follower learns the scorer's sums, and nobody reads Q and the keys any more.
template <class C>
__device__ __forceinline__ void share_row_sums(const Consumer<C>& self, Accumulators<C>& out, RowSums& rows) {
    ptx::barrier_sync(kConsumerBarrier, C::kConsumers);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const float2 row = ptx::ld_shared_f32x2(self.row_sum(r));
        rows.shift[r] = row.x, rows.sum[r] = row.y;
    }
    clear_rows_without_keys(out, rows);
}

}  // namespace flash_mla::sm90::head64
