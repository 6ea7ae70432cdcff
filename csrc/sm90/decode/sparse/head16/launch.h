// The kernels of the 16-row head tile, one instantiation per source file in instantiations/.
#pragma once
#include <cuda_runtime.h>

#include "sm90/decode/sparse/params.h"

namespace flash_mla::sm90::head16 {

// Launches one cluster of p.splits CTAs per token and tile of 8 * kHeadGroups heads, on the current device.
template <class Record, int kHeadGroups, int kKeys>
cudaError_t launch(const SparseDecodeParams& p, int64_t tokens, cudaStream_t stream);

}  // namespace flash_mla::sm90::head16
