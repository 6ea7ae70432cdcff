// The kernels of the 64-row head tile, a record per source file in instantiations/.
#pragma once
#include <cuda_runtime.h>

#include "sm90/decode/sparse/params.h"

namespace flash_mla::sm90::head64 {

// How rows of q are taken.
enum class Rows {
    kAsTheyAre,
    kMayBePadded    // looked at, whether those from 16 on are zero (padded_kernel.cuh); up to 64, aligned to 16 bytes
};

// The largest number of splits up to kMaxSplits that fits the current device at all.
template <class Record, Rows kRows>
cudaError_t max_splits(int* splits);

// Launches a cluster of p.splits CTAs per token and tile of 64 heads on the current device, which
// max_splits has been asked about before.
template <class Record, Rows kRows>
cudaError_t launch(const SparseDecodeParams& p, int64_t tokens, cudaStream_t stream);

}  // namespace flash_mla::sm90::head64
