// Thread-block clusters: barriers and stores into the shared memory of a peer CTA.
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

// Every thread of every CTA of the cluster arrives; what it wrote before is visible to whoever waited after.
__device__ __forceinline__ void barrier_cluster_arrive() {
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
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

__device__ __forceinline__ void st_cluster_f32(uint32_t cluster_address, float v) {
    asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(cluster_address), "f"(v) : "memory");
}

// Programmatic dependent launch. wait: until every kernel before this one has ended and its writes are visible.
// launch_dependents: the next kernel may take its place on the SMs and run up to its own wait.
__device__ __forceinline__ void griddepcontrol_wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
__device__ __forceinline__ void griddepcontrol_launch_dependents() {
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

}  // namespace flash_mla::ptx
