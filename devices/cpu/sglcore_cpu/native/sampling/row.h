// One row's draw: the best logit, the cut-offs, the race.
//
// Blocks whose best logit lies too far down are passed over in every step. The race needs the exact noise of few tokens:
// all others lose already by a bound on their noise that takes no table.
#pragma once

#include <atomic>

#include "candidates.h"

namespace sgl::SGL_ISA {

struct Tables {
    const int32_t *gumbel, *weight, *hashed_ids;
};

// What a row asks for; a cut-off that is off is INT32_MAX, top_p above 2^24.
struct Wish {
    float scale;
    bool greedy;
    int32_t top_k, top_p, min_p;
};

struct Drawn {
    int32_t token;
    bool bad;
};

// ceil(total * share / 2^24) without the product of 72 bits.
SGL_INLINE int64_t share_of(int64_t total, int64_t share) {
    int64_t mask = (int64_t{1} << kTopPBits) - 1;
    return (total >> kTopPBits) * share + (((total & mask) * share + mask) >> kTopPBits);
}

template <class T>
class Row {
  public:
    Row(Logits<T> logits, Wish wish, Key key, Tables tables, RowMemory memory, Workers workers)
        : logits_(logits), wish_(wish), key_(key), tables_(tables), memory_(memory), workers_(workers) {}

    Drawn draw() {
        if (!find_best()) return {0, true};
        if (wish_.greedy) return {best_id_, false};
        if (nobody_is_candidate()) return {race_of_noise(), false};
        Cut cut;
        if (wish_.top_k < logits_.vocab) cut = first_k();
        if (wish_.top_p <= 1 << kTopPBits) cut = first_share(cut);
        if (wish_.min_p < cut.gap) cut = {wish_.min_p, INT32_MAX};
        return {race(cut), false};
    }

  private:
    bool find_best() {
        workers_.run(logits_.blocks(), [this](int64_t first, int64_t last) {
            for (int64_t block = first; block < last; ++block) memory_.most[block] = logits_.most(block);
        });
        int64_t where = 0;
        for (int64_t block = 0; block < logits_.blocks(); ++block) {
            if (std::isnan(memory_.most[block])) return false;
            if (memory_.most[block] > memory_.most[where]) where = block;
        }
        best_ = memory_.most[where];
        if (!std::isfinite(best_)) return false;
        best_id_ = static_cast<int32_t>(logits_.find(where, best_));
        return true;
    }

    bool nobody_is_candidate() const {
        return !(wish_.scale * 0 == 0) || wish_.top_k <= 0 || wish_.top_p <= 0 || wish_.min_p < 0;
    }

    int32_t block_gap(int64_t block) const { return gap_of(memory_.most[block], best_, wish_.scale); }

    // Collects the candidates up to `most_gap`.
    void collect(int32_t most_gap) {
        workers_.run(logits_.blocks(), [this, most_gap](int64_t first, int64_t last) {
            for (int64_t block = first; block < last; ++block) collect_block(block, most_gap);
        });
    }

    void collect_block(int64_t block, int32_t most_gap) {
        int32_t count = 0;
        Candidate* items = memory_.items + block * kBlock;
        if (block_gap(block) <= most_gap) {
            logits_.each(block, [&](int64_t id, f32x16 x, uint32_t mask) {
                keep_lanes(gaps_of(x, best_, wish_.scale), id, mask, most_gap, items, &count);
            });
        }
        memory_.counts[block] = count;
    }

    __attribute__((always_inline)) static void keep_lanes(
        i32x16 gaps, int64_t id, uint32_t mask, int32_t most_gap, Candidate* items, int32_t* count) {
        mask &= lanes_at_most(gaps, set1_i32(most_gap));
        if (mask == 0) return;
        int32_t lane[16];
        store_i32(lane, gaps);
        for (; mask != 0; mask &= mask - 1) {
            int i = __builtin_ctz(mask);
            items[(*count)++] = {lane[i], static_cast<int32_t>(id) + i};
        }
    }

    // The k-th largest best of a block bounds the k-th largest logit from below, so few blocks need a look.
    Cut first_k() {
        int32_t most_gap = kLimit - 1, k = wish_.top_k;
        if (k <= logits_.blocks()) {
            std::copy_n(memory_.most, logits_.blocks(), memory_.sorted);
            std::nth_element(memory_.sorted, memory_.sorted + k - 1, memory_.sorted + logits_.blocks(),
                             [](float a, float b) { return a > b; });
            most_gap = std::min(most_gap, gap_of(memory_.sorted[k - 1], best_, wish_.scale));
        }
        collect(most_gap);
        is_collected_ = true;
        return prefix_end(memory_, logits_.blocks(), Cut{}, k, [](int32_t) { return int64_t{1}; });
    }

    Cut first_share(Cut cut) {
        auto weight = [this](int32_t gap) { return static_cast<int64_t>(weight_of(gap, tables_.weight)); };
        int64_t wanted = share_of(is_collected_ ? collected_weight(cut) : collect_weighing(kNear), wish_.top_p);
        if (!is_collected_ && collected_weight(cut) < wanted) collect(kLimit - 1);
        return prefix_end(memory_, logits_.blocks(), cut, wanted, weight);
    }

    int64_t collected_weight(Cut cut) const {
        int64_t total = 0;
        each_candidate(memory_, logits_.blocks(), [&](Candidate item) {
            if (cut.keeps(item.gap, item.id)) total += weight_of(item.gap, tables_.weight);
            return true;
        });
        return total;
    }

