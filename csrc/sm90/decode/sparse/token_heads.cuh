// Some heads of one token: where their rows of q, out and lse lie.
#pragma once
#include "ptx/memory.cuh"
#include "sm90/decode/sparse/params.h"

namespace flash_mla::sm90 {

struct TokenHeads {
    uint32_t batch, row;
    int first_head;

    __device__ __forceinline__ TokenHeads(const SparseDecodeParams& p, uint32_t token, int first)
        : batch(p.s_q.divide(token)), row(token - batch * p.s_q.divisor), first_head(first) {}

    // Of the first head. The next ones are q_stride_h, out_stride_h and s_q elements on.
    __device__ __forceinline__ const uint16_t* query(const SparseDecodeParams& p) const {
        return ptx::opaque(p.q + offset(p.q_stride_b, p.q_stride_s, p.q_stride_h));
    }
    __device__ __forceinline__ uint16_t* out(const SparseDecodeParams& p) const {
        return p.out + offset(p.out_stride_b, p.out_stride_s, p.out_stride_h);
    }
    __device__ __forceinline__ float* lse(const SparseDecodeParams& p) const {
        return p.lse + (static_cast<uint64_t>(batch) * p.h_q + first_head) * p.s_q.divisor + row;
    }

   private:
    __device__ __forceinline__ uint64_t offset(uint32_t stride_b, uint32_t stride_s, uint32_t stride_h) const {
        return static_cast<uint64_t>(batch) * stride_b + static_cast<uint64_t>(row) * stride_s + static_cast<uint64_t>(first_head) * stride_h;
    }
};

}  // namespace flash_mla::sm90
