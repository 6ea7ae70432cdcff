# What a CMake build needs to know of this repository: vLLM's cmake/external_projects/flashmla.cmake, say (docs/vllm.md).
#
#   FLASH_MLA_SM90_SOURCES       the .cpp and .cu files of the library _flashmla_C
#   FLASH_MLA_SM90_INCLUDE_DIRS
#   FLASH_MLA_SM90_DEFINITIONS   for all of them, C++ and CUDA
#   FLASH_MLA_SM90_CUDA_OPTIONS  for nvcc; the kernels are not meant for --use_fast_math
#   FLASH_MLA_SM90_ARCHS         the architectures to compile the .cu files for
#
# They are C++20. FLASH_MLA_NAMESPACE names what the operators are registered under: _flashmla_C unless it is set.

if(NOT DEFINED FLASH_MLA_NAMESPACE)
  set(FLASH_MLA_NAMESPACE _flashmla_C)
endif()

get_filename_component(_flash_mla_root "${CMAKE_CURRENT_LIST_DIR}" DIRECTORY)

# As build_tools/build.py finds them. A list would be a second place to keep.
file(GLOB _flash_mla_api CONFIGURE_DEPENDS "${_flash_mla_root}/csrc/api/*.cpp")
file(GLOB_RECURSE _flash_mla_kernels CONFIGURE_DEPENDS "${_flash_mla_root}/csrc/sm90/*.cu")
set(FLASH_MLA_SM90_SOURCES ${_flash_mla_api} ${_flash_mla_kernels})

set(FLASH_MLA_SM90_INCLUDE_DIRS "${_flash_mla_root}/csrc")

# TORCH_TARGET_VERSION: one binary for torch 2.11 and everything later.
set(FLASH_MLA_SM90_DEFINITIONS
    FLASH_MLA_NAMESPACE=${FLASH_MLA_NAMESPACE}
    FLASH_MLA_WITH_KERNELS
    USE_CUDA
    TORCH_TARGET_VERSION=0x020B000000000000ULL)

set(FLASH_MLA_SM90_CUDA_OPTIONS --expt-relaxed-constexpr)

set(FLASH_MLA_SM90_ARCHS 9.0a)
