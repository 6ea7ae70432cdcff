// Reductions over the four lanes of a quad, which share a row of a matrix fragment, and over a warp.
#pragma once
#include <cstdint>

namespace flash_mla::ptx {

__device__ __forceinline__ float quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
    return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}
__device__ __forceinline__ float quad_sum(float x) {
    x += __shfl_xor_sync(0xffffffffu, x, 1);
    return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

// Of numbers: as integers, which order like floats if negative ones have their lower bits inverted.
__device__ __forceinline__ float warp_max(float x) {
    const int bits = __float_as_int(x), ordered = bits ^ (bits >> 31 & 0x7fffffff);
    const int largest = __reduce_max_sync(0xffffffffu, ordered);
    return __int_as_float(largest ^ (largest >> 31 & 0x7fffffff));
}
__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
    for (int lanes = 16; lanes > 0; lanes /= 2) x += __shfl_xor_sync(0xffffffffu, x, lanes);
    return x;
}

}  // namespace flash_mla::ptx
