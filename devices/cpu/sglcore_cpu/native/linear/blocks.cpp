// Products by register blocks. A thread takes some panels and a run of tokens; it goes over the inputs in parts, and
// over the tokens in blocks while a part of the panels is in cache. Few tokens are one block, and then the panels are
// streams from first to last.
#include "words.h"

namespace sgl::SGL_ISA {
namespace {

// What shapes the work for a number of tokens. Measured; every choice gives the same bits.
struct Plan {
    TokenBlocks blocks;
    int64_t panels;        // of an item
    int64_t units;         // of an item
    int64_t columns;       // items for a run of tokens
    int64_t run_blocks;    // blocks of tokens of an item
    int64_t batch_blocks;  // blocks whose words are in memory at a time: runs enough for every thread
    int64_t part_lines;    // lines of a panel that all of an item's tokens meet before the next ones
    bool widens;           // panels of bf16 become float32 in the thread's own memory first

    Plan(const Product& product, int64_t words_per_line, int64_t threads) : blocks(product.tokens) {
        constexpr int64_t few = 8, cached = 768 << 10, most_tokens = 512, part_steps = 1024, claims = 4;
        panels = most(panels_at_once(static_cast<int>(blocks.size)), product.unit_panels);
        units = panels / product.unit_panels, columns = ceil_div(product.units, units);
        bool is_few = blocks.count <= few;
        int64_t token_bytes = most(1, product.lines * words_per_line * 4);
        run_blocks = is_few ? blocks.count : most(4, least(most_tokens, cached / token_bytes) / blocks.size);
        batch_blocks = run_blocks * ceil_div(claims * threads, columns);
        part_lines = is_few ? most(1, product.lines) : part_steps / words_per_line;
        widens = words_per_line == 2 && !is_few;
    }
};

// A line of bf16 pairs becomes two lines of floats.
void widen(const char* from, int64_t lines, char* to) {
    for (int64_t i = 0; i < lines; ++i, from += kLineBytes, to += 2 * kLineBytes) {
        line pairs = load_line(from);
        store(reinterpret_cast<float*>(to), pair_first(pairs));
        store(reinterpret_cast<float*>(to + kLineBytes), pair_second(pairs));
    }
}

// One item: its panels, times its tokens.
template <class Scheme>
class Item {
  public:
    Item(const Product& product, const Plan& plan, const uint32_t* words, Pool& pool, int thread)
        : product_(product), plan_(plan), words_(words) {
        int64_t run_tokens = plan.run_blocks * plan.blocks.size;
        int64_t sums = run_tokens * plan.panels * kRows * 4, wide = plan.widens ? plan.part_lines * 2 * kLineBytes : 0;
        auto* memory = static_cast<char*>(pool.scratch(thread, static_cast<size_t>(sums + wide * plan.panels)));
        sums_ = reinterpret_cast<float*>(memory + wide * plan.panels);
        wide_ = memory;
    }

    // Item `item` of the batch of tokens from block `origin` to `end`.
    void run(int64_t origin, int64_t end, int64_t item) {
        unit_ = item % plan_.columns * plan_.units;
        int64_t units = least(plan_.units, product_.units - unit_);
        count_ = units * product_.unit_panels, origin_ = origin;
        first_ = origin + item / plan_.columns * plan_.run_blocks, last_ = least(first_ + plan_.run_blocks, end);
        for (int64_t line = 0; line == 0 || line < product_.lines; line += plan_.part_lines)
            add_part(line, least(plan_.part_lines, product_.lines - line));
        int64_t token = plan_.blocks.first(first_), end_token = plan_.blocks.first(last_);
        finish_units(product_, sums_, count_ * kRows, {token, end_token, unit_, units});
    }

  private:
    void add_part(int64_t line, int64_t lines) {
        const char* panels[8];
        for (int64_t i = 0; i < count_; ++i) {
            panels[i] = product_.panel_at(unit_, i) + line * kLineBytes;
            if (!plan_.widens) continue;
            char* wide = wide_ + i * plan_.part_lines * 2 * kLineBytes;
            widen(panels[i], lines, wide);
            panels[i] = wide;
        }
        if (plan_.widens)
            meet_all<Floats>(panels, line * 2, lines * 2);
        else
            meet_all<Scheme>(panels, line, lines);
    }

    // These lines of the panels meet every token of the item.
    template <class Form>
    void meet_all(const char* const* panels, int64_t line, int64_t lines) {
        static constexpr Micros<Form> micros;
        int64_t all_steps = product_.lines * Scheme::parts, origin_token = plan_.blocks.first(origin_);
        for (int64_t block = first_; block < last_; ++block) {
            int64_t first = plan_.blocks.first(block), length = plan_.blocks.length(block);
            const uint32_t* words = words_ + (first - origin_token) * all_steps + line * Form::parts * length;
            float* sums = sums_ + (first - plan_.blocks.first(first_)) * count_ * kRows;
            bool ends_item = block + 1 == last_ && lines == product_.lines;
            int64_t jump = ends_item ? (plan_.units - 1) * product_.panel_bytes() : 0;
            int64_t step = panels_at_once(static_cast<int>(length));
            for (int64_t p = 0; p < count_;) {
                bool is_full = count_ - p >= step;
                Pass pass{{}, words, lines, sums + p * kRows, count_ * kRows, line == 0, jump};
                int64_t taken = is_full ? step : 1;
                for (int64_t i = 0; i < taken; ++i) pass.panels[i] = panels[p + i];
                (is_full ? micros.many : micros.one)[length](pass);
                p += taken;
            }
        }
    }

    const Product& product_;
    const Plan& plan_;
    const uint32_t* words_;
    char* wide_;
    float* sums_;
    int64_t unit_ = 0, count_ = 0, origin_ = 0, first_ = 0, last_ = 0;
};

template <class Scheme>
void multiply_by(const Product& product, Pool& pool) {
    Plan plan(product, Scheme::parts, pool.threads());
    int64_t batch_tokens = plan.blocks.first(plan.batch_blocks);
    auto* words = static_cast<uint32_t*>(
        pool.shared(static_cast<size_t>(most(1, batch_tokens * product.lines * Scheme::parts)) * 4));
    for (int64_t origin = 0; origin < plan.blocks.count; origin += plan.batch_blocks) {
        int64_t end = least(origin + plan.batch_blocks, plan.blocks.count);
        write_blocks<Scheme>(product, plan.blocks, origin, end - origin, words, pool);
        int64_t items = plan.columns * ceil_div(end - origin, plan.run_blocks);
        int64_t grain = claim_size(items, plan.panels * product.panel_bytes() * plan.run_blocks, pool.threads());
        pool.run(items, grain, [&](int64_t first, int64_t last, int thread) {
            Item<Scheme> item(product, plan, words, pool, thread);
            for (int64_t i = first; i < last; ++i) item.run(origin, end, i);
        });
    }
}

}  // namespace

void multiply_blocks(const Product& product, Pool& pool) {
    if (product.type == kF32) return multiply_by<Floats>(product, pool);
    if constexpr (kMultipliesPairs)
        multiply_by<Pairs>(product, pool);
    else
        multiply_by<Widened>(product, pool);
}

}  // namespace sgl::SGL_ISA
