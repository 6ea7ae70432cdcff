#include "api/missing.h"

#include <torch/csrc/stable/library.h>

#include <stdexcept>

#include "api/namespace.h"

namespace flash_mla {
namespace {

struct MissingOperator {
    const char* name;
    const char* what;
    bool only_on_sm100;    // FlashMLA has it for SM100 and nothing else
    bool only_for_vllm;    // not an operator of the package's library
};

constexpr MissingOperator kMissing[] = {
    {"dense_decode_fwd", "dense decode", false, false},
    {"sparse_prefill_fwd", "sparse prefill", false, false},
    {"dense_prefill_fwd", "dense prefill", true, true},
    {"fused_norm_rope_attn_rope_cast_fwd", "sparse prefill fused with norm, RoPE and FP8 cast", true, true},
    {"fused_norm_rope_attn_rope_cast_decode", "sparse decode fused with norm, RoPE and FP8 cast", true, true},
    {"permute_q_b_proj", "the weight permutation for the fused operators' query projection", true, true},
    {"permute_wv_proj", "the weight permutation for the fused operators' value projection", true, true},
};

}  // namespace

std::vector<std::string> missing_operators() {
    std::vector<std::string> names_and_messages;
    for (const MissingOperator& op : kMissing) {
        if (op.only_for_vllm && !kForVllm) continue;
        names_and_messages.emplace_back(op.name);
        names_and_messages.push_back(std::string(op.name) + ": " + op.what +
                                     " is not implemented in flash_mla for Hopper; DeepSeek's FlashMLA has it" +
                                     (op.only_on_sm100 ? ", for SM100 only" : "") +
                                     " (https://github.com/deepseek-ai/FlashMLA)");
    }
    return names_and_messages;
}

SparseDecodeResult sparse_decode_without_kernel(Tensor q, Tensor kv, Tensor indices, OptionalTensor topk_length,
                                                OptionalTensor attn_sink, OptionalTensor tile_scheduler_metadata,
                                                OptionalTensor num_splits, OptionalTensor extra_kv, OptionalTensor extra_indices,
                                                OptionalTensor extra_topk_length, int64_t d_v, double sm_scale,
                                                OptionalTensor out, bool enable_batch_invariant) {
    check_arguments({q, kv, indices, topk_length, attn_sink, tile_scheduler_metadata, num_splits, extra_kv, extra_indices,
                     extra_topk_length, out, d_v, sm_scale, enable_batch_invariant});
    if (q.is_cpu()) {
        throw std::runtime_error("flash_mla: q: got a tensor on the CPU; takes one on an SM90 GPU (H100, H200, H20)");
    }
    throw std::runtime_error(
        "flash_mla: q: got a tensor on a GPU, but this library was built without GPU kernels, because its build found "
        "no nvcc; takes a build with CUDA 12.3 or later installed");
}

}  // namespace flash_mla
