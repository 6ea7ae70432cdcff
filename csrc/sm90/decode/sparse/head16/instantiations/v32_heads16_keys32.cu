#include "sm90/decode/sparse/head16/launch.cuh"

namespace flash_mla::sm90::head16 {
template cudaError_t max_splits<V32Record, 2, 32>(int*);
template cudaError_t launch<V32Record, 2, 32>(const SparseDecodeParams&, int64_t, cudaStream_t);
}
