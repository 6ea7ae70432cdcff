// Registers the operators. FLASH_MLA_NAMESPACE is flash_mla for the package's own library, and _flashmla_C for the
// one that takes the place of vLLM's: a process can register a namespace only once, and both may be in it.
#include <torch/csrc/stable/library.h>

#include "api/schemas.h"
#include "api/sparse_decode.h"

#ifndef FLASH_MLA_NAMESPACE
#define FLASH_MLA_NAMESPACE flash_mla
#endif
// One more expansion, since the macros below paste their first argument.
#define FLASH_MLA_LIBRARY(ns, m) STABLE_TORCH_LIBRARY(ns, m)
#define FLASH_MLA_LIBRARY_IMPL(ns, key, m) STABLE_TORCH_LIBRARY_IMPL(ns, key, m)

FLASH_MLA_LIBRARY(FLASH_MLA_NAMESPACE, m) {
    m.def(flash_mla::schemas::kSparseDecodeFwd);
    m.def(flash_mla::schemas::kDenseDecodeFwd);
    m.def(flash_mla::schemas::kSparsePrefillFwd);
    m.def(flash_mla::schemas::kSparseDecodePlan);
    m.def(flash_mla::schemas::kSparseDecodeCheck);
}

FLASH_MLA_LIBRARY_IMPL(FLASH_MLA_NAMESPACE, CompositeExplicitAutograd, m) {
    m.impl("sparse_decode_plan", TORCH_BOX(&flash_mla::sparse_decode_plan));
    m.impl("sparse_decode_check", TORCH_BOX(&flash_mla::sparse_decode_check));
}

#ifdef FLASH_MLA_WITH_KERNELS
FLASH_MLA_LIBRARY_IMPL(FLASH_MLA_NAMESPACE, CUDA, m) {
    m.impl("sparse_decode_fwd", TORCH_BOX(&flash_mla::sparse_decode_fwd));
}
#endif
