// Thread-block clusters: barriers, and stores into the shared memory of a peer CTA.
#pragma once
#include <cstdint>

namespace flash_mla::ptx {

__device__ __forceinline__ uint32_t cluster_ctarank() {
    uint32_t r;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(r));
    return r;
}

__device__ __forceinline__ uint32_t clusterid_x() {
    uint32_t r;
    asm("mov.u32 %0, %%clusterid.x;" : "=r"(r));
    return r;
}
__device__ __forceinline__ uint32_t ctaid_y() {
    uint32_t r;
    asm("mov.u32 %0, %%ctaid.y;" : "=r"(r));
    return r;
}

// Arrival without a fence: it orders nothing that a barrier of the CTA has not ordered before. A release here would
// wait for every store in flight, some 300 ns.
__device__ __forceinline__ void barrier_cluster_arrive_relaxed() {
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
__device__ __forceinline__ void barrier_cluster_wait() {
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// The address, in the shared memory of the cluster, of what lies at `shared_address` in CTA `rank`.
__device__ __forceinline__ uint32_t mapa(uint32_t shared_address, uint32_t rank) {
    uint32_t r;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(r) : "r"(shared_address), "r"(rank));
    return r;
}

// Stores into a peer's shared memory that count towards a barrier of that peer (both addresses from mapa).
__device__ __forceinline__ void st_async(uint32_t address, float v, uint32_t barrier) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(address),
                 "r"(__float_as_uint(v)), "r"(barrier)
                 : "memory");
}
__device__ __forceinline__ void st_async(uint32_t address, float2 v, uint32_t barrier) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.b32 [%0], {%1, %2}, [%3];" ::"r"(address),
                 "r"(__float_as_uint(v.x)), "r"(__float_as_uint(v.y)), "r"(barrier)
                 : "memory");
}
__device__ __forceinline__ void st_async(uint32_t address, float4 v, uint32_t barrier) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(address),
                 "r"(__float_as_uint(v.x)), "r"(__float_as_uint(v.y)), "r"(__float_as_uint(v.z)), "r"(__float_as_uint(v.w)),
                 "r"(barrier)
                 : "memory");
}

// Programmatic dependent launch. wait: until every kernel before this one has ended and its writes are visible.
// launch_dependents: the next kernel may take its place on the SMs and run up to its own wait.
__device__ __forceinline__ void griddepcontrol_wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
__device__ __forceinline__ void griddepcontrol_launch_dependents() {
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

}  // namespace flash_mla::ptx
