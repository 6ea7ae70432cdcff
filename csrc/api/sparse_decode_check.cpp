// Every refusal of sparse_decode_fwd that does not depend on the device, and the choice of the plan.
#include <torch/csrc/stable/library.h>
#include <torch/headeronly/core/ScalarType.h>

#include <algorithm>
#include <cmath>
#include <sstream>
#include <stdexcept>
#include <string>
#include <type_traits>

#include "api/sparse_decode.h"
#include "kv_format.h"
#include "sm90/decode/sparse/params.h"

namespace flash_mla {
namespace {

using torch::headeronly::ScalarType;

// Arguments by the operator's name and, where it differs, that of flash_mla_with_kvcache.
constexpr const char* kQ = "q";
constexpr const char* kKv = "kv (k_cache)";
constexpr const char* kExtraKv = "extra_kv (extra_k_cache)";
constexpr const char* kIndices = "indices";
constexpr const char* kExtraIndices = "extra_indices (extra_indices_in_kvcache)";
constexpr const char* kOut = "out_ (out)";

std::string describe(const Tensor& t) {
    std::ostringstream s;
    s << torch::headeronly::toString(t.scalar_type()) << " [";
    for (int64_t i = 0; i < t.dim(); ++i) s << (i ? ", " : "") << t.size(i);
    s << "] with strides [";
    for (int64_t i = 0; i < t.dim(); ++i) s << (i ? ", " : "") << t.stride(i);
    s << "]";
    return s.str();
}

[[noreturn]] void refuse(const std::string& argument, const std::string& got, const std::string& takes) {
    throw std::runtime_error("flash_mla: " + argument + ": got " + got + "; takes " + takes);
}

// `takes`: a text, or a function that makes one, which only a refusal pays for.
template <class Text>
void require(bool ok, const char* argument, const Tensor& got, const Text& takes) {
    if (ok) return;
    if constexpr (std::is_invocable_v<Text>) refuse(argument, describe(got), takes());
    else refuse(argument, describe(got), takes);
}

void check_device(const Tensor& t, const char* argument, const Tensor& q) {
    const auto a = t.device(), b = q.device();
    if (a.type() != b.type() || a.index() != b.index()) {
        auto name = [](const auto& d) {
            const bool cuda = d.type() == torch::headeronly::DeviceType::CUDA;
            const bool cpu = d.type() == torch::headeronly::DeviceType::CPU;
            const std::string type = cuda ? "cuda" : cpu ? "cpu" : "device type " + std::to_string(static_cast<int>(d.type()));
            return cpu ? type : type + ":" + std::to_string(static_cast<int>(d.index()));
        };
        refuse(argument, "a tensor on " + name(a), "the device of q, " + name(b));
    }
}

// Of every tensor but the caches: the kernels' strides have 32 bits, and an element is read as one access.
void check_strides_and_alignment(const Tensor& t, const char* argument) {
    for (int i = 0; i + 1 < t.dim(); ++i) {
        require(t.size(i) <= 1 || t.stride(i) < (int64_t{1} << 32), argument, t, "strides below 2^32 elements");
    }
    require(reinterpret_cast<uintptr_t>(t.const_data_ptr()) % t.element_size() == 0, argument, t,
            [&] { return "data that starts at a multiple of its element's " + std::to_string(t.element_size()) + " bytes"; });
}

bool is_last_dim_contiguous(const Tensor& t) { return t.size(t.dim() - 1) <= 1 || t.stride(t.dim() - 1) == 1; }

std::string number(int64_t n) { return std::to_string(n); }

// Exclusive. Tokens times splits is the grid's x.
constexpr int64_t kMaxTokens = int64_t{1} << 26, kMaxTopk = int64_t{1} << 30;

void check_q(const SparseDecodeArguments& a) {
    constexpr const char* takes = "bfloat16 [b, s_q, h_q, d_qk] with a contiguous last dim, h_q 1..128, d_qk 512 (V4) or 576 (V3.2)";
    require(a.q.dim() == 4 && a.q.scalar_type() == ScalarType::BFloat16, kQ, a.q, takes);
    require(a.h_q() >= 1 && a.h_q() <= kMaxHeads, kQ, a.q, takes);
    require(a.d_qk() == V4Record::kDimQK || a.d_qk() == V32Record::kDimQK, kQ, a.q, takes);
    require(is_last_dim_contiguous(a.q), kQ, a.q, takes);
    check_strides_and_alignment(a.q, kQ);
    require(a.batch() < kMaxTokens && a.s_q() < kMaxTokens && a.tokens() < kMaxTokens, kQ, a.q, "fewer than 2^26 tokens (b * s_q)");
}

void check_cache(const SparseDecodeArguments& a, const Tensor& kv, const char* argument) {
    check_device(kv, argument, a.q);
    const auto dtype = kv.scalar_type();
    require(kv.dim() == 4, argument, kv, "[num_blocks, page_block_size, 1, bytes per token]");
    require(dtype == ScalarType::Byte || dtype == ScalarType::Char || dtype == ScalarType::Float8_e4m3fn, argument, kv,
            "uint8, int8 or float8_e4m3fn");
    require(kv.size(2) == 1, argument, kv, "[num_blocks, page_block_size, 1, bytes per token]: one KV head");
    const int64_t bytes = kv.size(3), page = kv.size(1);
    const int64_t expected = a.d_qk() == V4Record::kDimQK ? V4Record::kBytesPerToken : V32Record::kBytesPerToken;
    if (bytes != expected) {
        std::string why;
        if (bytes == 528) why = " (528 is the V4.1 record, which has no SM90 kernel here yet)";
        if (bytes == 288) why = " (288 is the V4.1 fp4 record, which has no SM90 kernel here yet)";
        if (bytes == 352) why = " (352 is the NVFP4 record, which FlashMLA reads on SM100 only)";
        refuse(argument, describe(kv) + why, number(expected) + " bytes per token for q's d_qk = " + number(a.d_qk()));
    }
    require(page >= 1 && page <= ((int64_t{1} << 31) - 1) / bytes, argument, kv, "page_block_size from 1 to 2^31 bytes a block");
    require(is_last_dim_contiguous(kv) && (page == 1 || kv.stride(1) == bytes), argument, kv,
            [&] { return "tokens that follow each other without gaps within a block: stride(1) = " + number(bytes) + ", stride(3) = 1"; });
    const int64_t block_bytes = page * bytes;
    require(kv.size(0) <= 1 || (kv.stride(0) >= block_bytes && kv.stride(0) % kRowAlign == 0 && kv.stride(0) / kRowAlign < (int64_t{1} << 32)), argument, kv,
            [&] {
                return "a block stride (stride(0)) that is a multiple of 16 bytes, below 64 GiB and at least a block, " + number(block_bytes) +
                       " bytes" + (expected == V4Record::kBytesPerToken ? " (callers round it up to a multiple of 576)" : "");
            });
    require(reinterpret_cast<uintptr_t>(kv.const_data_ptr()) % kRowAlign == 0, argument, kv, "data that starts at a multiple of 16 bytes");
}

void check_indices(const SparseDecodeArguments& a, const Tensor& indices, const char* argument) {
    check_device(indices, argument, a.q);
    auto takes = [&] {
        return "int32 [" + number(a.batch()) + ", " + number(a.s_q()) + ", topk] (b and s_q of q) with a contiguous last dim";
    };
    require(indices.scalar_type() == ScalarType::Int && indices.dim() == 3, argument, indices, takes);
    require(indices.size(0) == a.batch() && indices.size(1) == a.s_q(), argument, indices, takes);
    require(is_last_dim_contiguous(indices), argument, indices, takes);
    check_strides_and_alignment(indices, argument);
    require(indices.size(2) < kMaxTopk, argument, indices, "topk below 2^30");
}

void check_vector(const SparseDecodeArguments& a, const OptionalTensor& t, const char* argument, ScalarType dtype,
                  const char* dtype_name, int64_t size, const char* size_name) {
    if (!t) return;
    check_device(*t, argument, a.q);
    auto takes = [&] { return std::string(dtype_name) + " [" + number(size) + "] (" + size_name + " of q), contiguous"; };
    require(t->scalar_type() == dtype && t->dim() == 1 && t->size(0) == size, argument, *t, takes);
    require(is_last_dim_contiguous(*t), argument, *t, takes);
    check_strides_and_alignment(*t, argument);
}

// Where a tensor's elements lie, from the first to behind the last.
struct ByteRange {
    uintptr_t begin, end;
    explicit ByteRange(const Tensor& t) {
        int64_t last = 0;
        for (int i = 0; i < t.dim(); ++i) last += t.numel() ? (t.size(i) - 1) * t.stride(i) : 0;
        begin = reinterpret_cast<uintptr_t>(t.const_data_ptr());
        end = begin + (t.numel() ? (last + 1) * t.element_size() : 0);
    }
};

// Whether no two elements share a place: each dim steps over all that the dims of smaller stride cover.
bool is_free_of_overlap(const Tensor& t) {
    std::vector<std::pair<int64_t, int64_t>> dims;   // {stride, size}
    for (int i = 0; i < t.dim(); ++i) {
        if (t.size(i) > 1) dims.emplace_back(t.stride(i), t.size(i));
    }
    std::sort(dims.begin(), dims.end());
    int64_t covered = 1;
    for (const auto& [stride, size] : dims) {
        if (stride < covered) return false;
        covered += stride * (size - 1);
    }
    return true;
}

void check_out(const SparseDecodeArguments& a) {
    if (!a.out) return;
    const Tensor& out = *a.out;
    check_device(out, kOut, a.q);
    auto takes = [&] {
        return "bfloat16 [" + number(a.batch()) + ", " + number(a.s_q()) + ", " + number(a.h_q()) +
               ", 512] with a contiguous last dim and rows that do not overlap";
    };
    require(out.scalar_type() == ScalarType::BFloat16 && out.dim() == 4, kOut, out, takes);
    bool ok = out.size(3) == a.d_v && is_last_dim_contiguous(out) && is_free_of_overlap(out);
    for (int i = 0; i < 3; ++i) ok = ok && out.size(i) == a.q.size(i);
    require(ok, kOut, out, takes);
    check_strides_and_alignment(out, kOut);
    auto check_apart = [&](const Tensor& t, const char* argument) {
        const ByteRange written(out), read(t);
        require(written.end <= read.begin || read.end <= written.begin, kOut, out,
                [&] { return std::string("memory that does not lie between the first and the last element of ") + argument; });
    };
    check_apart(a.q, kQ);
    check_apart(a.kv, kKv);
    check_apart(a.indices, kIndices);
    auto check_apart_if_given = [&](const OptionalTensor& t, const char* argument) {
        if (t) check_apart(*t, argument);
    };
    check_apart_if_given(a.topk_length, "topk_length");
    check_apart_if_given(a.attn_sink, "attn_sink");
    check_apart_if_given(a.extra_kv, kExtraKv);
    check_apart_if_given(a.extra_indices, kExtraIndices);
    check_apart_if_given(a.extra_topk_length, "extra_topk_length");
}

void check_forced_plan(const SparseDecodeArguments& a) {
    if (!a.tile_scheduler_metadata) return;
    const Tensor& t = *a.tile_scheduler_metadata;
    const std::string takes =
        "None, or a forced plan: a contiguous int32 CPU tensor [head_tile = 8, 16 or 64, splits = 1.." + number(kMaxSplits) +
        ", block_keys = 64, or 32 with head_tile 8 or 16]";
    require(t.is_cpu() && t.scalar_type() == ScalarType::Int && t.dim() == 1 && t.size(0) == 3 && is_last_dim_contiguous(t),
            "tile_scheduler_metadata", t, takes);
    const auto* v = static_cast<const int32_t*>(t.const_data_ptr());
    const bool small = v[0] == 8 || v[0] == 16;
    const bool known = ((small || v[0] == 64) && v[2] == 64) || (small && v[2] == 32);
    if (!known || v[1] < 1 || v[1] > kMaxSplits) {
        refuse("tile_scheduler_metadata", "[" + number(v[0]) + ", " + number(v[1]) + ", " + number(v[2]) + "]", takes);
    }
    if (a.enable_batch_invariant && v[1] != 1) {
        refuse("tile_scheduler_metadata", number(v[1]) + " splits", "1 split when enable_batch_invariant is set");
    }
}

}  // namespace

RecordKind check_arguments(const SparseDecodeArguments& a) {
    check_q(a);
    if (a.d_v != V4Record::kDimV) refuse("d_v (head_dim_v)", number(a.d_v), "512");
    if (!std::isfinite(a.scale_log2())) {
        refuse("sm_scale (softmax_scale)", std::to_string(a.sm_scale), "a number that is finite in float32, times log2(e) too");
    }
    check_cache(a, a.kv, kKv);
    check_indices(a, a.indices, kIndices);
    check_vector(a, a.topk_length, "topk_length", ScalarType::Int, "int32", a.batch(), "b");
    check_vector(a, a.attn_sink, "attn_sink", ScalarType::Float, "float32", a.h_q(), "h_q");
    if (a.extra_kv.has_value() != a.extra_indices.has_value()) {
        refuse(a.extra_kv ? kExtraIndices : kExtraKv, "None", std::string("a tensor when ") + (a.extra_kv ? kExtraKv : kExtraIndices) + " is given");
    }
    if (a.extra_kv) {
        check_cache(a, *a.extra_kv, kExtraKv);
        check_indices(a, *a.extra_indices, kExtraIndices);
    } else if (a.extra_topk_length) {
        refuse("extra_topk_length", "a tensor", std::string("None when ") + kExtraKv + " is None");
    }
    check_vector(a, a.extra_topk_length, "extra_topk_length", ScalarType::Int, "int32", a.batch(), "b");
    check_out(a);
    check_forced_plan(a);
    if (a.num_splits) refuse("num_splits", "a tensor", "None: splits are part of tile_scheduler_metadata's forced plan");
    return a.d_qk() == V4Record::kDimQK ? RecordKind::kV4 : RecordKind::kV32;
}

Plan choose_plan(const SparseDecodeArguments& a, int num_sms) {
    if (a.tile_scheduler_metadata) {
        const auto* v = static_cast<const int32_t*>(a.tile_scheduler_metadata->const_data_ptr());
        return {v[0], v[1], v[2]};
    }
    const int heads = static_cast<int>(a.h_q());
    return a.enable_batch_invariant ? batch_invariant_plan(heads) : make_plan(a.tokens(), a.width(), heads, num_sms);
}

void sparse_decode_check(Tensor q, Tensor kv, Tensor indices, OptionalTensor topk_length, OptionalTensor attn_sink,
                         OptionalTensor tile_scheduler_metadata, OptionalTensor num_splits, OptionalTensor extra_kv,
                         OptionalTensor extra_indices, OptionalTensor extra_topk_length, int64_t d_v, double sm_scale,
                         OptionalTensor out, bool enable_batch_invariant) {
    check_arguments({q, kv, indices, topk_length, attn_sink, tile_scheduler_metadata, num_splits, extra_kv, extra_indices,
                     extra_topk_length, out, d_v, sm_scale, enable_batch_invariant});
}

std::vector<int64_t> sparse_decode_plan(int64_t tokens, int64_t width, int64_t heads, int64_t num_sms,
                                        bool enable_batch_invariant) {
    constexpr int64_t kMaxWidth = 2 * kMaxTopk;   // both caches'
    if (tokens < 0 || tokens >= kMaxTokens) refuse("tokens", number(tokens), "0.." + number(kMaxTokens - 1));
    if (width < 0 || width >= kMaxWidth) refuse("width", number(width), "0.." + number(kMaxWidth - 1));
    if (heads < 1 || heads > kMaxHeads) refuse("heads", number(heads), "1..128");
    if (num_sms < 1 || num_sms > 4096) refuse("num_sms", number(num_sms), "1..4096");
    const Plan p = enable_batch_invariant ? batch_invariant_plan(static_cast<int>(heads))
                                          : make_plan(tokens, width, static_cast<int>(heads), static_cast<int>(num_sms));
    return {p.head_tile, p.splits, p.block_keys};
}

}  // namespace flash_mla
