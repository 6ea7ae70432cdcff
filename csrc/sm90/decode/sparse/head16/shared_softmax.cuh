// Weights once for all warps: behind a block's scores each warp works out those of its own heads, and some warps the factors of
// V's scales, row by row. Behind another barrier a warp multiplies the weights by the factors of its own dims of V. For blocks
// of 64 keys, where weighing all keys in every warp would be most of the work.
#pragma once
#include "ptx/packed.cuh"
#include "sm90/decode/sparse/head16/own_softmax.cuh"

namespace flash_mla::sm90::head16 {

// The factor of V's scale is 2^(its exponent - the largest one of the CTA's keys so far). Where the exponents of the CTA's keys
// are further apart than this, small factors would cost weights that count their precision: then, and from then on, it joins
// the score's exponent instead, for each warp by itself (OwnReference).
inline constexpr float kScaleSpread = 8.f;

// Where column c of 32 lies among B fragments of two k steps: lane (g, t) reads 16 bytes, of columns 2t, 2t + 1, 2t + 8,
// 2t + 9 of either step. Column g of a fragment is a head, or has the same factors as the others.
__device__ __forceinline__ int fragment_place(int column) {
    return column % 8 / 2 * 16 + column / 16 * 8 + column / 8 % 2 * 4 + column % 2 * 2;
}

// What goes with a block's weights, for accumulators: a head's reference, and what it was before the block; the same of a row of
// scales, whose reference is the largest exponent of a key so far, and the least one. kBecomesWide, kIsWide: in this block, or
// before, they have turned out to be further apart than kScaleSpread.
struct HeadUpdate {
    float reference, previous;
    __device__ __forceinline__ float rescale() const { return ptx::ex2_ftz(previous - reference); }
};
struct RowUpdate {
    static constexpr uint32_t kBecomesWide = 1, kIsWide = 2;
    float exponent = 0.f, previous = 0.f, least = 0.f;
    uint32_t wide = 0;
    __device__ __forceinline__ float rescale() const { return ptx::ex2_ftz(previous - exponent); }

