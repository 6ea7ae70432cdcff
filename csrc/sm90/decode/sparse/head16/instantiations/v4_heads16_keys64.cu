#include "sm90/decode/sparse/head16/launch.cuh"

namespace flash_mla::sm90::head16 {
template cudaError_t max_splits<V4Record, 2, 64, false>(int*);
template cudaError_t launch<V4Record, 2, 64, false>(const SparseDecodeParams&, int64_t, cudaStream_t);
template cudaError_t max_splits<V4Record, 2, 64, true>(int*);
template cudaError_t launch<V4Record, 2, 64, true>(const SparseDecodeParams&, int64_t, cudaStream_t);
}
