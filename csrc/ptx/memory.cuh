// Global and shared memory accesses.
#pragma once
#include <cstdint>

namespace flash_mla::ptx {

__device__ __forceinline__ uint32_t shared_address(const void* p) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// The same value, of unknown origin: keeps the compiler from computing it anew, term by term, wherever it is used.
__device__ __forceinline__ uint32_t opaque(uint32_t x) {
    asm volatile("" : "+r"(x));
    return x;
}
__device__ __forceinline__ int opaque(int x) { return static_cast<int>(opaque(static_cast<uint32_t>(x))); }
template <class T>
__device__ __forceinline__ T* opaque(T* x) {
    asm volatile("" : "+l"(x));
    return x;
}

// Global loads. Not __ldg: its ld.global.nc is for what nobody writes while the kernel is there, and the compiler may move
// it ahead of griddepcontrol.wait, where the kernel before may still be writing. These keep their order with the wait, as
// both are volatile.
__device__ __forceinline__ uint32_t ld_global_u16(const void* p) {
    uint16_t v;
    asm volatile("ld.global.u16 %0, [%1];" : "=h"(v) : "l"(p));
    return v;
}
__device__ __forceinline__ uint32_t ld_global_u32(const void* p) {
    uint32_t v;
    asm volatile("ld.global.u32 %0, [%1];" : "=r"(v) : "l"(p));
    return v;
}
// Without a branch: `otherwise` if not `exists`.
__device__ __forceinline__ uint32_t ld_global_u32_or(const void* p, bool exists, uint32_t otherwise) {
    uint32_t v;
    asm volatile("{.reg .pred exists;\n setp.ne.u32 exists, %2, 0;\n mov.b32 %0, %3;\n @exists ld.global.u32 %0, [%1];\n}"
                 : "=&r"(v) : "l"(p), "r"(static_cast<uint32_t>(exists)), "r"(otherwise));
    return v;
}
__device__ __forceinline__ float ld_global_f32(const void* p) { return __uint_as_float(ld_global_u32(p)); }

__device__ __forceinline__ uint2 ld_global_v2(const void* p) {
    uint2 v;
    asm volatile("ld.global.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(p));
    return v;
}
__device__ __forceinline__ uint4 ld_global_v4(const void* p) {
    uint4 v;
    asm volatile("ld.global.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
    return v;
}

// Without a branch: the registers stay as they were if not `exists`.
template <int kOffset>
__device__ __forceinline__ void ld_global_v4_if(uint4& v, const uint8_t* p, bool exists) {
    asm volatile("{.reg .pred exists;\n setp.ne.u32 exists, %5, 0;\n@exists ld.global.v4.u32 {%0,%1,%2,%3}, [%4+%6];\n}"
                 : "+r"(v.x), "+r"(v.y), "+r"(v.z), "+r"(v.w) : "l"(p), "r"(static_cast<uint32_t>(exists)), "n"(kOffset));
}
// 8 or 16 bytes from global to shared memory, zeros if not `exists`, without registers. They are committed as groups;
// cp_async_wait: until at most kPending of this thread's groups, the latest, are still on their way.
template <int kBytes>
__device__ __forceinline__ void cp_async(uint32_t to, const void* from, bool exists) {
    if constexpr (kBytes == 16) {
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(exists ? 16 : 0) : "memory");
    } else {
        asm volatile("cp.async.ca.shared.global [%0], [%1], %3, %2;" ::"r"(to), "l"(from), "r"(exists ? kBytes : 0), "n"(kBytes) : "memory");
    }
}
__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int kPending>
__device__ __forceinline__ void cp_async_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory"); }

// `bytes` (a multiple of 16) that lie together to L2.
__device__ __forceinline__ void prefetch_bulk_l2(const void* p, uint32_t bytes) {
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(p), "r"(bytes));
}

__device__ __forceinline__ uint4 ld_shared_v4(uint32_t address) {
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(address) : "memory");
    return v;
}
__device__ __forceinline__ uint2 ld_shared_v2(uint32_t address) {
    uint2 v;
    asm volatile("ld.shared.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(address) : "memory");
    return v;
}
__device__ __forceinline__ uint32_t ld_shared_u32(uint32_t address) {
    uint32_t v;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(address) : "memory");
    return v;
}
__device__ __forceinline__ uint32_t ld_shared_u8(uint32_t address) {
    uint32_t v;
    asm volatile("ld.shared.u8 %0, [%1];" : "=r"(v) : "r"(address) : "memory");
    return v;
}
__device__ __forceinline__ float ld_shared_f32(uint32_t address) { return __uint_as_float(ld_shared_u32(address)); }

__device__ __forceinline__ float2 ld_shared_f32x2(uint32_t address) {
    float2 v;
    asm volatile("ld.shared.v2.f32 {%0,%1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(address) : "memory");
    return v;
}
__device__ __forceinline__ float4 ld_shared_f32x4(uint32_t address) {
    float4 v;
    asm volatile("ld.shared.v4.f32 {%0,%1,%2,%3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(address) : "memory");
    return v;
}

__device__ __forceinline__ void st_shared_v4(uint32_t address, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
    asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};" ::"r"(address), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}
__device__ __forceinline__ void st_shared_v4(uint32_t address, float4 v) {
    st_shared_v4(address, __float_as_uint(v.x), __float_as_uint(v.y), __float_as_uint(v.z), __float_as_uint(v.w));
}

// Four 8x8 matrices of 16-bit elements, each as a D fragment: lane l gives the address of row l % 8 of matrix l / 8.
__device__ __forceinline__ void stmatrix_x4(uint32_t address, const uint32_t (&r)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(address), "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
                 : "memory");
}

__device__ __forceinline__ void st_shared_v2(uint32_t address, uint2 v) {
    asm volatile("st.shared.v2.u32 [%0], {%1,%2};" ::"r"(address), "r"(v.x), "r"(v.y) : "memory");
}

__device__ __forceinline__ void st_shared_f32x2(uint32_t address, float2 v) {
    asm volatile("st.shared.v2.f32 [%0], {%1,%2};" ::"r"(address), "f"(v.x), "f"(v.y) : "memory");
}

// The lowest byte, or the lower half.
__device__ __forceinline__ void st_shared_u8(uint32_t address, uint32_t v) {
    asm volatile("st.shared.u8 [%0], %1;" ::"r"(address), "r"(v) : "memory");
}
__device__ __forceinline__ void st_shared_u16(uint32_t address, uint32_t v) {
    asm volatile("{.reg .b16 lo, hi;\n mov.b32 {lo, hi}, %1;\n st.shared.u16 [%0], lo;}" ::"r"(address), "r"(v) : "memory");
}

__device__ __forceinline__ void st_shared_u32(uint32_t address, uint32_t v) {
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(address), "r"(v) : "memory");
}

// Atomically.
__device__ __forceinline__ void or_shared_u32(uint32_t address, uint32_t v) {
    asm volatile("red.shared.or.b32 [%0], %1;" ::"r"(address), "r"(v) : "memory");
}

__device__ __forceinline__ void st_shared_f32(uint32_t address, float v) {
    asm volatile("st.shared.f32 [%0], %1;" ::"r"(address), "f"(v) : "memory");
}

}  // namespace flash_mla::ptx