    template <class C>
    __device__ __forceinline__ static uint32_t at(uint32_t shared, int row) { return shared + C::kRowUpdateOffset + 16 * row; }
    __device__ __forceinline__ void load(uint32_t from) {
        const uint4 v = ptx::ld_shared_v4(from);
        exponent = __uint_as_float(v.x), previous = __uint_as_float(v.y), least = __uint_as_float(v.z), wide = v.w;
    }
    __device__ __forceinline__ void store(uint32_t to) const {
        ptx::st_shared_v4(to, __float_as_uint(exponent), __float_as_uint(previous), __float_as_uint(least), wide);
    }
};

// The softmax of the heads that a warp owns: number i is head warp + i * kWarps. Lane l has columns l, l + 32, ... of a block.
template <class C>
struct HeadSoftmax {
    static constexpr int kColumns = C::kKeys / 32;
    float sum[C::kOwnHeads];   // of the weights; each lane has a share

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int i = 0; i < C::kOwnHeads; ++i) sum[i] = 0.f;
    }

    // Returns whether a reference has moved.
    __device__ __forceinline__ bool weigh(uint32_t shared, ScoreBuffer buffer, bool first, int warp, int lane) {
        bool moved = false;
#pragma unroll
        for (int i = 0; i < C::kOwnHeads; ++i) {
            const int head = warp + i * C::kWarps;
            if (C::kHeads < C::kWarps && head >= C::kHeads) break;
            // A finite start in place of -inf spares every (-inf) - (-inf).
            const float previous = first ? -FLT_MAX : reference(shared, head);
            HeadUpdate update = {previous, previous};
            const uint32_t from = shared + C::kScoreOffset + buffer.score + 4 * (head * C::kScoreStride + lane);
            float s[kColumns], largest = -FLT_MAX;
#pragma unroll
            for (int k = 0; k < kColumns; ++k) {
                s[k] = ptx::ld_shared_f32(from + 128 * k);
#pragma unroll
                for (int part = 1; part < C::kDimParts; ++part) {
                    s[k] += ptx::ld_shared_f32(from + 128 * k + 4 * part * C::kHeads * C::kScoreStride);
                }
                largest = fmaxf(largest, s[k]);
            }
            largest = ptx::warp_max(largest);
            if (largest > update.reference + kSlack) {
                update.reference = largest;
                sum[i] *= update.rescale();
                moved |= !first;   // before the first block there is nothing to rescale
            }
            const float shift = kBias - update.reference;
            const uint32_t to = shared + C::kWeightOffset + head / 8 * (kColumns * 512) + head % 8 * 64 + fragment_place(lane);
#pragma unroll
            for (int k = 0; k < kColumns; ++k) {
                const float weight = ptx::ex2_ftz(s[k] + shift);
                sum[i] += weight;
                ptx::st_shared_u16(to + 512 * k, ptx::cvt_f16x2_f32(weight, 0.f));
                if (C::kWeightFormats == 2) {
                    ptx::st_shared_u16(to + 512 * k + C::kWeightBytes, ptx::cvt_bf16x2_f32(weight * power_of_two(kRopeBias - kBias), 0.f));
                }
            }
            __syncwarp();   // all lanes have read what it was
            if (lane == 0) ptx::st_shared_f32x2(shared + C::kHeadUpdateOffset + 8 * head, {update.reference, update.previous});
        }
        return moved;
    }

    // {reference, sum} of every own head, for sum * 2^reference, to the CTA, seen after its next barrier, and the log-sum-exp
    // to every CTA of the cluster. Rows without a key keep sum = 0.
    __device__ __forceinline__ void publish(uint32_t shared, SplitsOfTile splits, int warp, int lane) const {
#pragma unroll
        for (int i = 0; i < C::kOwnHeads; ++i) {
            const int head = warp + i * C::kWarps;
            if (C::kHeads < C::kWarps && head >= C::kHeads) return;
            const float total = ptx::warp_sum(sum[i]) * power_of_two(-kBias);
            const float own = total == 0.f ? -FLT_MAX : reference(shared, head);
            const float lse = total == 0.f ? -INFINITY : own + ptx::lg2(total);
            if (lane == 0) ptx::st_shared_f32x2(shared + C::kOwnStatsOffset + 8 * head, {own, total});
            send_lse<C>(lse, head, shared, splits, lane, 32);
        }
    }

   private:
    __device__ __forceinline__ static float reference(uint32_t shared, int head) {
        return ptx::ld_shared_f32(shared + C::kHeadUpdateOffset + 8 * head);
    }
};

