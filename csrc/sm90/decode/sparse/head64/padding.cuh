// Whether a tile of 64 rows looks padded, that is, zero from row 16 on: a sample, which tells rows of numbers from padding and costs
// next to nothing. Who then begins as if it was looks at every element meanwhile (head16/tile.cuh).
#pragma once
#include "ptx/warpgroup.cuh"
#include "sm90/decode/sparse/head16/query.cuh"
#include "sm90/decode/sparse/head64/config.h"

namespace flash_mla::sm90::head64 {

// Of each row behind the first ones of a tile a chunk of 16 bytes or two. Every warp looks at the same ones, so all decide alike and none
// waits for another. -0 is zero, NaN is not.
template <class C>
struct SampleBehind {
    static constexpr int kFirst = C::SmallTile::kHeads, kRows = C::kHeads - kFirst, kLoads = (kRows + 31) / 32;
    static constexpr int kChunksApart = C::Record::kDimQK / 8 / 32;
    uint32_t words[kLoads][4];

    // `q`: the tile's first row.
    __device__ __forceinline__ void load(const SparseDecodeParams& p, const uint16_t* q, int rows, int lane) {
#pragma unroll
        for (int i = 0; i < kLoads; ++i) {
            const int row = min(kFirst + (32 * i + lane) % kRows, rows - 1);
            load_bf16<4, true>(words[i], q + static_cast<uint64_t>(row) * p.q_stride_h + lane * kChunksApart * 8);
        }
    }
    __device__ __forceinline__ bool has_nonzero(int rows) const {
        uint32_t any = 0;
#pragma unroll
        for (int i = 0; i < kLoads; ++i) any |= words[i][0] | words[i][1] | words[i][2] | words[i][3];
        return rows > kFirst && ptx::uniform(__any_sync(0xffffffffu, head16::is_nonzero(any)));
    }
};

}  // namespace flash_mla::sm90::head64
