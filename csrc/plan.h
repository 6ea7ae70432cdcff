// The plan of a sparse decode call: head tile and splits, from shapes and the SM count alone. Host code.
//
// Why a model and not a table: the same choice has to be right on 132 SMs (H100, H200) and 78 (H20), and for every
// width. The CTAs that share the keys of a token and a head tile are a cluster. A call's time is about
//
//     start + merge(splits) + waves * blocks of the longest split * time of a block + restarts
//
// where a wave is as many clusters as the GPU holds at once. Clusters do not cross GPCs, so a wave has room for fewer
// than the SM count suggests, and one cluster too many costs a whole wave: this decides most choices. Every (head_tile,
// splits, block_keys) is tried, 80 candidates at most, and the cheapest taken: a microsecond or two of host time. The
// constants are fitted to times on one H200; benchmark/search_plan.py measures the candidates for 8 and 16 heads and prints what
// the model's choice loses to the best.
#pragma once
#include <algorithm>
#include <cstdint>
#include <limits>

namespace flash_mla {

struct Plan {
    int head_tile;   // rows of q that a CTA works on
    int splits;      // CTAs (one cluster) that share the keys of a token and head tile
    int block_keys;  // keys that a CTA works on at a time: 32 or 64
};

inline constexpr int kMaxSplits = 16;   // CTAs of a cluster; more than 8 are non-portable, and available on SM90

// Clusters of `splits` CTAs that run at once, a CTA an SM, 0 if not even one. GPC sizes differ from chip to chip, and a plan follows
// from the SM count alone (the launch asks the GPU what fits at all). On the H200 measured, 132 SMs behaved as GPCs of 18, 17,
// five of 16, one of 8 and some rest.
inline int64_t concurrent_clusters(int splits, int num_sms) {
    if (splits == 1) return num_sms;
    const int gpcs = num_sms / 18, large = std::min(gpcs, 2);
    const int left = num_sms - 16 * gpcs - 2 * large, small = std::min(left, 8), rest = left - small;
    return (large > 0 ? 18 / splits : 0) + (large > 1 ? 17 / splits : 0) + (gpcs - large) * (16 / splits) + small / splits +
           (splits == 2 ? rest / splits : 0);
}

// Whether rows behind the first 16 may be padding, up to 64. More heads are hardly ever padded, and each tile of theirs would pay for the look.
inline bool may_be_padded(int64_t heads) { return heads <= 64; }

// Tiles of a token.
inline int64_t tiles_of_token(int head_tile, int64_t heads) { return (heads + head_tile - 1) / head_tile; }

// How a number of clusters of `splits` CTAs comes to run.
struct Waves {
    double count, load;   // CTAs over SMs in a full wave; count is infinite if not even one cluster fits
};

inline Waves waves_of(int64_t clusters, int splits, int num_sms) {
    const int64_t at_once = concurrent_clusters(splits, num_sms);
    if (at_once == 0) return {std::numeric_limits<double>::infinity(), 0.0};
    return {static_cast<double>((clusters + at_once - 1) / at_once),
            static_cast<double>(std::min(clusters, at_once) * splits) / num_sms};
}

// Splits are multiples of 16 keys.
inline int64_t key_groups(int64_t width) { return std::max<int64_t>(1, (width + 15) / 16); }

inline double blocks_of_longest_split(int64_t width, const Plan& plan) {
    const int64_t in_split = (key_groups(width) + plan.splits - 1) / plan.splits, in_block = plan.block_keys / 16;
    return static_cast<double>((in_split + in_block - 1) / in_block);
}

// Estimated microseconds of `clusters` tiles of 8 or 16 rows. All SMs share the memory's bandwidth.
inline double small_tiles_us(const Plan& plan, int64_t clusters, int64_t width, int num_sms) {
    const bool wide = plan.head_tile > 8, large_blocks = plan.block_keys == 64;
    const Waves waves = waves_of(clusters, plan.splits, num_sms);
    const double start = 2.66 + 0.61 * waves.load + (wide ? 0.46 : 0.0);
    const double merge = plan.splits == 1 ? 0.0 : 0.19 + 0.046 * plan.splits;
    const double block = large_blocks ? (wide ? 1.31 : 1.15) + 0.29 * waves.load : (wide ? 0.77 : 0.67) + 0.19 * waves.load;
    return start + merge + waves.count * blocks_of_longest_split(width, plan) * block + (waves.count - 1) * 2.96;
}

// The same of all tiles of 64 rows, if none of them are padded.
inline double large_tiles_us(const Plan& plan, int64_t tokens, int64_t width, int heads, int num_sms) {
    const Waves waves = waves_of(tokens * tiles_of_token(64, heads), plan.splits, num_sms);
    const double start = (may_be_padded(heads) ? 6.32 : 4.74) + 1.19 * waves.load;
    const double merge = plan.splits == 1 ? 0.0 : 1.14 + 0.096 * plan.splits;
    return start + merge + waves.count * blocks_of_longest_split(width, plan) * 2.2 + (waves.count - 1) * 6.98;
}

// And of a tile of 64 rows a token whose rows from 16 on are zero: tiles of 16 and the zero row, whose 48 rows the splits share.
inline double padded_large_tiles_us(const Plan& plan, int64_t tokens, int64_t width, int num_sms) {
    const Waves waves = waves_of(tokens, plan.splits, num_sms);
    const double zero_row = 0.04 * waves.load + (plan.splits == 1 ? 3.21 : 0.5 + 2.37 / plan.splits);
    return small_tiles_us({16, plan.splits, 64}, tokens, width, num_sms) + zero_row + waves.count * blocks_of_longest_split(width, plan) * 0.3;
}

// The cheapest of the plans that a head tile offers, by a function that estimates one.
struct Choice {
    Plan plan;
    double us = std::numeric_limits<double>::infinity();
};

template <class Estimate>
void choose_splits(Choice& best, int head_tile, int block_keys, int64_t width, Estimate estimate) {
    for (int splits = 1; splits <= std::min<int64_t>(kMaxSplits, key_groups(width)); ++splits) {
        const Plan plan{head_tile, splits, block_keys};
        const double us = estimate(plan);
        if (us < best.us) best = {plan, us};
    }
}

// Tiles of 8 or 16 rows, on blocks of 32 or 64 keys. `weigh`: what such a time counts.
template <class Weigh>
void choose_small_tiles(Choice& best, int64_t tokens, int64_t width, int heads, int num_sms, Weigh weigh) {
    for (int block_keys : {32, 64}) {
        for (int head_tile : {8, 16}) {
            if (head_tile == 16 && heads <= 8) continue;
            const int64_t clusters = tokens * tiles_of_token(head_tile, heads);
            choose_splits(best, head_tile, block_keys, width, [&](const Plan& plan) {
                return weigh(small_tiles_us(plan, clusters, width, num_sms));
            });
        }
    }
}

// Up to 16 heads.
inline Plan plan_few_heads(int64_t tokens, int64_t width, int heads, int num_sms) {
    Choice best{{8, 1, 32}};
    choose_small_tiles(best, tokens, width, heads, num_sms, [](double us) { return us; });
    return best.plan;
}

// More: tiles of 64 rows, or of 8 or 16. Callers pad 8 or 16 heads to 64, others have 64, and the host cannot look at q. Small tiles
// take the same time for both; tiles of 64 rows take less if they are padded. So for 64 heads choices are compared by their geometric
// mean of the two cases, with four times the weight on padded calls (its fifth power, to be exact), and one that would make real heads
// wait 1.4 times as long as the best for them in tiles of 64 is not taken.
inline Plan plan_many_heads(int64_t tokens, int64_t width, int heads, int num_sms) {
    double real_us[kMaxSplits + 1];   // of tiles of 64, by splits
    Choice for_real{{64, 1, 64}};
    choose_splits(for_real, 64, 64, width, [&](const Plan& plan) {
        return real_us[plan.splits] = large_tiles_us(plan, tokens, width, heads, num_sms);
    });
    const auto weigh = [&](double real, double padded) {
        if (real > 1.4 * for_real.us) return std::numeric_limits<double>::infinity();
        const double squared = padded * padded;
        return heads == 64 ? squared * squared * real : real;
    };
    Choice best{for_real.plan};
    choose_splits(best, 64, 64, width, [&](const Plan& plan) {
        const double real = real_us[plan.splits];
        return weigh(real, heads == 64 ? padded_large_tiles_us(plan, tokens, width, num_sms) : real);
    });
    choose_small_tiles(best, tokens, width, heads, num_sms, [&](double us) { return weigh(us, us); });
    return best.plan;
}

// One split, and nothing that depends on the other tokens of the call.
inline Plan batch_invariant_plan(int heads) { return {heads <= 8 ? 8 : heads <= 16 ? 16 : 64, 1, 64}; }

inline Plan make_plan(int64_t tokens, int64_t width, int heads, int num_sms) {
    return heads <= 16 ? plan_few_heads(tokens, width, heads, num_sms) : plan_many_heads(tokens, width, heads, num_sms);
}

}  // namespace flash_mla
