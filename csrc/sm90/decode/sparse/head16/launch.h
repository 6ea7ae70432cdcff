// The kernels of the head tiles of 8 and 16 rows, one instantiation per source file in instantiations/.
#pragma once
#include <cuda_runtime.h>

#include "sm90/decode/sparse/params.h"

namespace flash_mla::sm90::head16 {

// The largest number of splits (CTAs of a cluster) up to kMaxSplits that fits the current device at all.
template <class Record, int kHeadGroups, int kKeys>
cudaError_t max_splits(int* splits);

// Launches one cluster of p.splits CTAs per token and tile of 8 * kHeadGroups heads on the current device, which max_splits has been
// asked about before.
template <class Record, int kHeadGroups, int kKeys>
cudaError_t launch(const SparseDecodeParams& p, int64_t tokens, cudaStream_t stream);

}  // namespace flash_mla::sm90::head16
