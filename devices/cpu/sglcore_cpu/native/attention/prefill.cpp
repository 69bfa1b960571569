// Rows of several tokens. The queries of a KV head, token by token and each token's heads side by side, are cut into
// work items; each goes once over the keys that it sees, a block at a time, with a running softmax (Dao et al. 2022).
#include <new>

#include "blocks.h"
#include "softmax.h"

namespace sgl::SGL_ISA {
namespace {

constexpr int64_t kItemPanels = SGL_LEVEL >= 6 ? 12 : 6;

struct Item {
    int64_t row, head, first, last;  // queries [first, last) of a KV head; query i is of token i / group
    int64_t begin, end;              // keys that any of them sees
};

// A thread's memory for one item, in panels of sixteen queries.
struct Scratch {
    int64_t* cells;
    uint32_t *queries, *rows, *block, *probabilities;  // rows: sixteen queries or results as they lie outside
    float *scores, *sums, *most, *total, *factors;
};

template <class Words>
class Prefill {
  public:
    Prefill(const PrefillArgs& args, Pool& pool)
        : args_(args), pool_(pool), keys_(args.keys, args), values_(args.values, args),
          group_(args.heads / args.kv_heads), padded_(KeyBlock<Words>::padded_dim(args.dim)),
          depth_(rounded_up(padded_ / Words::per_word, 16)), starts_(static_cast<const int32_t*>(args.starts)) {}

    void run() {
        fill_zero(args_.out, args_.q_type, starts_[args_.rows], args_.tokens, args_.heads * args_.dim);
        int64_t count = 0;
        Item* items = plan(&count);
        pool_.run(count, 1, [&](int64_t first, int64_t last, int thread) {
            for (int64_t i = first; i < last; ++i) attend(items[i], thread);
        });
    }

  private:
    int64_t length(int64_t row) const { return static_cast<const int32_t*>(args_.seq_lens)[row]; }
    int64_t slot(int64_t row) const { return static_cast<const int32_t*>(args_.slots)[row]; }
    int64_t tokens(int64_t row) const { return starts_[row + 1] - starts_[row]; }
    int64_t prefix(int64_t row) const { return length(row) - tokens(row); }

    // All items, dealt out so that each thread's share begins with its longest.
    Item* plan(int64_t* count) const {
        constexpr int64_t most = kItemPanels * kPanel;
        int64_t total = 0;
        for (int64_t row = 0; row < args_.rows; ++row)
            if (slot(row)) total += (tokens(row) * group_ + most - 1) / most * args_.kv_heads;
        auto* dealt = static_cast<Item*>(pool_.shared(sizeof(Item) * static_cast<size_t>(2 * total + 1)));
        Item* items = dealt + total;
        for (int64_t row = 0; row < args_.rows; ++row) {
            if (!slot(row)) fill_zero(args_.out, args_.q_type, starts_[row], starts_[row + 1], args_.heads * args_.dim);
            for (int64_t first = 0; slot(row) && first < tokens(row) * group_; first += most)
                for (int64_t head = 0; head < args_.kv_heads; ++head)
                    items[(*count)++] = item(row, head, first, std::min(first + most, tokens(row) * group_));
        }
        std::stable_sort(items, items + total, [](const Item& a, const Item& b) {
            return a.end - a.begin > b.end - b.begin;
        });
        deal(items, total, dealt);
        return dealt;
    }

    Item item(int64_t row, int64_t head, int64_t first, int64_t last) const {
        int64_t begin = args_.window > 0 ? prefix(row) + first / group_ - args_.window + 1 : 0;
        return {row, head, first, last, std::max<int64_t>(begin, 0), prefix(row) + (last - 1) / group_ + 1};
    }

    void deal(const Item* items, int64_t count, Item* dealt) const {
        int64_t threads = pool_.threads(), next = 0;
        for (int64_t round = 0; next < count; ++round)
            for (int64_t thread = 0; thread < threads; ++thread) {
                int64_t place = count * thread / threads + round;
                if (place < count * (thread + 1) / threads) dealt[place] = items[next++];
            }
    }

