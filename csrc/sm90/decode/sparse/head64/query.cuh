// Q into shared memory, once, by the consumers.
#pragma once
#include "ptx/mbarrier.cuh"
#include "ptx/memory.cuh"
#include "sm90/decode/sparse/head64/config.h"
#include "sm90/decode/sparse/query_row.cuh"

namespace flash_mla::sm90::head64 {

// Where 16-byte chunk `chunk` (8 dims) of a row lies, from the start of a matrix [tile][64 rows][64 dims].
template <class C>
__device__ __forceinline__ uint32_t swizzled(int row, int chunk) {
    return chunk / 8 * C::kTileBytes + row * 128 + ((chunk % 8) ^ (row % 8)) * 16;
}

// Rows from `rows` on do not exist: they are read from the last one that does, and become zeros. (No branch around a load: it
// would make them wait for one another.)
template <class C, bool kAligned, class FreeQuery>
__device__ __forceinline__ void load_query_rows(const uint16_t* q, uint32_t stride, int rows, uint32_t shared, int thread, FreeQuery free_query) {
    constexpr int kChunks = C::Record::kDimQK / 8, kLoads = C::kHeads * kChunks / C::kConsumers;
    static_assert(kLoads * C::kConsumers == C::kHeads * kChunks);
    uint32_t v[kLoads][4];
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
        const int n = thread + i * C::kConsumers, row = min(n / kChunks, rows - 1), chunk = n % kChunks;
        load_bf16<4, kAligned>(v[i], q + static_cast<uint64_t>(row) * stride + 8 * chunk);
    }
    free_query();
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
        const int n = thread + i * C::kConsumers, row = n / kChunks, chunk = n % kChunks;
        if (row >= rows) v[i][0] = v[i][1] = v[i][2] = v[i][3] = 0;
        ptx::st_shared_v4(shared + C::kQueryOffset + swizzled<C>(row, chunk), v[i][0], v[i][1], v[i][2], v[i][3]);
    }
}

// free_query waits until the place of Q is free.
template <class C, class FreeQuery>
__device__ __forceinline__ void load_query(const uint16_t* q, uint32_t stride, int rows, bool aligned16, uint32_t shared, int thread, FreeQuery free_query) {
    with_alignment(aligned16, [&](auto aligned) { load_query_rows<C, aligned.value>(q, stride, rows, shared, thread, free_query); });
    ptx::fence_proxy_async();   // the matrix products read it
}

}  // namespace flash_mla::sm90::head64
