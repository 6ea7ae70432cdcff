// Whether a tile of 64 rows is padded: all rows behind the first ones are zero. -0 is zero, NaN is not. In two
// steps: a sample, which tells rows of numbers from padding and costs next to nothing; then every element, by way of shared memory, so
// that the rows travel while the producers start copies of keys.
#pragma once
#include "ptx/mbarrier.cuh"
#include "sm90/decode/sparse/head16/query.cuh"
#include "sm90/decode/sparse/head64/config.h"

namespace flash_mla::sm90::head64 {

// The rows from SmallTile::kHeads to `rows` - 1 of a tile that begins at `q`, if there are any.
template <class C>
struct RowsBehind {
    static constexpr int kFirst = C::SmallTile::kHeads, kCount = C::kHeads - kFirst, kWarps = C::kProducers / 32, kRowsOfWarp = kCount / kWarps;
    static constexpr int kRowBytes = C::Record::kDimQK * 2, kChunks = kRowBytes / 16;
    const uint16_t* q;
    uint32_t stride, shared;
    int rows, warp, lane;   // of the consumers or of the producers, of each 256
    bool aligned16;

    // Of each row a few chunks, one for each lane. By producers or consumers.
    uint32_t sample[4];
    __device__ __forceinline__ void load_sample() {
        const uint16_t* from = row(min(kFirst + warp + lane % kRowsOfWarp * kWarps, rows - 1)) + lane * (kChunks / 32) * 8;
        with_alignment(aligned16, [&](auto aligned) { load_bf16<4, aligned.value>(sample, from); });
    }
    __device__ __forceinline__ bool sample_has_nonzero() const { return rows > kFirst && head16::is_nonzero(sample[0] | sample[1] | sample[2] | sample[3]); }

    // By one thread, before a barrier of the CTA.
    __device__ __forceinline__ static void init_barrier(uint32_t shared) { ptx::mbarrier_init(shared + C::kLookBarrierOffset, kCount); }
    // By the producers, a lane a row. Where rows are not aligned, they are not copied.
    __device__ __forceinline__ void copy() const {
        if (!aligned16) return;
        const int i = warp + lane * kWarps;
        if (i < kCount) {
            const bool exists = kFirst + i < rows;
            ptx::mbarrier_arrive_expect_tx(shared + C::kLookBarrierOffset, exists ? kRowBytes : 0);
            if (exists) ptx::cp_async_bulk(shared + C::kLookOffset + i * kRowBytes, row(kFirst + i), kRowBytes, shared + C::kLookBarrierOffset);
        }
        __syncwarp();
    }
    // Whether there is a nonzero among what this producer looks at.
    __device__ __forceinline__ bool has_nonzero() const {
        const int end = (rows - kFirst) * kChunks;
        uint32_t any = 0;
        if (aligned16) {
            ptx::mbarrier_wait(shared + C::kLookBarrierOffset, 0);
#pragma unroll 4
            for (int n = 32 * warp + lane; n < end; n += C::kProducers) {
                const uint4 v = ptx::ld_shared_v4(shared + C::kLookOffset + 16 * n);
                any |= v.x | v.y | v.z | v.w;
            }
            ptx::fence_proxy_async();   // keys may be copied there next
        } else {
#pragma unroll 1
            for (int n = 32 * warp + lane; n < end; n += C::kProducers) {
                uint32_t v[4];
                load_bf16<4, false>(v, row(kFirst + n / kChunks) + n % kChunks * 8);
                any |= v[0] | v[1] | v[2] | v[3];
            }
        }
        return head16::is_nonzero(any);
    }

   private:
    __device__ __forceinline__ const uint16_t* row(int i) const { return q + static_cast<uint64_t>(i) * stride; }
};

}  // namespace flash_mla::sm90::head64