    Scratch scratch(int64_t panels, int thread) const {
        int64_t lanes = panels * kPanel;
        int64_t sizes[] = {lanes * depth_, kPanel * std::max(depth_, padded_), KeyBlock<Words>::words(args_.dim),
                           lanes * kKeys, lanes * kKeys, lanes * padded_, lanes, lanes, lanes};
        int64_t words = 0;
        for (int64_t size : sizes) words += size;
        auto* cells = static_cast<int64_t*>(pool_.scratch(thread, static_cast<size_t>(words * 4 + kKeys * 8)));
        auto* place = reinterpret_cast<uint32_t*>(cells + kKeys);
        uint32_t* parts[9];
        for (int i = 0; i < 9; place += sizes[i++]) parts[i] = place;
        auto floats = [&](int i) { return reinterpret_cast<float*>(parts[i]); };
        return {cells, parts[0], parts[1], parts[2], parts[3], floats(4), floats(5), floats(6), floats(7), floats(8)};
    }

    void attend(const Item& item, int thread) const {
        int64_t panels = (item.last - item.first + kPanel - 1) / kPanel, lanes = panels * kPanel;
        Scratch own = scratch(panels, thread);
        pack_queries(item, own);
        std::fill(own.sums, own.sums + lanes * padded_, 0.0f);
        for (int64_t i = 0; i < lanes; ++i)
            own.most[i] = sink(args_, item.head * group_ + (item.first + i) % group_), own.total[i] = 1.0f;
        KeyBlock<Words> block(own.block, args_.dim);
        const auto* pages = static_cast<const int32_t*>(args_.page_table) + slot(item.row) * args_.table_stride;
#if SGL_LEVEL >= 6
        if (Words::depth_unit > 1) tile_configure(full_tiles());
#endif
        for (int64_t base = item.begin / kKeys * kKeys; base < item.end; base += kKeys) {
            int64_t from = std::max(base, item.begin), to = std::min(base + kKeys, item.end);
            locate(pages, args_.page_size, from, to - from, own.cells);
            Span span{own.cells, from - base, to - base, rounded_up(to - base, Words::row_unit)};
            block.fill(span, keys_, values_, item.head, args_.kv_type);
            add_block(item, own, block, base, span, panels);
        }
#if SGL_LEVEL >= 6
        if (Words::depth_unit > 1) tile_release();
#endif
        for (int64_t panel = 0; panel < panels; ++panel) write(item, own, panel);
    }

    void add_block(const Item& item, const Scratch& own, const KeyBlock<Words>& block, int64_t base, const Span& span,
                   int64_t panels) const {
        Panels queries{own.queries, panels, depth_ * kPanel};
        product<Words>(block.keys(), queries, {own.scores, kKeys * kPanel, nullptr});
        for (int64_t panel = 0; panel < panels; ++panel) {
            float* scores = own.scores + panel * kKeys * kPanel;
            if (args_.softcap > 0) cap(scores, span.padded * kPanel, args_.scaling, args_.softcap);
            mask(item, own, panel, base, span);
            soften(own, panel, span.padded);
        }
        Panels probabilities{own.probabilities, panels, kKeys * kPanel / Words::per_word};
        product<Words>(block.values(), probabilities, {own.sums, padded_ * kPanel, own.factors});
    }

    void pack_queries(const Item& item, const Scratch& own) const {
        auto* rows = reinterpret_cast<Plain<Words>*>(own.rows);
        int64_t element = args_.q_type == kF32 ? 4 : 2, width = depth_ * Words::per_word;
        for (int64_t first = item.first; first < item.last; first += kPanel) {
            std::fill(rows, rows + kPanel * width, Plain<Words>{0});
            for (int64_t i = first; i < std::min(first + kPanel, item.last); ++i) {
                int64_t token = starts_[item.row] + i / group_, head = item.head * group_ + i % group_;
                int64_t at = (token * args_.q_stride + head * args_.dim) * element;
                copy_head(static_cast<const char*>(args_.q) + at, args_.q_type, args_.dim, padded_, rows + (i - first) * width);
            }
            turn_panel(own.rows, depth_, own.queries + (first - item.first) * depth_);
        }
    }

    // What a query does not see gets a score of -infinity. Positions rise along a panel's lanes, so those that see a
    // key are a run of them.
    void mask(const Item& item, const Scratch& own, int64_t panel, int64_t base, const Span& span) const {
        int64_t lane = item.first + panel * kPanel, start = prefix(item.row), window = args_.window;
        int64_t oldest = start + lane / group_, newest = start + (lane + kPanel - 1) / group_;
        bool is_whole = span.from == 0 && span.to == span.padded && base + span.to - 1 <= oldest;
        if (is_whole && (window == 0 || base > newest - window)) return;
        float* scores = own.scores + panel * kKeys * kPanel;
        for (int64_t i = 0; i < span.padded; ++i) {
            int64_t key = base + i - start;  // relative to the row's first new token
            int64_t first = i < span.from || i >= span.to ? kPanel : limited(key * group_ - lane);
            int64_t last = window == 0 ? kPanel : limited((key + window) * group_ - lane);
            std::fill(scores + i * kPanel, scores + i * kPanel + first, -INFINITY);
            std::fill(scores + i * kPanel + last, scores + (i + 1) * kPanel, -INFINITY);
        }
    }

