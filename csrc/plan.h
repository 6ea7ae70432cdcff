// The plan of a sparse decode call: head tile and splits, from shapes and the SM count alone. Host code.
//
// Why a model and not a table: the same choice has to be right on 132 SMs (H100, H200) and 78 (H20), and for every
// width. The CTAs that share the keys of a token and a head tile are a cluster. A call's time is about
//
//     start + merge(splits) + waves * (blocks of the longest split * time of a block + memory time) + restarts
//
// where a wave is as many clusters as the GPU holds at once. Clusters do not cross GPCs, so a wave has room for fewer
// than the SM count suggests, and one cluster too many costs a whole wave: this decides most choices. Every (head_tile,
// splits, block_keys) is tried, 64 candidates at most, and the cheapest taken: about a microsecond of host time. The
// constants are fitted to times on one H200; benchmark/search_plan.py measures every candidate and prints what the model's
// choice loses to the best.
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

inline constexpr int kMaxSplits = 16;   // CTAs of a cluster; more than 8 are non-portable, and available on SM90

// Clusters of `splits` CTAs that run at once with `ctas_per_sm` on an SM, 0 if not even one. GPC sizes differ from chip to
// chip, and a plan follows from the SM count alone (the launch asks the GPU what fits at all). On the H200 measured, 132 SMs
// behaved as GPCs of 18, 17, five of 16, one of 8 and some rest; with two CTAs on an SM the first two hold 35 each.
inline int64_t concurrent_clusters(int splits, int ctas_per_sm, int num_sms) {
    const int gpcs = num_sms / 18, large = std::min(gpcs, 2);
    const int left = num_sms - 16 * gpcs - 2 * large, small = std::min(left, 8), rest = left - small;
    auto in_gpc = [&](int ctas) { return ctas / splits; };
    const int first = in_gpc(ctas_per_sm == 1 ? 18 : 35), second = in_gpc(ctas_per_sm == 1 ? 17 : 35);
    return (large > 0 ? first : 0) + (large > 1 ? second : 0) + (gpcs - large) * in_gpc(16 * ctas_per_sm) +
           in_gpc(small * ctas_per_sm - (ctas_per_sm - 1)) + (splits <= 2 ? in_gpc(rest * ctas_per_sm) : 0);
}

// Head tiles that are worth planning for. 64 and 128 rows are what FlashMLA's callers pad 8 or 16 heads to; tiles of zero
// rows are skipped as soon as they are seen, and the host cannot look. What remains is one tile (up to 15 real heads) or
// two (16: a tile of zeros, which the skipped ones take their result from), so these two count as two; any other number is
// taken at its word.
inline int expected_tiles(int heads, int head_tile) {
    if (heads <= 16) return (heads + head_tile - 1) / head_tile;
    return heads == 64 || heads == 128 ? 3 : (heads + head_tile - 1) / head_tile + 1;
}

// Estimated microseconds of a call with this plan.
inline double estimate_us(const Plan& plan, int64_t tokens, int64_t width, int heads, int num_sms) {
    const bool wide = plan.head_tile > 8, large_blocks = plan.block_keys == 64;   // heads in two groups of 8, or one
    const int ctas_per_sm = 64 / plan.block_keys, groups_per_block = plan.block_keys / 16;
    const int64_t groups = std::max<int64_t>(1, (width + 15) / 16);
    const int64_t groups_of_split = (groups + plan.splits - 1) / plan.splits;
    const int64_t blocks = (groups_of_split + groups_per_block - 1) / groups_per_block;
    const int64_t clusters = tokens * expected_tiles(heads, plan.head_tile);
    const int64_t at_once = plan.splits == 1 ? int64_t{num_sms} * ctas_per_sm : concurrent_clusters(plan.splits, ctas_per_sm, num_sms);
    if (at_once == 0) return std::numeric_limits<double>::infinity();
    const double waves = static_cast<double>((clusters + at_once - 1) / at_once);
    const double ctas_an_sm = static_cast<double>(std::min(clusters, at_once) * plan.splits) / num_sms;

    const double start = 2.7 + 0.95 * ctas_an_sm + (large_blocks ? 0.69 : 0.0) + (wide ? (large_blocks ? 0.22 : 1.2) : 0.0);
    const double merge = plan.splits == 1 ? 0.0 : (wide ? 0.11 : 0.065) * plan.splits;
    // A block has its latency, longer the more CTAs share the SM, and its bytes their time at the SM's share of the
    // memory's bandwidth.
    const double block = (large_blocks ? (wide ? 3.59 : 1.51) : (wide ? 2.12 : 1.13)) + (large_blocks ? 0.52 : 0.26) * ctas_an_sm;
    const double memory = 0.006 * ctas_an_sm * static_cast<double>(groups_of_split * 16);
    return start + merge + waves * (static_cast<double>(blocks) * block + memory) + (waves - 1) * 2.9;
}

// One split, and nothing that depends on the other tokens of the call.
inline Plan batch_invariant_plan(int heads) { return {heads <= 8 ? 8 : 16, 1, 64}; }

inline Plan make_plan(int64_t tokens, int64_t width, int heads, int num_sms) {
    Plan best{8, 1, 32};
    double best_us = std::numeric_limits<double>::infinity();
    for (int head_tile : {8, 16}) {
        if (head_tile > 8 && (heads <= 8 || heads > 16)) continue;   // beyond 16 heads only tiles of 8 skip zero rows
        for (int block_keys : {32, 64}) {
            for (int splits = 1; splits <= kMaxSplits; ++splits) {
                const Plan plan{head_tile, splits, block_keys};
                const double us = estimate_us(plan, tokens, width, heads, num_sms);
                if (us < best_us) best = plan, best_us = us;
            }
        }
    }
    return best;
}

}  // namespace flash_mla
