// Scores to the weights of V: an online softmax whose reference moves only when it must. Behind a block's scores each score warp
// works out the weights of its own heads, and hands them over.
#pragma once
#include <cfloat>
#include <cmath>

#include "ptx/convert.cuh"
#include "ptx/reduce.cuh"
#include "sm90/decode/sparse/cluster_merge.cuh"
#include "sm90/decode/sparse/head16/roles.cuh"
#include "sm90/decode/sparse/head16/scores.cuh"
#include "sm90/decode/sparse/head16/weights.cuh"

namespace flash_mla::sm90::head16 {

// A weight is 2^(score - reference + bias), with scores in powers of two and a bias of weights.cuh. The reference is set to the largest
// score of a block when that exceeds it by more than kSlack, so accumulators are rarely rescaled.
inline constexpr float kSlack = 8.f;

// A score warp's heads, number i is head warp + i * kScoreWarps. Lane l has columns l, l + 32, ... of a block. The value warps accumulate
// in units of 2^(a head's reference). If that moves, they multiply by 2^(old - new).
template <class C>
struct Softmax {
    static constexpr int kColumns = C::kKeys / 32;
    float reference[C::kOwnHeads], sum[C::kOwnHeads];   // the same in all lanes; of the weights, each lane has a share
    int keys;                                           // all, in warp 0, if there is a zero row: every key weighs 1 there