// The factors of a row of V's scales, by one warp: the last ones, as the first ones own heads. Returns whether the row's
// update matters.
template <class C>
__device__ __forceinline__ bool prepare_factors(uint32_t shared, Stage stage, ScoreBuffer buffer, bool first, int warp, int lane) {
    constexpr int kColumns = C::kKeys / 32;
    const int row = C::kWarps - 1 - warp;
    if (row >= C::kQuantizedRows) return false;
    RowUpdate update = {-FLT_MAX, -FLT_MAX, FLT_MAX, 0};
    if (!first) {
        update.load(RowUpdate::at<C>(shared, row));
        update.previous = update.exponent;
        if (update.wide != 0) update.wide = RowUpdate::kIsWide;
    }
    const uint32_t from = shared + C::kScaleArraysOffset + C::kScaleArrayBytes + buffer.scale + 4 * (row * C::kScaleStride + lane);
    float exponent[kColumns], mantissa[kColumns], largest = update.exponent, least = update.least;
#pragma unroll
    for (int k = 0; k < kColumns; ++k) {
        const float mask = ptx::ld_shared_f32(shared + C::kMaskOffset + stage.mask + 4 * (lane + 32 * k));   // -inf for what is no key
        exponent[k] = ptx::ld_shared_f32(from + 128 * k) + mask;
        mantissa[k] = C::kHasMantissa ? ptx::ld_shared_f32(from + 128 * k + C::kScaleArrayBytes) : 1.f;
        if (mantissa[k] == 0.f) exponent[k] = -INFINITY;   // no matter what
        largest = fmaxf(largest, exponent[k]);
        if (exponent[k] != -INFINITY) least = fminf(least, exponent[k]);
    }
    update.exponent = ptx::warp_max(largest), update.least = -ptx::warp_max(-least);
    const uint32_t to = shared + C::kFactorOffset + row * (kColumns * 64) + fragment_place(lane);
#pragma unroll
    for (int k = 0; k < kColumns; ++k) {
        ptx::st_shared_u16(to + 64 * k, ptx::cvt_f16x2_f32(ptx::ex2_ftz(exponent[k] - update.exponent) * mantissa[k], 0.f));
    }
    if (update.least < update.exponent - kScaleSpread && update.wide == 0) update.wide = RowUpdate::kBecomesWide;
    __syncwarp();   // all lanes have read what it was
    if (lane == 0) update.store(RowUpdate::at<C>(shared, row));
    return (!first && update.exponent != update.previous) || update.wide != 0;
}

template <class C>
struct SharedSoftmax {
    HeadSoftmax<C> heads;

    __device__ __forceinline__ void clear() { heads.clear(); }
    // Returns whether there are updates. A barrier of the CTA.
    __device__ __forceinline__ bool share(uint32_t shared, Stage stage, ScoreBuffer buffer, bool first, int warp, int lane) {
        bool updates = prepare_factors<C>(shared, stage, buffer, first, warp, lane);
        updates |= heads.weigh(shared, buffer, first, warp, lane);
        return __syncthreads_or(updates);
    }

    __device__ __forceinline__ void weigh(WeightFragments<C>& w, Accumulator<C>& acc, const ValueAddresses<C>& at, ScoreBuffer buffer,
                                          const WarpRole<C>& role, bool updates, uint32_t shared, int lane) const {
        if (updates && apply_updates(w, acc, at, buffer, role, shared, lane)) return;
        const bool is_rope = role.value_is_rope;
        const uint32_t weight = shared + C::kWeightOffset + (is_rope ? C::kWeightBytes : 0) + 16 * lane;
        const uint32_t factors = shared + C::kFactorOffset + role.value_scale_row * (C::kKeys / 32 * 64) + 16 * (lane % 4);
        uint4 factor[C::kKeyGroups / 2], v[C::kHeadGroups][C::kKeyGroups / 2];
#pragma unroll
        for (int pair = 0; pair < C::kKeyGroups / 2; ++pair) {
            factor[pair] = is_rope ? make_uint4(0, 0, 0, 0) : ptx::ld_shared_v4(factors + 64 * pair);
#pragma unroll
            for (int n = 0; n < C::kHeadGroups; ++n) v[n][pair] = ptx::ld_shared_v4(weight + 512 * (C::kKeyGroups / 2 * n + pair));
        }
#pragma unroll
        for (int pair = 0; pair < C::kKeyGroups / 2; ++pair) {
            const uint4 f = factor[pair];
#pragma unroll
            for (int n = 0; n < C::kHeadGroups; ++n) {
                uint4 x = v[n][pair];
                if (!is_rope) {
                    x = make_uint4(ptx::mul_f16x2(x.x, f.x), ptx::mul_f16x2(x.y, f.y), ptx::mul_f16x2(x.z, f.z), ptx::mul_f16x2(x.w, f.w));
                }
                w[2 * pair][n][0] = x.x, w[2 * pair][n][1] = x.y, w[2 * pair + 1][n][0] = x.z, w[2 * pair + 1][n][1] = x.w;
            }
        }
    }