    static int64_t limited(int64_t lane) { return std::clamp<int64_t>(lane, 0, kPanel); }

    // Scores of a panel to probabilities relative to the largest so far, and the factor that brings earlier sums there.
    void soften(const Scratch& own, int64_t panel, int64_t count) const {
        float* scores = own.scores + panel * kKeys * kPanel;
        float *most = own.most + panel * kPanel, *total = own.total + panel * kPanel;
        f32x16 scaling = set1(static_cast<float>(args_.scaling) * kLog2E), top = load(most), other = top;
        for (int64_t i = 0; i < count; i += 2) {
            float* at = scores + i * kPanel;
            f32x16 even = mul(load(at), scaling), odd = mul(load(at + kPanel), scaling);
            store(at, even), store(at + kPanel, odd);
            top = max(even, top), other = max(odd, other);
        }
        top = max(top, other);
        f32x16 factor = power_of_two(sub(load(most), top));
        store(most, top), store(own.factors + panel * kPanel, factor);
        store(total, fma(load(total), factor, probabilities(own, panel, count, top)));
    }

    // Writes them as the second product wants them; returns their sums.
    f32x16 probabilities(const Scratch& own, int64_t panel, int64_t count, f32x16 top) const {
        const float* scores = own.scores + panel * kKeys * kPanel;
        uint32_t* words = own.probabilities + panel * kKeys * kPanel / Words::per_word;
        f32x16 sum = zero(), other = zero();
        for (int64_t i = 0; i < count; i += 2) {
            f32x16 even = power_of_two(sub(load(scores + i * kPanel), top));
            f32x16 odd = power_of_two(sub(load(scores + (i + 1) * kPanel), top));
            sum = add(sum, even), other = add(other, odd);
            Words::put(words + i / Words::per_word * kPanel, even, odd);
        }
        return add(sum, other);
    }

    void write(const Item& item, const Scratch& own, int64_t panel) const {
        float* sums = own.sums + panel * padded_ * kPanel;
        f32x16 inverse = div(set1(1.0f), load(own.total + panel * kPanel));
        for (int64_t d = 0; d < padded_; ++d) store(sums + d * kPanel, mul(load(sums + d * kPanel), inverse));
        for (int64_t d = 0; d < padded_; d += 16)
            transpose(reinterpret_cast<const uint32_t*>(sums + d * kPanel), kPanel, own.rows + d, padded_);
        const auto* rows = reinterpret_cast<const float*>(own.rows);
        int64_t first = item.first + panel * kPanel;
        for (int64_t i = first; i < std::min(first + kPanel, item.last); ++i) {
            int64_t token = starts_[item.row] + i / group_, head = item.head * group_ + i % group_;
            put(rows + (i - first) * padded_, (token * args_.heads + head) * args_.dim);
        }
    }

    void put(const float* row, int64_t at) const {
        for (int64_t d = 0; d < args_.dim; d += 16) {
            int64_t n = std::min<int64_t>(16, args_.dim - d);
            if (args_.q_type == kF32)
                store_first(static_cast<float*>(args_.out) + at + d, load(row + d), n);
            else
                store_bf16_first(static_cast<bf16*>(args_.out) + at + d, load(row + d), n);
        }
    }

    const PrefillArgs& args_;
    Pool& pool_;
    Cells keys_, values_;
    int64_t group_, padded_, depth_;  // padded: the head's elements; depth: words of a query, a multiple of 16
    const int32_t* starts_;
};

void paged_prefill(const PrefillArgs& args, Pool& pool) {
#if SGL_LEVEL >= 5
    bool are_pairs = args.q_type == kBF16 && args.kv_type != kF32;
#if SGL_LEVEL >= 6
    if (are_pairs) return Prefill<Tiles>(args, pool).run();
#endif
    if (are_pairs) return Prefill<Pairs>(args, pool).run();
#endif
    Prefill<Floats>(args, pool).run();
}

}  // namespace

SGL_KERNELS(attention_prefill,
    SGL_KERNEL("paged_prefill", paged_prefill, PrefillArgs))

}  // namespace sgl::SGL_ISA
