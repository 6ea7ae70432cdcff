// Q into shared memory, once, by the consumers.
#pragma once
#include "ptx/mbarrier.cuh"
#include "ptx/memory.cuh"
#include "sm90/decode/sparse/head64/config.h"
#include "sm90/decode/sparse/query_row.cuh"

namespace flash_mla::sm90::head64 {

// To a matrix [tile][64 rows][64 dims]: 16-byte chunk c of a row lies at place c ^ (row % 8).
//
// Four threads a row, each two chunks of every tile, t and t + 4, of which the odd rows take t + 4 first: so 8 threads store to 8
// different places of 16 bytes, and a thread's addresses are two of each kind and constants. Rows from `rows` on do not exist: they
// become zeros. If rows are aligned, they are read from the last one that does, as a branch around a load would make all wait.
template <class C>
__device__ __forceinline__ void load_query(const uint16_t* q, uint32_t stride, int rows, bool aligned16, uint32_t shared, int thread) {
    static_assert(4 * C::kHeads == C::kConsumers && C::kTiles * kTileDims == C::Record::kDimQK);
    const int row = thread / 4, chunk = thread % 4 + row % 2 * 4;   // and chunk ^ 4
    const uint16_t* from = q + static_cast<uint64_t>(min(row, rows - 1)) * stride;
    const uint32_t to = shared + C::kQueryOffset + row * 128 + (chunk ^ row % 8) * 16;
    const auto load = [&](auto aligned, int tile, int i, uint32_t (&v)[4]) {
        load_bf16<4, aligned.value>(v, from + 8 * (chunk ^ 4 * i) + tile * kTileDims);
    };
    const auto store = [&](int tile, int i, const uint32_t (&v)[4]) {
        ptx::st_shared_v4((to ^ 64 * i) + tile * C::kTileBytes, v[0], v[1], v[2], v[3]);
    };
    if (aligned16) {
        uint32_t v[C::kTiles][2][4];
#pragma unroll
        for (int n = 0; n < 2 * C::kTiles; ++n) load(std::true_type(), n / 2, n % 2, v[n / 2][n % 2]);
        const uint32_t exists = row < rows ? ~0u : 0u;
#pragma unroll
        for (int n = 0; n < 2 * C::kTiles; ++n) {
            uint32_t (&chunk_of_row)[4] = v[n / 2][n % 2];
#pragma unroll
            for (int i = 0; i < 4; ++i) chunk_of_row[i] &= exists;
            store(n / 2, n % 2, chunk_of_row);
        }
    } else {
#pragma unroll 1
        for (int n = 0; n < 2 * C::kTiles; ++n) {
            uint32_t v[4] = {0, 0, 0, 0};
            if (row < rows) load(std::false_type(), n / 2, n % 2, v);
            store(n / 2, n % 2, v);
        }
    }
    ptx::fence_proxy_async();   // the matrix products read it
}

}  // namespace flash_mla::sm90::head64
