// Whether a tile of 64 rows looks padded, that is, zero from row 16 on: a sample, which tells rows of numbers from padding and costs next to
// nothing. Who then begins as if it was looks at every element meanwhile (head16/tile.cuh).
#pragma once
#include "sm90/decode/sparse/head16/query.cuh"
#include "sm90/decode/sparse/head64/config.h"

namespace flash_mla::sm90::head64 {

// Of each row behind the first ones of a tile a few chunks of 16 bytes, one for each lane of eight warps. -0 is zero, NaN is not.
template <class C>
struct SampleBehind {
    static constexpr int kFirst = C::SmallTile::kHeads, kWarps = 8, kRowsOfWarp = (C::kHeads - kFirst) / kWarps;
    static constexpr int kChunksApart = C::Record::kDimQK / 8 / 32;
    uint32_t words[4];

    // `q`: the tile's first row.
    __device__ __forceinline__ void load(const SparseDecodeParams& p, const uint16_t* q, int rows, int warp, int lane) {
        const int row = min(kFirst + warp + lane % kRowsOfWarp * kWarps, rows - 1);
        const uint16_t* from = q + static_cast<uint64_t>(row) * p.q_stride_h + lane * kChunksApart * 8;
        load_bf16<4, true>(words, from);
    }
    __device__ __forceinline__ bool has_nonzero(int rows) const {
        return rows > kFirst && head16::is_nonzero(words[0] | words[1] | words[2] | words[3]);
    }
};

}  // namespace flash_mla::sm90::head64
