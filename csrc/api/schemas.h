// The operators' schemas, once for every library that is built from these sources.
// The first three are FlashMLA's own; callers of its library find them unchanged.
#pragma once

#define FLASH_MLA_SPARSE_DECODE_ARGUMENTS                                                                          \
    "Tensor q, Tensor kv, Tensor indices, Tensor? topk_length, Tensor? attn_sink, "                                \
    "Tensor(a)? tile_scheduler_metadata, Tensor(b)? num_splits, Tensor? extra_kv, Tensor? extra_indices, "         \
    "Tensor? extra_topk_length, int d_v, float sm_scale, Tensor(c!)? out_=None, bool enable_batch_invariant=False"

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
inline constexpr const char* kSparseDecodePlan = "sparse_decode_plan(int tokens, int width, int heads, int num_sms) -> int[]";

// Refuses what no implementation of sparse_decode_fwd takes, on whatever device.
inline constexpr const char* kSparseDecodeCheck = "sparse_decode_check(" FLASH_MLA_SPARSE_DECODE_ARGUMENTS ") -> ()";

}  // namespace flash_mla::schemas
