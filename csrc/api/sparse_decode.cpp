// sparse_decode_fwd on CUDA: arguments -> parameters -> plan -> launch. Empty in a library without kernels.
#ifdef FLASH_MLA_WITH_KERNELS
#include "api/sparse_decode.h"

#include <cuda_runtime.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/headeronly/core/ScalarType.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <stdexcept>
#include <string>

#include "kv_format.h"
#include "sm90/decode/sparse/head16/launch.h"
#include "sm90/decode/sparse/head64/launch.h"

// It lives in libtorch_cuda, which a CPU-only torch lacks: weak, so that the library loads there too.
extern "C" __attribute__((weak)) AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device_index, void** stream);

namespace flash_mla {
namespace {

void check_cuda(cudaError_t error, const char* what) {
    if (error == cudaSuccess) return;
    cudaGetLastError();   // a launch error must not surface at someone else's call
    throw std::runtime_error(std::string("flash_mla: ") + what + ": " + cudaGetErrorString(error));
}

// SM count of a device that these kernels run on. Asked once per device.
int sm_count(int device) {
    static std::array<std::atomic<int>, 64> cache;
    const bool cached = device < static_cast<int>(cache.size());
    if (cached) {
        if (const int n = cache[device].load(std::memory_order_relaxed)) return n;
    }
    int major = 0, minor = 0, n = 0;
    check_cuda(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device), "cudaDeviceGetAttribute");
    check_cuda(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device), "cudaDeviceGetAttribute");
    check_cuda(cudaDeviceGetAttribute(&n, cudaDevAttrMultiProcessorCount, device), "cudaDeviceGetAttribute");
    if (major != 9 || minor != 0) {
        throw std::runtime_error("flash_mla: q: got a tensor on a GPU of compute capability " + std::to_string(major) + "." +
                                 std::to_string(minor) + "; takes SM90 (H100, H200, H20), 9.0");
    }
    if (cached) cache[device].store(n, std::memory_order_relaxed);
    return n;
}

// A stride that is never used may be anything; check_arguments has seen to the others.
uint32_t stride32(const Tensor& t, int dim) { return t.size(dim) <= 1 ? 0 : static_cast<uint32_t>(t.stride(dim)); }

KeySource key_source(const Tensor& kv, const Tensor& indices, const OptionalTensor& lengths) {
    KeySource s;
    const int64_t page = kv.size(1);
    s.indices = static_cast<const int32_t*>(indices.const_data_ptr());
    s.indices_stride_b = stride32(indices, 0);
    s.indices_stride_s = stride32(indices, 1);
    s.lengths = lengths ? static_cast<const int32_t*>(lengths->const_data_ptr()) : nullptr;
    if (kv.size(0) == 0 || indices.size(2) == 0) return s;   // empty
    s.blocks = static_cast<const uint8_t*>(kv.const_data_ptr());
    s.block_stride16 = kv.size(0) == 1 ? 0 : static_cast<uint32_t>(kv.stride(0) / 16);
    s.page = make_fast_divisor(static_cast<uint32_t>(page));
    s.num_slots = static_cast<uint32_t>(std::min<int64_t>(kv.size(0) * page, int64_t{1} << 31));
    s.width = static_cast<int32_t>(indices.size(2));
    s.groups = (s.width + kKeysPerGroup - 1) / kKeysPerGroup;
    return s;
}

// Whether every row (last dim) starts at a multiple of `bytes`, for 2-byte elements.
bool rows_are_aligned(const Tensor& t, int64_t bytes) {
    bool ok = reinterpret_cast<uintptr_t>(t.const_data_ptr()) % bytes == 0;
    for (int i = 0; i + 1 < t.dim(); ++i) ok = ok && (t.size(i) <= 1 || t.stride(i) * 2 % bytes == 0);
    return ok;
}

SparseDecodeParams make_params(const SparseDecodeArguments& a, const Plan& plan, bool q_aligned16, const Tensor& out, const Tensor& lse) {
    SparseDecodeParams p;
    p.q = static_cast<const uint16_t*>(a.q.const_data_ptr());
    p.q_stride_b = stride32(a.q, 0), p.q_stride_s = stride32(a.q, 1), p.q_stride_h = stride32(a.q, 2);
    p.q_aligned16 = q_aligned16;
    p.out = static_cast<uint16_t*>(out.mutable_data_ptr());
    p.out_stride_b = stride32(out, 0), p.out_stride_s = stride32(out, 1), p.out_stride_h = stride32(out, 2);
    p.out_aligned4 = rows_are_aligned(out, 4);
    p.out_aligned16 = rows_are_aligned(out, 16);
    p.lse = static_cast<float*>(lse.mutable_data_ptr());
    p.attn_sink = a.attn_sink ? static_cast<const float*>(a.attn_sink->const_data_ptr()) : nullptr;
    p.source[0] = key_source(a.kv, a.indices, a.topk_length);
    if (a.extra_kv) p.source[1] = key_source(*a.extra_kv, *a.extra_indices, a.extra_topk_length);
    for (int i : {0, 1}) {   // an empty source borrows the other's first record: see KeySource
        if (!p.source[i].blocks) p.source[i].blocks = p.source[1 - i].blocks;
    }
    p.s_q = make_fast_divisor(static_cast<uint32_t>(a.s_q()));
    p.h_q = static_cast<int32_t>(a.h_q());
    p.splits = plan.splits;
    p.splits_magic = (1u << 16) / plan.splits + 1;
    p.groups_per_split = (p.source[0].groups + p.source[1].groups + plan.splits - 1) / plan.splits;
    p.scale_log2 = a.scale_log2();
    return p;
}

