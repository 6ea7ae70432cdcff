#pragma once
#include "sm90/decode/sparse/cluster_launch.cuh"
#include "sm90/decode/sparse/head16/kernel.cuh"
#include "sm90/decode/sparse/head16/launch.h"

namespace flash_mla::sm90::head16 {

template <class Record, int kHeadGroups, int kKeys>
cudaError_t max_splits(int* splits) {
    using C = Config<Record, kHeadGroups, kKeys, false>;
    return max_splits_on_device<&sparse_decode_kernel<C>, C::kThreads, C::kSharedBytes>(splits);
}

template <class Record, int kHeadGroups, int kKeys>
cudaError_t launch(const SparseDecodeParams& p, int64_t tokens, cudaStream_t stream) {
    using C = Config<Record, kHeadGroups, kKeys, false>;
    const int tiles = static_cast<int>(tiles_of_token(C::kHeads, p.h_q));
    return launch_clusters(&sparse_decode_kernel<C>, p, tokens, tiles, C::kThreads, C::kSharedBytes, stream);
}

}  // namespace flash_mla::sm90::head16
