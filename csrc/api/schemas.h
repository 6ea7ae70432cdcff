// The operators' schemas, once for every library that is built from these sources.
// The first three, and those under kOnlyForVllm, are FlashMLA's own; callers of its library find them unchanged.
#pragma once

#define FLASH_MLA_SPARSE_DECODE_ARGUMENTS                                                                          \
    "Tensor q, Tensor kv, Tensor indices, Tensor? topk_length, Tensor? attn_sink, "                                \
    "Tensor(a)? tile_scheduler_metadata, Tensor(b)? num_splits, Tensor? extra_kv, Tensor? extra_indices, "         \
    "Tensor? extra_topk_length, int d_v, float sm_scale, Tensor(c!)? out_=None, bool enable_batch_invariant=False"

// What the two fused operators share: how q is normed and rotated, and how the output is projected and cast.
#define FLASH_MLA_FUSED_ARGUMENTS                                                                                  \
    "bool enable_q_norm, float rms_norm_eps, Tensor token_positions, bool is_rope_neox_style, int rope_dim, "      \
    "Tensor cos_sin_cache, int n_wv_group, int num_per_channels, bool use_tma_aligned_col_major_sf, "              \
    "bool round_sf, bool use_packed_ue8m0, Tensor(d!)? out_fp8=None, Tensor(e!)? out_sf=None"

namespace flash_mla::schemas {

inline constexpr const char* kSparseDecodeFwd =
    "sparse_decode_fwd(" FLASH_MLA_SPARSE_DECODE_ARGUMENTS ") -> (Tensor(c!), Tensor, Tensor(a)?, Tensor(b)?)";

inline constexpr const char* kDenseDecodeFwd =
    "dense_decode_fwd(Tensor q, Tensor kcache, int head_size_v, Tensor seqlens_k, Tensor block_table, "
    "float softmax_scale, bool is_causal, Tensor(a)? tile_scheduler_metadata, Tensor(b)? num_splits, "
    "Tensor(c!)? out_) -> (Tensor(c!), Tensor, Tensor(a)?, Tensor(b)?)";

inline constexpr const char* kSparsePrefillFwd =
    "sparse_prefill_fwd(Tensor q, Tensor kv, Tensor indices, float sm_scale, int d_v, Tensor? attn_sink, "
    "Tensor? topk_length, Tensor(a!)? out_) -> Tensor[]";

// [head_tile, splits, block_keys] for tokens = b * s_q and width = topk + extra topk.
inline constexpr const char* kSparseDecodePlan =
    "sparse_decode_plan(int tokens, int width, int heads, int num_sms, bool enable_batch_invariant=False) -> int[]";

// Refuses what no implementation of sparse_decode_fwd takes, on whatever device.
inline constexpr const char* kSparseDecodeCheck = "sparse_decode_check(" FLASH_MLA_SPARSE_DECODE_ARGUMENTS ") -> ()";

// Name and message of each operator that is only here to be refused (missing.h).
inline constexpr const char* kMissingOperators = "missing_operators() -> str[]";

// The rest of FlashMLA's library as vLLM 0.33.0 builds it.
inline constexpr const char* kOnlyForVllm[] = {
    "dense_prefill_fwd(Tensor workspace_buffer, Tensor q, Tensor k, Tensor v, Tensor cumulative_seqlen_q, "
    "Tensor cumulative_seqlen_kv, Tensor(a!) o, Tensor(b!) lse, int mask_mode_code, float softmax_scale, "
    "int max_seqlen_q, int max_seqlen_kv, bool is_varlen) -> ()",

    "fused_norm_rope_attn_rope_cast_fwd(Tensor q, Tensor kv, Tensor indices, float sm_scale, int d_v, "
    "Tensor? attn_sink, Tensor? topk_length, " FLASH_MLA_FUSED_ARGUMENTS ") -> Tensor[]",

    "fused_norm_rope_attn_rope_cast_decode(Tensor q, Tensor kv, Tensor indices, float sm_scale, int d_v, "
    "Tensor? attn_sink, Tensor? topk_length, Tensor? extra_kv, Tensor? extra_indices, Tensor? extra_topk_length, "
    FLASH_MLA_FUSED_ARGUMENTS ") -> Tensor[]",

    "permute_q_b_proj(Tensor q_b_proj, Tensor scale_factors, int h_q, int d_q) -> Tensor[]",

    "permute_wv_proj(Tensor wv_proj, Tensor scale_factors, int wv_group_size, int d_o) -> Tensor[]",
};

}  // namespace flash_mla::schemas