struct Kernel {
    decltype(&sm90::head16::max_splits<V4Record, 1, 32>) max_splits;
    decltype(&sm90::head16::launch<V4Record, 1, 32>) launch;
};

template <class Record, int kHeadGroups>
Kernel small_tile_kernel(int block_keys) {
    using namespace sm90::head16;
    if (block_keys == 64) return {max_splits<Record, kHeadGroups, 64>, launch<Record, kHeadGroups, 64>};
    return {max_splits<Record, kHeadGroups, 32>, launch<Record, kHeadGroups, 32>};
}

template <class Record>
Kernel choose_kernel(const Plan& plan, int64_t heads, bool q_aligned16) {
    using namespace sm90::head64;
    if (plan.head_tile == 8) return small_tile_kernel<Record, 1>(plan.block_keys);
    if (plan.head_tile == 16) return small_tile_kernel<Record, 2>(plan.block_keys);
    if (may_be_padded(heads) && q_aligned16) return {max_splits<Record, Rows::kMayBePadded>, launch<Record, Rows::kMayBePadded>};
    return {max_splits<Record, Rows::kAsTheyAre>, launch<Record, Rows::kAsTheyAre>};
}

Kernel choose_kernel(RecordKind record, const Plan& plan, int64_t heads, bool q_aligned16) {
    return record == RecordKind::kV4 ? choose_kernel<V4Record>(plan, heads, q_aligned16) : choose_kernel<V32Record>(plan, heads, q_aligned16);
}

// The plan knows the SM count only; a GPU may have no place for a cluster that large.
void fit_plan(const SparseDecodeArguments& a, Plan& plan, const Kernel& kernel) {
    int fits = 0;
    check_cuda(kernel.max_splits(&fits), "setting up sparse_decode");
    if (plan.splits <= fits) return;
    if (a.tile_scheduler_metadata) {
        throw std::runtime_error("flash_mla: tile_scheduler_metadata: got a forced plan of " + std::to_string(plan.splits) +
                                 " splits; takes at most " + std::to_string(fits) + " on this GPU");
    }
    plan.splits = fits;
}

}  // namespace

SparseDecodeResult sparse_decode_fwd(Tensor q, Tensor kv, Tensor indices, OptionalTensor topk_length,
                                     OptionalTensor attn_sink, OptionalTensor tile_scheduler_metadata,
                                     OptionalTensor num_splits, OptionalTensor extra_kv, OptionalTensor extra_indices,
                                     OptionalTensor extra_topk_length, int64_t d_v, double sm_scale,
                                     OptionalTensor out_, bool enable_batch_invariant) {
    const SparseDecodeArguments a{q,          kv,       indices,       topk_length,       attn_sink, tile_scheduler_metadata,
                                  num_splits, extra_kv, extra_indices, extra_topk_length, out_,      d_v,
                                  sm_scale,   enable_batch_invariant};
    const RecordKind record = check_arguments(a);
    const int device = q.get_device_index();
    const torch::stable::accelerator::DeviceGuard guard(device);
    const int num_sms = sm_count(device);

    Tensor out = out_ ? *out_ : torch::stable::new_empty(q, {a.batch(), a.s_q(), a.h_q(), d_v});
    Tensor lse = torch::stable::new_empty(q, {a.batch(), a.h_q(), a.s_q()}, torch::headeronly::ScalarType::Float);
    if (a.tokens() > 0) {
        Plan plan = choose_plan(a, num_sms);
        const bool q_aligned16 = rows_are_aligned(a.q, 16);
        const Kernel kernel = choose_kernel(record, plan, a.h_q(), q_aligned16);
        fit_plan(a, plan, kernel);
        const SparseDecodeParams p = make_params(a, plan, q_aligned16, out, lse);
        void* stream = nullptr;
        if (!aoti_torch_get_current_cuda_stream || aoti_torch_get_current_cuda_stream(device, &stream)) {
            throw std::runtime_error("flash_mla: q: got a CUDA tensor, but this torch has no CUDA stream to offer");
        }
        check_cuda(kernel.launch(p, a.tokens(), static_cast<cudaStream_t>(stream)), "launch of sparse_decode");
    }
    return {out, lse, tile_scheduler_metadata, num_splits};
}

}  // namespace flash_mla

#endif  // FLASH_MLA_WITH_KERNELS
