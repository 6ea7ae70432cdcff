// The plan of a sparse decode call: head tile and splits, from shapes and the SM count alone. Host code.
//
// Why a model and not a table: the same choice has to be right on 132 SMs (H100, H200) and 78 (H20), and for every
// width. A call's time is about
//
//     waves * (start + blocks * block_time) + merge(splits)
//
// where a wave is what fits on the SMs at once, `blocks` is how many blocks of keys the longest split visits and
// `block_time` grows with the CTAs that share an SM. Every (splits, block_keys) is tried, 32 candidates, and the
// cheapest taken: a microsecond of host time. The constants are times on one H200 in nanoseconds;
// benchmark/search_plan.py measures every candidate and prints what the model's choice loses to the best.
#pragma once
#include <algorithm>
#include <cstdint>
#include <limits>

namespace flash_mla {

struct Plan {
    int head_tile;   // rows of q that a CTA works on
    int splits;      // CTAs (one cluster) that share the keys of a token
    int block_keys;  // keys that a CTA holds at a time: 32 with 8 warps, 64 with 16
};

inline constexpr int kMaxSplits = 16;

// Estimated nanoseconds of a call with this plan.
inline double estimate_ns(const Plan& plan, int64_t tokens, int64_t width, int heads, int num_sms) {
    const int64_t groups = std::max<int64_t>(1, (width + 15) / 16);
    const int64_t groups_per_split = (groups + plan.splits - 1) / plan.splits;
    const int groups_per_block = plan.block_keys / 16;
    const int64_t blocks = (groups_per_split + groups_per_block - 1) / groups_per_block;
    const int64_t ctas = tokens * ((heads + plan.head_tile - 1) / plan.head_tile) * plan.splits;
    const int64_t slots = int64_t{num_sms} * (64 / plan.block_keys);   // 16 warps an SM
    const int64_t waves = (ctas + slots - 1) / slots;
    const int64_t per_sm = std::min<int64_t>((ctas + num_sms - 1) / num_sms, 64 / plan.block_keys);
    const double head_factor = heads > 8 ? 1.3 : 1.0;
    const double block_ns = 350.0 + 10.0 * head_factor * plan.block_keys * per_sm;
    const double merge_ns = plan.splits == 1 ? 300.0 : 700.0 + 20.0 * plan.splits;
    return waves * (1500.0 + blocks * block_ns) + merge_ns;
}

inline Plan make_plan(int64_t tokens, int64_t width, int heads, int num_sms) {
    Plan best{16, 1, 32};
    double best_ns = std::numeric_limits<double>::infinity();
    for (int block_keys : {32, 64}) {
        for (int splits = 1; splits <= kMaxSplits; ++splits) {
            const Plan plan{16, splits, block_keys};
            const double ns = estimate_ns(plan, tokens, width, heads, num_sms);
            if (ns < best_ns) best = plan, best_ns = ns;
        }
    }
    return best;
}

}  // namespace flash_mla
