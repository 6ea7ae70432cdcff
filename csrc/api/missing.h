// FlashMLA's operators that this project does not have, and sparse decoding on tensors that no kernel here serves.
#pragma once
#include <string>
#include <vector>

#include "api/sparse_decode.h"

namespace flash_mla {

// The operators that are registered only to be refused: name, message, name, message, ...
//
// Python raises the messages, because only Python can raise NotImplementedError: every C++ exception that leaves an
// operator of the stable ABI becomes a RuntimeError. In the package that is flash_mla/_operators.py; in vLLM it is
// what the import of the library runs (python_module.cpp).
std::vector<std::string> missing_operators();

// sparse_decode_fwd where there is no kernel to run: on CPU tensors, and everywhere in a library that was built without
// nvcc. Refuses bad arguments as the CUDA implementation does, then q for its device. For vLLM's library alone: the
// package serves CPU tensors, from Python.
SparseDecodeResult sparse_decode_without_kernel(Tensor q, Tensor kv, Tensor indices, OptionalTensor topk_length,
                                                OptionalTensor attn_sink, OptionalTensor tile_scheduler_metadata,
                                                OptionalTensor num_splits, OptionalTensor extra_kv,
                                                OptionalTensor extra_indices, OptionalTensor extra_topk_length,
                                                int64_t d_v, double sm_scale, OptionalTensor out,
                                                bool enable_batch_invariant);

}  // namespace flash_mla
