// Reductions and exchanges among the four lanes of a quad, which share a row of a matrix fragment, and reductions over a warp.
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

// Lane t of the quad gives word j to lane j, in place of whose word t it lies: words and lanes change places.
__device__ __forceinline__ void quad_transpose(uint32_t (&x)[4], int t) {
#pragma unroll
    for (int bit = 1; bit < 4; bit *= 2) {
        const bool upper = t & bit;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if (i & bit) continue;
            const uint32_t other = __shfl_xor_sync(0xffffffffu, upper ? x[i] : x[i + bit], bit);
            if (upper) x[i] = other;
            else x[i + bit] = other;
        }
    }
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
