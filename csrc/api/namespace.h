// The namespace that the operators are registered under: flash_mla for the package's own library, _flashmla_C for the
// one that takes the place of vLLM's. A process can register a namespace only once, and both may be in it.
#pragma once
#include <string_view>

#ifndef FLASH_MLA_NAMESPACE
#define FLASH_MLA_NAMESPACE flash_mla
#endif

#define FLASH_MLA_QUOTE_EXPANDED(x) #x
#define FLASH_MLA_QUOTE(x) FLASH_MLA_QUOTE_EXPANDED(x)

namespace flash_mla {

// Whether this library stands in for FlashMLA's in vLLM. It then has every operator of FlashMLA's, and no Python
// beside it that could implement any.
inline constexpr bool kForVllm = std::string_view(FLASH_MLA_QUOTE(FLASH_MLA_NAMESPACE)) == "_flashmla_C";

}  // namespace flash_mla