    // A finite start in place of -inf spares every (-inf) - (-inf).
    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int i = 0; i < C::kOwnHeads; ++i) reference[i] = -FLT_MAX, sum[i] = 0.f;
        keys = 0;
    }

    // Behind a barrier of the score warps, behind the block's scores.
    __device__ __forceinline__ void hand_over(uint32_t shared, Stage stage, uint32_t buffer, bool first, int warp, int lane) {
        const uint32_t place = weight_place<C>(shared, stage);
        if (C::kHasZeroColumn && warp == 0) count_keys(shared, stage, lane);
        // Before the first block there is nothing to rescale.
        const bool updates = weigh_heads(shared, place, buffer, warp, lane) && !first;
        if (lane == 0) ptx::st_shared_u8(place + C::kUpdateFlagsOffset + warp, updates);
        ptx::mbarrier_arrive(shared + C::kWeighedBarrierOffset + stage.barrier);
    }

    // The log-sum-exps of the own heads to every CTA of the cluster. By half a warp a head, a lane a split. By warp 0 also the zero row's, which
    // says too whether the tile `is_rejected`.
    __device__ __forceinline__ void publish(uint32_t shared, SplitsOfTile splits, bool is_rejected, int warp, int lane) {
        const int split = lane % kMaxSplits;
#pragma unroll
        for (int i = 0; i < C::kOwnHeads; ++i) sum[i] = ptx::warp_sum(sum[i]) * power_of_two(-kBias);
        const bool second = lane >= kMaxSplits && C::kOwnHeads == 2;
        set_own(second ? sum[C::kOwnHeads - 1] : sum[0], second ? reference[C::kOwnHeads - 1] : reference[0]);
        const bool sends = split < splits.count;
        if (sends && (second || lane < kMaxSplits)) send_lse<C>(own_lse, warp + (second ? C::kScoreWarps : 0), shared, splits, split);
        if (C::kHasZeroColumn && warp == 0) {
            const float total = static_cast<float>(keys), lse = lse_of(total, 0.f);
            if (sends && lane < kMaxSplits) send_lse<C>(is_rejected ? INFINITY : lse, C::kHeads, shared, splits, split);
            if (head_of_lane(warp, lane) == C::kHeads) own_total = total, own_lse = lse;
        }
        __syncwarp();
    }

    // When those of the other CTAs have come: what this split's results count in those of all splits, to shared memory, and the
    // log-sum-exp over all, base 2, +inf without keys. Of the lane's head.
    __device__ __forceinline__ float merge(uint32_t shared, SplitsOfTile splits, int warp, int lane) const {
        const uint32_t of_head = shared + C::kPeerLseOffset + 4 * kMaxSplits * head_of_lane(warp, lane);
        constexpr int kFours = kMaxSplits / 4;
        float x[kFours][4], largest = -FLT_MAX, total = 0.f;   // finite also where no split has a key
#pragma unroll
        for (int i = 0; i < kFours; ++i) {
            if (4 * i >= splits.count) break;
            const uint4 v = ptx::ld_shared_v4(of_head + 16 * i);
            x[i][0] = __uint_as_float(v.x), x[i][1] = __uint_as_float(v.y), x[i][2] = __uint_as_float(v.z), x[i][3] = __uint_as_float(v.w);
#pragma unroll
            for (int j = 1; j < 4; ++j) x[i][j] = 4 * i + j < splits.count ? x[i][j] : -INFINITY;
            largest = fmaxf(fmaxf(largest, fmaxf(x[i][0], x[i][1])), fmaxf(x[i][2], x[i][3]));
        }
#pragma unroll
        for (int i = 0; i < kFours; ++i) {
            if (4 * i >= splits.count) break;
#pragma unroll
            for (int j = 0; j < 4; ++j) x[i][j] = ptx::ex2_ftz(x[i][j] - largest);
            total += (x[i][0] + x[i][1]) + (x[i][2] + x[i][3]);
        }
        // Over the split's own sum: so the shares add up to 1 also where a log-sum-exp has lost the bits of its sum.
        const float share = own_total == 0.f ? 0.f : __fdividef(ptx::ex2(own_lse - largest), total * own_total);
        if (is_first_of_head(lane) || (C::kHasZeroColumn && warp == 0 && lane == kZeroLane)) {
            ptx::st_shared_f32(shared + C::kShareOffset + 4 * head_of_lane(warp, lane), share);
        }
        return total == 0.f ? INFINITY : largest + ptx::lg2(total);
    }
    // Half a warp has a head; where there is a zero row, a quarter of warp 0 has that.
    static constexpr int kZeroLane = 8;
    __device__ __forceinline__ static int head_of_lane(int warp, int lane) {
        if (C::kHasZeroColumn && warp == 0 && lane / kZeroLane == 1) return C::kHeads;
        return warp + (C::kOwnHeads == 2 ? lane / kMaxSplits * C::kScoreWarps : 0);
    }
    __device__ __forceinline__ static bool is_first_of_head(int lane) { return lane == 0 || (C::kOwnHeads == 2 && lane == kMaxSplits); }

   private:
    float own_total, own_lse;   // of this split, of the lane's head
    __device__ __forceinline__ void set_own(float total, float reference) {
        own_total = total, own_lse = lse_of(total, reference);
    }
    __device__ __forceinline__ static float lse_of(float total, float reference) {
        return total == 0.f ? -INFINITY : reference + ptx::lg2(total);   // -inf: no key
    }
    __device__ __forceinline__ void count_keys(uint32_t shared, Stage stage, int lane) {
#pragma unroll
        for (int k = 0; k < kColumns; ++k) {
            const float mask = ptx::ld_shared_f32(shared + C::kMaskOffset + stage.mask<C>() + 4 * (lane + 32 * k));
            keys += __popc(__ballot_sync(0xffffffffu, mask == 0.f));
        }
    }

    static_assert(kMaxSplits == 16);
    // Returns whether a reference has moved.
    __device__ __forceinline__ bool weigh_heads(uint32_t shared, uint32_t place, uint32_t buffer, int warp, int lane) {
        float s[C::kOwnHeads][kColumns], largest[C::kOwnHeads];
        const uint32_t from = shared + C::kScoreOffset + buffer + 4 * (warp * C::kScoreStride + lane);
#pragma unroll
        for (int i = 0; i < C::kOwnHeads; ++i) {
            largest[i] = -FLT_MAX;
#pragma unroll
            for (int k = 0; k < kColumns; ++k) {
                const uint32_t at = from + 4 * i * C::kScoreWarps * C::kScoreStride + 128 * k;
                s[i][k] = ptx::ld_shared_f32(at);
#pragma unroll
                for (int part = 1; part < C::kDimParts; ++part) s[i][k] += ptx::ld_shared_f32(at + 4 * part * C::kHeads * C::kScoreStride);
                largest[i] = fmaxf(largest[i], s[i][k]);
            }
        }
        bool moved = false;
        const uint32_t to = place + warp * 64 + fragment_place(lane);
#pragma unroll
        for (int i = 0; i < C::kOwnHeads; ++i) {
            largest[i] = ptx::warp_max(largest[i]);
            float rescale = 1.f;
            if (largest[i] > reference[i] + kSlack) {
                rescale = ptx::ex2_ftz(reference[i] - largest[i]);
                reference[i] = largest[i], sum[i] *= rescale;
                moved = true;
            }
            if (lane == 0) ptx::st_shared_f32(place + C::kHeadRescaleOffset + 4 * (warp + i * C::kScoreWarps), rescale);
#pragma unroll
            for (int k = 0; k < kColumns; ++k) {
                const float weight = ptx::ex2_ftz((s[i][k] - reference[i]) + kBias);   // in this order: both may be huge
                sum[i] += weight;
                ptx::st_shared_u16(to + kColumns * 512 * i + 512 * k, ptx::cvt_f16x2_f32(weight, 0.f));
                ptx::st_shared_u16(to + kColumns * 512 * i + 512 * k + C::kWeightBytes, ptx::cvt_bf16x2_f32(weight * power_of_two(kBf16Bias - kBias), 0.f));
            }
        }
        return moved;
    }
};

// By a value warp, when the block has been weighed: whether references have moved, a byte of each score warp.
template <class C>
__device__ __forceinline__ uint2 load_updates(uint32_t place) {
    static_assert(C::kScoreWarps == 8);
    return ptx::ld_shared_v2(place + C::kUpdateFlagsOffset);
}
// If any has, what has been accumulated of heads is rescaled.
template <class C>
__device__ __forceinline__ void follow_updates(Accumulator<C>& acc, uint2 updates, uint32_t place, int lane) {
    if ((updates.x | updates.y) == 0) return;
#pragma unroll
    for (int n = 0; n < C::kHeadGroups; ++n) {   // heads 2t and 2t + 1
        const float2 head = ptx::ld_shared_f32x2(place + C::kHeadRescaleOffset + 32 * n + 8 * (lane % 4));
        acc.rescale(n, head.x, head.y);
    }
}

}  // namespace flash_mla::sm90::head16
