#include "sm90/decode/sparse/head64/launch.cuh"

namespace flash_mla::sm90::head64 {
template cudaError_t max_splits<V4Record>(int*);
template cudaError_t launch<V4Record>(const SparseDecodeParams&, int64_t, cudaStream_t);
}
