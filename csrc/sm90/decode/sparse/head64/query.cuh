// What the consumers load before they multiply: Q and the sinks, into shared memory.
#pragma once
#include "ptx/mbarrier.cuh"
#include "ptx/memory.cuh"
#include "sm90/decode/sparse/cluster_merge.cuh"
#include "sm90/decode/sparse/head64/config.h"
#include "sm90/decode/sparse/query_row.cuh"

namespace flash_mla::sm90::head64 {

// Q becomes a matrix [tile][64 rows][64 dims]: 16-byte chunk c of a row lies at place c ^ (row % 8).
//
// Four threads a row, each two chunks of every tile, t and t + 4, of which the odd rows take t + 4 first: so 8 threads store to 8
// different places of 16 bytes, and a thread's addresses are two of each kind and constants. Rows that do not exist become zeros.
template <class C>
struct TileQuery {
    static_assert(4 * C::kHeads == C::kConsumers && C::kTiles * kTileDims == C::Record::kDimQK);
    const uint16_t* from;   // the thread's row of q
    int row, chunk;         // and chunk ^ 4
    bool exists, aligned16;
    uint32_t chunks[C::kTiles][2][4];   // if aligned16
    float sink;                         // of head number `thread`, base 2

    // Rows that do not exist are read from the last one that does: a branch around a load would make all wait. Rows that are not
    // aligned are left to store(). Behind the lengths and the sinks, which some warps wait for: 64 KB are better not asked for before the
    // first slots (128 heads, width 1152, 16 tokens, four splits in two waves: 34.0 us, else 34.6).
    __device__ __forceinline__ void load(const SparseDecodeParams& p, bool q_is_aligned16, const uint16_t* q, int first_head,
                                         int rows, int thread) {
        row = thread / 4, chunk = thread % 4 + row % 2 * 4;
        exists = row < rows, aligned16 = q_is_aligned16;
        from = q + static_cast<uint64_t>(min(row, rows - 1)) * p.q_stride_h;
        if (thread / 32 < C::kHeads / 32) sink = load_sink(p, first_head + min(thread, rows - 1)) * kLog2E;
        if (!aligned16) return;
#pragma unroll
        for (int n = 0; n < 2 * C::kTiles; ++n) load_chunk<true>(chunks[n / 2][n % 2], n);
    }
    __device__ __forceinline__ void store(uint32_t shared, int thread) {
        if (aligned16) {
            const uint32_t mask = exists ? ~0u : 0u;
#pragma unroll
            for (int n = 0; n < 2 * C::kTiles; ++n) {
                uint32_t (&v)[4] = chunks[n / 2][n % 2];
#pragma unroll
                for (int i = 0; i < 4; ++i) v[i] &= mask;
                store_chunk(shared, v, n);
            }
        } else {
#pragma unroll 1
            for (int n = 0; n < 2 * C::kTiles; ++n) {
                uint32_t v[4] = {0, 0, 0, 0};
                if (exists) load_chunk<false>(v, n);
                store_chunk(shared, v, n);
            }
        }
        ptx::fence_proxy_async();   // the matrix products read it
        if (thread < C::kHeads) ptx::st_shared_f32(shared + C::kSinkOffset + 4 * thread, sink);
    }

   private:
    template <bool kAligned>
    __device__ __forceinline__ void load_chunk(uint32_t (&v)[4], int n) const {
        load_bf16<4, kAligned>(v, from + 8 * (chunk ^ 4 * (n % 2)) + n / 2 * kTileDims);
    }
    __device__ __forceinline__ void store_chunk(uint32_t shared, const uint32_t (&v)[4], int n) const {
        const uint32_t to = shared + C::kQueryOffset + row * 128 + (chunk ^ row % 8) * 16;
        ptx::st_shared_v4((to ^ 64 * (n % 2)) + n / 2 * C::kTileBytes, v[0], v[1], v[2], v[3]);
    }
};

}  // namespace flash_mla::sm90::head64
