// Loads from rows of Q.
#pragma once
#include <type_traits>

#include "ptx/memory.cuh"

namespace flash_mla::sm90 {

// 2 * kWords contiguous bf16. Rows of q that are not 16-byte aligned are read element by element. Which it is, callers
// ask once for all their loads: a branch at each would make them wait for one another.
template <int kWords, bool kAligned>
__device__ __forceinline__ void load_bf16(uint32_t* r, const uint16_t* p) {
    static_assert(kWords == 2 || kWords % 4 == 0);
    if constexpr (!kAligned) {
#pragma unroll
        for (int i = 0; i < kWords; ++i) r[i] = ptx::ld_global_u16(p + 2 * i) | ptx::ld_global_u16(p + 2 * i + 1) << 16;
    } else if constexpr (kWords == 2) {
        const uint2 v = ptx::ld_global_v2(p);
        r[0] = v.x, r[1] = v.y;
    } else {
#pragma unroll
        for (int i = 0; i < kWords; i += 4) {
            const uint4 v = ptx::ld_global_v4(p + 2 * i);
            r[i] = v.x, r[i + 1] = v.y, r[i + 2] = v.z, r[i + 3] = v.w;
        }
    }
}

// f(std::true_type()) or f(std::false_type()).
template <class F>
__device__ __forceinline__ void with_alignment(bool aligned16, F f) {
    if (aligned16) f(std::true_type());
    else f(std::false_type());
}

}  // namespace flash_mla::sm90
