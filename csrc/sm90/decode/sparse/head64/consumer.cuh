// Scores and values: what a consumer warpgroup does with the blocks.
//
// Both consumers compute all scores of a block, 64 heads x 64 keys, and weigh them alike; then each multiplies the weights,
// which are in its registers, by its own half of the dims of V. Twice the same scores, but nothing to exchange, and no
// barrier between the two.
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

// out += P V. V is the keys' own block, read across rows: 16 keys are 2048 bytes.
template <class C>
__device__ __forceinline__ void multiply_values(Accumulators<C>& out, const uint32_t (&weights)[16], ptx::Swizzled128 values) {
#pragma unroll
    for (int k = 0; k < C::kKeyGroups; ++k) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            ptx::wgmma_m64n128k16_rs(out[i], weights + 4 * k, values + (2048 * k + i * C::kValueDims / 128 * C::kTileBytes));
        }
    }
}

template <class C>
__device__ __forceinline__ void consume(Accumulators<C>& out, RowSums& rows, int blocks, float scale_log2, uint32_t shared,
                                        int warpgroup, int warp, int lane) {
    const uint32_t value_at = shared + C::kKeyOffset + warpgroup * (C::kValueDims / kTileDims * C::kTileBytes);
    const uint32_t mask_at = shared + C::kMaskOffset + 8 * (lane % 4);
    float s[32];
    uint32_t weights[16];
    rows.clear();
#pragma unroll
    for (int i = 0; i < C::kValueDims / 2; ++i) element(out, i) = 0.f;
#pragma unroll 1
    for (int i = 0; i < blocks; ++i) {
        const int stage = i % C::kStages;
        const uint32_t full = shared + C::kFullOffset + 16 * stage, parity = i / C::kStages & 1;
        const uint32_t scored = shared + C::kScoredOffset + 8 * stage;
        // Opaque: the compiler would keep dozens of descriptors in registers.
        const ptx::Swizzled128 query(ptx::opaque(shared + C::kQueryOffset));
        const ptx::Swizzled128 keys(ptx::opaque(shared + C::kKeyOffset + stage * C::kStageBytes));
        const ptx::Swizzled128 values(ptx::opaque(value_at + stage * C::kStageBytes), C::kTileBytes);
        // The second warpgroup begins a block when the first has its scores, so that the one's softmax runs beside the other's
        // products. Left alone, the two would run in step. (It is at most a block behind: a barrier for each stage.)
        if (warpgroup == 1) ptx::mbarrier_wait(scored, parity);
        ptx::mbarrier_wait(full, parity);
        ptx::wgmma_fence();
        multiply_scores<C, 0, C::kFirstTiles>(s, query, keys);
        ptx::mbarrier_wait(full + 8, parity);
        multiply_scores<C, C::kFirstTiles, C::kTiles>(s, query, keys);
        ptx::wgmma_commit();
        // The producers fetch this block next but one. (Its keys have been found: see KeyFinder.)
        KeyFinder<C>::prefetch(shared, i + 2, 4 * warpgroup + warp, lane);
        ptx::wgmma_wait<0>();
        ptx::pin(s);
        if (warpgroup == 0 && lane == 0) ptx::mbarrier_arrive(scored);
        weigh<C>(s, weights, out, rows, scale_log2, mask_at + 4 * C::kKeys * stage);
        ptx::pin(weights), pin(out);
        ptx::wgmma_fence();
        multiply_values<C>(out, weights, values);
        ptx::wgmma_commit();
        ptx::wgmma_wait<0>();
        pin(out);
        if (lane == 0) ptx::mbarrier_arrive(shared + C::kEmptyOffset + 8 * stage);
    }
    rows.complete();
}

}  // namespace flash_mla::sm90::head64
