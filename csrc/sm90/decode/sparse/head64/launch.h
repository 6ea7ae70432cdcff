// The kernels of the 64-row head tile, one instantiation per source file in instantiations/.
#pragma once
#include <cuda_runtime.h>

#include "sm90/decode/sparse/params.h"

namespace flash_mla::sm90::head64 {

// The largest numbers of splits (CTAs of a cluster) up to kMaxSplits that fit the current device at all.
template <class Record>
cudaError_t max_splits(MaxSplits* splits);

// Launches one cluster of p.splits CTAs per token and tile of 64 heads, on the current device, which max_splits has been
// asked about before. CTAs are always alone on their SM.
template <class Record>
cudaError_t launch(const SparseDecodeParams& p, int64_t tokens, bool alone, cudaStream_t stream);

}  // namespace flash_mla::sm90::head64
