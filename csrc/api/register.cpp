// Registers the operators under FLASH_MLA_NAMESPACE.
#include <torch/csrc/stable/library.h>

#include "api/missing.h"
#include "api/namespace.h"
#include "api/schemas.h"
#include "api/sparse_decode.h"

// One more expansion, since the macros below paste their first argument.
#define FLASH_MLA_LIBRARY(ns, m) STABLE_TORCH_LIBRARY(ns, m)
#define FLASH_MLA_LIBRARY_IMPL(ns, key, m) STABLE_TORCH_LIBRARY_IMPL(ns, key, m)

FLASH_MLA_LIBRARY(FLASH_MLA_NAMESPACE, m) {
    m.def(flash_mla::schemas::kSparseDecodeFwd);
    m.def(flash_mla::schemas::kDenseDecodeFwd);
    m.def(flash_mla::schemas::kSparsePrefillFwd);
    m.def(flash_mla::schemas::kSparseDecodePlan);
    m.def(flash_mla::schemas::kSparseDecodeCheck);
    m.def(flash_mla::schemas::kMissingOperators);
    if (flash_mla::kForVllm) {
        for (const char* schema : flash_mla::schemas::kOnlyForVllm) m.def(schema);
    }
}

FLASH_MLA_LIBRARY_IMPL(FLASH_MLA_NAMESPACE, CompositeExplicitAutograd, m) {
    m.impl("sparse_decode_plan", TORCH_BOX(&flash_mla::sparse_decode_plan));
    m.impl("sparse_decode_check", TORCH_BOX(&flash_mla::sparse_decode_check));
    m.impl("missing_operators", TORCH_BOX(&flash_mla::missing_operators));
}

// The package implements these two in Python.
FLASH_MLA_LIBRARY_IMPL(FLASH_MLA_NAMESPACE, CPU, m) {
    if (flash_mla::kForVllm) m.impl("sparse_decode_fwd", TORCH_BOX(&flash_mla::sparse_decode_without_kernel));
}

FLASH_MLA_LIBRARY_IMPL(FLASH_MLA_NAMESPACE, CUDA, m) {
#ifdef FLASH_MLA_WITH_KERNELS
    m.impl("sparse_decode_fwd", TORCH_BOX(&flash_mla::sparse_decode_fwd));
#else
    if (flash_mla::kForVllm) m.impl("sparse_decode_fwd", TORCH_BOX(&flash_mla::sparse_decode_without_kernel));
#endif
}
