// sparse_decode_fwd: arguments, their checks, and what the operators do with them.
#pragma once
#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <tuple>
#include <vector>

#include "plan.h"

namespace flash_mla {

using torch::stable::Tensor;
using OptionalTensor = std::optional<Tensor>;

enum class RecordKind { kV4, kV32 };

struct SparseDecodeArguments {
    Tensor q, kv, indices;
    OptionalTensor topk_length, attn_sink, tile_scheduler_metadata, num_splits, extra_kv, extra_indices, extra_topk_length, out;
    int64_t d_v;
    double sm_scale;
    bool enable_batch_invariant;

    int64_t batch() const { return q.size(0); }
    int64_t s_q() const { return q.size(1); }
    int64_t h_q() const { return q.size(2); }
    int64_t d_qk() const { return q.size(3); }
    int64_t tokens() const { return batch() * s_q(); }
    float scale_log2() const { return static_cast<float>(sm_scale * 1.4426950408889634); }   // scores are kept in powers of two
    int64_t width() const { return indices.size(2) + (extra_indices ? extra_indices->size(2) : 0); }
};

// Throws std::runtime_error (RuntimeError in Python) that names the argument, what it got and what it takes.
// Returns the record that q and kv name.
RecordKind check_arguments(const SparseDecodeArguments& a);

// The plan: forced by tile_scheduler_metadata, otherwise plan.h's.
Plan choose_plan(const SparseDecodeArguments& a, int num_sms);

using SparseDecodeResult = std::tuple<Tensor, Tensor, OptionalTensor, OptionalTensor>;

// The CUDA implementation of sparse_decode_fwd.
SparseDecodeResult sparse_decode_fwd(Tensor q, Tensor kv, Tensor indices, OptionalTensor topk_length,
                                     OptionalTensor attn_sink, OptionalTensor tile_scheduler_metadata,
                                     OptionalTensor num_splits, OptionalTensor extra_kv, OptionalTensor extra_indices,
                                     OptionalTensor extra_topk_length, int64_t d_v, double sm_scale,
                                     OptionalTensor out, bool enable_batch_invariant);

void sparse_decode_check(Tensor q, Tensor kv, Tensor indices, OptionalTensor topk_length, OptionalTensor attn_sink,
                         OptionalTensor tile_scheduler_metadata, OptionalTensor num_splits, OptionalTensor extra_kv,
                         OptionalTensor extra_indices, OptionalTensor extra_topk_length, int64_t d_v, double sm_scale,
                         OptionalTensor out, bool enable_batch_invariant);

std::vector<int64_t> sparse_decode_plan(int64_t tokens, int64_t width, int64_t heads, int64_t num_sms, bool enable_batch_invariant);

}  // namespace flash_mla