    // The weight of all candidates; collects those up to `most_gap` in the same pass.
    int64_t collect_weighing(int32_t most_gap) {
        workers_.run(logits_.blocks(), [this, most_gap](int64_t first, int64_t last) {
            for (int64_t block = first; block < last; ++block) weigh_block(block, most_gap);
        });
        int64_t total = 0;
        for (int64_t block = 0; block < logits_.blocks(); ++block) total += memory_.sums[block];
        return total;
    }

    void weigh_block(int64_t block, int32_t most_gap) {
        int32_t count = 0;
        int64_t sum = 0;
        Candidate* items = memory_.items + block * kBlock;
        if (block_gap(block) < kWeightless) {
            // Halves of the weights, so that sixteen of each fit a lane.
            i32x16 low = zero_i32(), high = zero_i32();
            logits_.each(block, [&](int64_t id, f32x16 x, uint32_t mask) {
                i32x16 gaps = gaps_of(x, best_, wish_.scale);
                if (lanes_at_most(gaps, set1_i32(kWeightless)) & mask) {
                    i32x16 weights = weights_of(mask == 0xffff ? gaps : without_rest(gaps, mask), tables_.weight);
                    low = add_i32(low, and_i32(weights, set1_i32(0xffff)));
                    high = add_i32(high, shift_right<16>(weights));
                }
                keep_lanes(gaps, id, mask, most_gap, items, &count);
            });
            sum = sum_of(low) + (sum_of(high) << 16);
        }
        memory_.counts[block] = count;
        memory_.sums[block] = sum;
    }

    static i32x16 without_rest(i32x16 gaps, uint32_t mask) {
        int32_t lane[16];
        store_i32(lane, gaps);
        for (int i = 0; i < 16; ++i)
            if (!(mask >> i & 1)) lane[i] = kLimit;
        return load_i32(lane);
    }

    static int64_t sum_of(i32x16 x) {
        int32_t lane[16];
        store_i32(lane, x);
        int64_t total = 0;
        for (int32_t each : lane) total += each;
        return total;
    }

    // The largest noise - gap within the cut; of equal ones the first id.
    int32_t race(Cut cut) {
        // Another token with a gap of 0 may come before the best one, and be all that is kept.
        int64_t start = cut.keeps(0, best_id_) ? keyed(score_of(best_id_, 0), best_id_) : INT64_MIN;
        winner_.store(start, std::memory_order_relaxed);
        int64_t most_noise = noise_of(UINT32_MAX, tables_.gumbel);
        workers_.run(logits_.blocks(), [&](int64_t first, int64_t last) {
            for (int64_t block = first; block < last; ++block)
                if (block_gap(block) <= std::min<int64_t>(cut.gap, most_noise - leading())) race_block(block, cut);
        });
        return id_of(winner_.load(std::memory_order_relaxed));
    }

    void race_block(int64_t block, Cut cut) {
        auto lead = static_cast<float>(leading());
        logits_.each(block, [&](int64_t id, f32x16 x, uint32_t mask) {
            const int32_t* ids = tables_.hashed_ids + id;
            i32x16 hashed = mask == 0xffff ? load_i32(ids) : load_i32_first(ids, __builtin_popcount(mask));
            f32x16 gaps = mul(sub(set1(best_), x), set1(wish_.scale));
            mask &= lanes_at_least(sub(noise_bound(key_.hash(hashed)), gaps), set1(lead));
            if (mask == 0) return;
            for (; mask != 0; mask &= mask - 1) challenge(static_cast<int32_t>(id) + __builtin_ctz(mask), cut);
            lead = static_cast<float>(leading());
        });
    }

    void challenge(int32_t id, Cut cut) {
        int32_t gap = gap_of(logits_.at(id), best_, wish_.scale);
        if (!cut.keeps(gap, id)) return;
        int64_t mine = keyed(score_of(id, gap), id), leader = winner_.load(std::memory_order_relaxed);
        while (mine > leader && !winner_.compare_exchange_weak(leader, mine, std::memory_order_relaxed)) {
        }
    }

    // Where every gap is the limit, noise alone decides.
    int32_t race_of_noise() const {
        int64_t winner = INT64_MIN;
        for (int64_t id = 0; id < logits_.vocab; ++id) {
            auto token = static_cast<int32_t>(id);
            winner = std::max(winner, keyed(score_of(token, 0), token));
        }
        return id_of(winner);
    }

    int32_t score_of(int32_t id, int32_t gap) const {
        return noise_of(key_.hash(tables_.hashed_ids[id]), tables_.gumbel) - gap;
    }
    static int64_t keyed(int32_t score, int32_t id) {
        return static_cast<int64_t>(score) * (int64_t{1} << 32) + (INT32_MAX - id);
    }
    static int32_t id_of(int64_t key) { return INT32_MAX - static_cast<int32_t>(key & 0x7fffffff); }
    int32_t leading() const { return static_cast<int32_t>(winner_.load(std::memory_order_relaxed) >> 32); }

    static constexpr int32_t kNear = 8 << 16;
    static constexpr int32_t kWeightless = 23 << 16;  // e^-23 is less than 2^-31

    Logits<T> logits_;
    Wish wish_;
    Key key_;
    Tables tables_;
    RowMemory memory_;
    Workers workers_;
    float best_ = 0;
    int32_t best_id_ = 0;
    bool is_collected_ = false;
    std::atomic<int64_t> winner_{INT64_MIN};
};

}  // namespace sgl::SGL_ISA