    __device__ __forceinline__ void publish(uint32_t shared, SplitsOfTile splits, const WarpRole<C>&, int warp, int lane) const {
        heads.publish(shared, splits, warp, lane);
    }
    __device__ __forceinline__ float reference(int n, const WarpRole<C>& role, uint32_t shared, int lane) const {
        const float of_head = ptx::ld_shared_f32(head_update(shared, lane) + 64 * n);
        if (role.value_is_rope) return of_head;
        RowUpdate row;
        row.load(RowUpdate::at<C>(shared, role.value_scale_row));
        return row.wide != 0 ? ptx::ld_shared_f32(wide_reference(shared, lane) + 32 * n) : of_head + row.exponent;
    }

   private:
    // Of head g: its update, and the reference of the warp's own where scales are far apart.
    __device__ __forceinline__ static uint32_t head_update(uint32_t shared, int lane) { return shared + C::kHeadUpdateOffset + 8 * (lane / 4); }
    __device__ __forceinline__ static uint32_t wide_reference(uint32_t shared, int lane) {
        return shared + C::kWideReferenceOffset + 4 * (threadIdx.x / 32 * C::kHeads + lane / 4);
    }

    // What has been accumulated, in units of 2^(the head's reference + the row's exponent), is rescaled if one has moved. Returns
    // whether keys' scales are far apart: then weights have been worked out, too.
    __device__ __forceinline__ static bool apply_updates(WeightFragments<C>& w, Accumulator<C>& acc, const ValueAddresses<C>& at, ScoreBuffer buffer,
                                                const WarpRole<C>& role, uint32_t shared, int lane) {
        RowUpdate row;
        if (!role.value_is_rope) row.load(RowUpdate::at<C>(shared, role.value_scale_row));
        if (row.wide != 0) {
            weigh_wide(w, acc, at, buffer, role, row, shared, lane);
            return true;
        }
#pragma unroll
        for (int n = 0; n < C::kHeadGroups; ++n) {   // heads 2t and 2t + 1
            const uint4 v = ptx::ld_shared_v4(shared + C::kHeadUpdateOffset + 64 * n + 16 * (lane % 4));
            const HeadUpdate head0 = {__uint_as_float(v.x), __uint_as_float(v.y)}, head1 = {__uint_as_float(v.z), __uint_as_float(v.w)};
            acc.rescale(n, row.rescale() * head0.rescale(), row.rescale() * head1.rescale());
        }
        return false;
    }

    // Where keys' scales are far apart each warp weighs for itself. It is rare: its reference is kept in shared memory. It begins
    // with that of what has been accumulated before this block.
    __device__ __forceinline__ static void weigh_wide(WeightFragments<C>& w, Accumulator<C>& acc, const ValueAddresses<C>& at, ScoreBuffer buffer,
                                                      const WarpRole<C>& role, const RowUpdate& row, uint32_t shared, int lane) {
        OwnSoftmax<C> softmax;
        softmax.clear();
#pragma unroll
        for (int n = 0; n < C::kHeadGroups; ++n) {
            softmax.own.reference[n] = row.wide == RowUpdate::kIsWide
                                           ? ptx::ld_shared_f32(wide_reference(shared, lane) + 32 * n)
                                           : fmaxf(-FLT_MAX, ptx::ld_shared_f32(head_update(shared, lane) + 64 * n + 4) + row.previous);
        }
        softmax.weigh(w, acc, at, buffer, role, false, lane);
        __syncwarp();
#pragma unroll
        for (int n = 0; n < C::kHeadGroups; ++n) {
            if (lane % 4 == 0) ptx::st_shared_f32(wide_reference(shared, lane) + 32 * n, softmax.own.reference[n]);
        }
        __syncwarp();
    }
};

template <class C>
using Softmax = std::conditional_t<C::kSharesWeights, SharedSoftmax<C>, OwnSoftmax<C>>;

}  // namespace flash_mla::sm90::head16
