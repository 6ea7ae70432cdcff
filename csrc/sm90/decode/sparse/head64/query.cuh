// Q into shared memory, once, by the consumers.
#pragma once
#include "ptx/mbarrier.cuh"
#include "ptx/memory.cuh"
#include "sm90/decode/sparse/head64/config.h"

namespace flash_mla::sm90::head64 {

// Where 16-byte chunk `chunk` (8 dims) of a row lies, from the start of a matrix [tile][64 rows][64 dims].
template <class C>
__device__ __forceinline__ uint32_t swizzled(int row, int chunk) {
    return chunk / 8 * C::kTileBytes + row * 128 + ((chunk % 8) ^ (row % 8)) * 16;
}

// 8 bf16 of a row that starts anywhere.
__device__ __forceinline__ uint4 load_chunk(const uint16_t* p, bool aligned16) {
    if (aligned16) return ptx::ld_global_v4(p);
    uint32_t r[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) r[i] = ptx::ld_global_u16(p + 2 * i) | ptx::ld_global_u16(p + 2 * i + 1) << 16;
    return make_uint4(r[0], r[1], r[2], r[3]);
}

// `rows`: how many of the tile's exist; the others become zeros.
template <class C>
__device__ __forceinline__ void load_query(const uint16_t* q, uint32_t stride, int rows, bool aligned16, uint32_t shared, int thread) {
    constexpr int kChunks = C::Record::kDimQK / 8, kLoads = C::kHeads * kChunks / C::kConsumers, kBatch = kLoads / 2;
    static_assert(kLoads * C::kConsumers == C::kHeads * kChunks && kBatch * 2 == kLoads);
#pragma unroll 1
    for (int first = 0; first < kLoads; first += kBatch) {
        uint4 v[kBatch];
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
            const int n = thread + (first + i) * C::kConsumers, row = n / kChunks, chunk = n % kChunks;
            v[i] = make_uint4(0, 0, 0, 0);
            if (row < rows) v[i] = load_chunk(q + static_cast<uint64_t>(row) * stride + 8 * chunk, aligned16);
        }
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
            const int n = thread + (first + i) * C::kConsumers, row = n / kChunks, chunk = n % kChunks;
            ptx::st_shared_v4(shared + C::kQueryOffset + swizzled<C>(row, chunk), v[i].x, v[i].y, v[i].z, v[i].w);
        }
    }
    ptx::fence_proxy_async();   // the matrix products read it
}

}  // namespace flash_mla::sm90::head64
