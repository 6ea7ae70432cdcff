#include "sm90/decode/sparse/head16/launch.cuh"

namespace flash_mla::sm90::head16 {
template cudaError_t max_splits<V4Record, 1, 32>(int*);
template cudaError_t launch<V4Record, 1, 32>(const SparseDecodeParams&, int64_t, cudaStream_t);
}
