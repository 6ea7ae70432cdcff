// Rows of Q that are all zero, as callers pad to 64 heads. A zero row's result does not depend on which tile it lies in:
// its scores are 0 for every key, rows never mix, and the sink is applied last. So a tile of zero rows is skipped, and one
// more cluster for each token, that of the zero row, works on a tile of zeros instead of rows of Q. Meanwhile it looks which
// tiles are zero, and writes its result for their heads, each with its own sink. -0 is zero, NaN is not.
#pragma once
#include "ptx/cluster.cuh"
#include "sm90/decode/sparse/head16/query.cuh"
#include "sm90/decode/sparse/head16/roles.cuh"

namespace flash_mla::sm90::head16 {

// Which tiles of the token are not all zero, as a bit each. The rows are divided among the warps of all splits, so that this
// takes about one load's time; `load` starts it.
template <class C>
struct RowSearch {
    static constexpr int kChunks = C::Record::kDimQK / 8;   // of a row, 16 bytes each
    static constexpr int kLoads = (kChunks + 31) / 32, kRows = 8 / kLoads;   // a lane's loads of a row; rows at a time
    int row, step;   // this warp's first row, and from one to the next
    uint32_t words[kRows][kLoads][4];

    __device__ __forceinline__ RowSearch(int rank, int splits, int warp) : row(rank * C::kWarps + warp), step(splits * C::kWarps) {}

    // kRows rows, from the warp's first one on.
    __device__ __forceinline__ void load(const SparseDecodeParams& p, const uint16_t* q_token, int lane) {
        with_alignment(p.q_aligned16, [&](auto aligned) {
#pragma unroll
            for (int i = 0; i < kRows; ++i) {
                const int head = row + i * step;
                const uint16_t* q_row = q_token + static_cast<uint64_t>(head) * p.q_stride_h;
#pragma unroll
                for (int j = 0; j < kLoads; ++j) {
                    const int chunk = lane + 32 * j;
                    words[i][j][0] = words[i][j][1] = words[i][j][2] = words[i][j][3] = 0;
                    if (head < p.h_q && chunk < kChunks) load_bf16<4, aligned.value>(words[i][j], q_row + 8 * chunk);
                }
            }
        });
    }
    // The warp's tiles that are not all zero, to shared memory; complete after the next barrier of the CTA.
    __device__ __forceinline__ void finish(const SparseDecodeParams& p, const uint16_t* q_token, uint32_t shared, int warp, int lane) {
        uint32_t nonzero = nonzero_tiles();
        while ((row += kRows * step) < p.h_q) {
            load(p, q_token, lane);
            nonzero |= nonzero_tiles();
        }
        nonzero = __reduce_or_sync(0xffffffffu, nonzero);
        if (lane == 0) ptx::st_shared_u32(shared + C::kNonzeroTilesOffset + 4 * warp, nonzero);
    }

   private:
    __device__ __forceinline__ uint32_t nonzero_tiles() const {
        uint32_t nonzero = 0;
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
            uint32_t any = 0;
#pragma unroll
            for (int j = 0; j < kLoads; ++j) any |= words[i][j][0] | words[i][j][1] | words[i][j][2] | words[i][j][3];
            if (is_nonzero(any)) nonzero |= 1u << (row + i * step) / C::kHeads;
        }
        return nonzero;
    }
};

// What the warps of this CTA have found, to every CTA of the cluster, by one warp; counts towards the LSE barrier.
template <class C>
__device__ __forceinline__ void publish_nonzero_tiles(uint32_t shared, int rank, int splits, int lane) {
    const uint32_t of_warp = lane < C::kWarps ? ptx::ld_shared_u32(shared + C::kNonzeroTilesOffset + 4 * lane) : 0;
    const uint32_t nonzero = __reduce_or_sync(0xffffffffu, of_warp);
    const uint32_t at = shared + C::kPeerNonzeroTilesOffset + 4 * rank;
    if (lane == rank) ptx::st_shared_u32(at, nonzero);
    else if (lane < splits) ptx::st_async(ptx::mapa(at, lane), __uint_as_float(nonzero), ptx::mapa(shared + C::kLseBarrierOffset, lane));
}

// Tiles of so many rows, as a bit each.
template <class C>
__device__ __forceinline__ uint32_t tiles_of_rows(int rows) { return (1u << (rows + C::kHeads - 1) / C::kHeads) - 1; }

// The tiles of the token that are all zero, as a bit each, when all splits have told.
template <class C>
__device__ __forceinline__ uint32_t zero_tiles_of_token(const SparseDecodeParams& p, uint32_t shared, int lane) {
    const uint32_t of_split = lane < p.splits ? ptx::ld_shared_u32(shared + C::kPeerNonzeroTilesOffset + 4 * lane) : 0;
    return tiles_of_rows<C>(p.h_q) & ~__reduce_or_sync(0xffffffffu, of_split);
}

}  // namespace flash_mla::sm90::head16
