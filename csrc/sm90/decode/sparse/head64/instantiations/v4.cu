#include "sm90/decode/sparse/head64/launch.cuh"

namespace flash_mla::sm90::head64 {
template cudaError_t max_splits<V4Record, Rows::kAsTheyAre>(int*);
template cudaError_t launch<V4Record, Rows::kAsTheyAre>(const SparseDecodeParams&, int64_t, cudaStream_t);
template cudaError_t max_splits<V4Record, Rows::kMayBePadded>(int*);
template cudaError_t launch<V4Record, Rows::kMayBePadded>(const SparseDecodeParams&, int64_t, cudaStream_t);
}
