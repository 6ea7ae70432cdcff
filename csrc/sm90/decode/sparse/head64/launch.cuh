#pragma once
#include "sm90/decode/sparse/cluster_launch.cuh"
#include "sm90/decode/sparse/head64/kernel.cuh"
#include "sm90/decode/sparse/head64/launch.h"

namespace flash_mla::sm90::head64 {

template <class Record>
cudaError_t max_splits(int* splits) {
    using C = Config<Record>;
    return max_splits_on_device<&sparse_decode_kernel<C>, C::kThreads, C::SmallTile::kSharedBytes>(splits);
}

template <class Record>
cudaError_t launch(const SparseDecodeParams& p, int64_t tokens, cudaStream_t stream) {
    using C = Config<Record>;
    return launch_clusters(&sparse_decode_kernel<C>, p, tokens * tiles_of_token(C::kHeads, p.h_q), 1, C::kThreads, C::SmallTile::kSharedBytes, stream);
}

}  // namespace flash_mla::sm90::head64
