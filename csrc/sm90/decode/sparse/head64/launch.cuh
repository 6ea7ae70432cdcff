#pragma once
#include <algorithm>
#include <atomic>

#include "sm90/decode/sparse/head64/kernel.cuh"
#include "sm90/decode/sparse/head64/launch.h"

namespace flash_mla::sm90::head64 {

// Function attributes belong to a device, so they are set, and what fits is asked, once for each; twice in a race is harmless.
template <class Record>
cudaError_t max_splits(int* splits) {
    using C = Config<Record>;
    constexpr int kMaxDevices = 64;
    static std::atomic<int> known[kMaxDevices];
    int device = 0;
    if (cudaError_t e = cudaGetDevice(&device)) return e;
    if (device < kMaxDevices && (*splits = known[device].load(std::memory_order_acquire))) return cudaSuccess;
    const void* kernel = reinterpret_cast<const void*>(&sparse_decode_kernel<C>);
    if (cudaError_t e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, C::kSharedBytes)) return e;
    if (cudaError_t e = cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1)) return e;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(kMaxSplits, 1, 1);
    config.blockDim = dim3(C::kThreads, 1, 1);
    config.dynamicSmemBytes = C::kSharedBytes;
    if (cudaError_t e = cudaOccupancyMaxPotentialClusterSize(splits, kernel, &config)) return e;
    *splits = std::clamp(*splits, 1, kMaxSplits);
    if (device < kMaxDevices) known[device].store(*splits, std::memory_order_release);
    return cudaSuccess;
}

template <class Record>
cudaError_t launch(const SparseDecodeParams& p, int64_t tokens, cudaStream_t stream) {
    using C = Config<Record>;
    cudaLaunchAttribute attributes[2];
    attributes[0].id = cudaLaunchAttributeClusterDimension;
    attributes[0].val.clusterDim = {static_cast<unsigned>(p.splits), 1, 1};
    // Programmatic dependent launch: the CTAs take their places while the kernel before drains.
    attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[1].val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(static_cast<unsigned>(tokens * ((p.h_q + C::kHeads - 1) / C::kHeads) * p.splits), 1, 1);
    config.blockDim = dim3(C::kThreads, 1, 1);
    config.dynamicSmemBytes = C::kSharedBytes;
    config.stream = stream;
    config.attrs = attributes;
    config.numAttrs = 2;
    return cudaLaunchKernelEx(&config, sparse_decode_kernel<C>, p);
}

}  // namespace flash_mla::sm90::head64
