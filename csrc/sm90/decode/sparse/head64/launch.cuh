#pragma once
#include "sm90/decode/sparse/cluster_launch.cuh"
#include "sm90/decode/sparse/head64/kernel.cuh"
#include "sm90/decode/sparse/head64/launch.h"
#include "sm90/decode/sparse/head64/padded_kernel.cuh"

namespace flash_mla::sm90::head64 {

template <class Record, Rows kRows>
struct Launch {
    using C = Config<Record>;
    static constexpr bool kMayBePadded = kRows == Rows::kMayBePadded;
    static constexpr SparseDecodeKernel kernel() {
        if constexpr (kMayBePadded) return &maybe_padded_kernel<C>;
        else return &sparse_decode_kernel<C>;
    }
    static constexpr int kSharedBytes = kMayBePadded ? C::SmallTile::kSharedBytes : C::kSharedBytes;
};

template <class Record, Rows kRows>
cudaError_t max_splits(int* splits) {
    using L = Launch<Record, kRows>;
    return max_splits_on_device<L::kernel(), L::C::kThreads, L::kSharedBytes>(splits);
}

template <class Record, Rows kRows>
cudaError_t launch(const SparseDecodeParams& p, int64_t tokens, cudaStream_t stream) {
    using L = Launch<Record, kRows>;
    if (L::kMayBePadded && !p.q_aligned16) return cudaErrorMisalignedAddress;
    return launch_clusters(L::kernel(), p, tokens * tiles_of_token(kLargeTile, p.h_q), 1, L::C::kThreads, L::kSharedBytes, stream);
}

}  // namespace flash_mla::sm90::head64
