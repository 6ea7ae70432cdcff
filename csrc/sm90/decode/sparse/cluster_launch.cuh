// How a sparse decode kernel is launched: in clusters of p.splits CTAs, on the current device.
#pragma once
#include <cuda_runtime.h>

#include <algorithm>
#include <atomic>

#include "plan.h"
#include "sm90/decode/sparse/params.h"

namespace flash_mla::sm90 {

using SparseDecodeKernel = void (*)(SparseDecodeParams);

// The largest number of splits (CTAs of a cluster) up to kMaxSplits that fits the current device at all; and what the kernel needs
// to be launched there. Function attributes belong to a device, so they are set, and what fits is asked, once for each; twice in
// a race is harmless.
template <SparseDecodeKernel kKernel, int kThreads, int kSharedBytes>
cudaError_t max_splits_on_device(int* splits) {
    constexpr int kMaxDevices = 64;
    static std::atomic<int> known[kMaxDevices];   // 0 if not known
    int device = 0;
    if (cudaError_t e = cudaGetDevice(&device)) return e;
    *splits = device < kMaxDevices ? known[device].load(std::memory_order_acquire) : 0;
    if (*splits != 0) return cudaSuccess;
    const void* kernel = reinterpret_cast<const void*>(kKernel);
    if (cudaError_t e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes)) return e;
    if (cudaError_t e = cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1)) return e;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(kMaxSplits, 1, 1);
    config.blockDim = dim3(kThreads, 1, 1);
    config.dynamicSmemBytes = kSharedBytes;
    int fits = 0;
    if (cudaError_t e = cudaOccupancyMaxPotentialClusterSize(&fits, kernel, &config)) return e;
    *splits = std::clamp(fits, 1, kMaxSplits);
    if (device < kMaxDevices) known[device].store(*splits, std::memory_order_release);
    return cudaSuccess;
}

// `clusters` along x, times `y`.
inline cudaError_t launch_clusters(SparseDecodeKernel kernel, const SparseDecodeParams& p, int64_t clusters, int y, int threads,
                                   int shared_bytes, cudaStream_t stream) {
    cudaLaunchAttribute attributes[2];
    attributes[0].id = cudaLaunchAttributeClusterDimension;
    attributes[0].val.clusterDim = {static_cast<unsigned>(p.splits), 1, 1};
    // Programmatic dependent launch: the CTAs take their places while the kernel before drains.
    attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[1].val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(static_cast<unsigned>(clusters * p.splits), y, 1);
    config.blockDim = dim3(threads, 1, 1);
    config.dynamicSmemBytes = shared_bytes;
    config.stream = stream;
    config.attrs = attributes;
    config.numAttrs = 2;
    return cudaLaunchKernelEx(&config, kernel, p);
}

}  // namespace flash_mla::sm90
