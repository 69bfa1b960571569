// Attention of all heads of a token over the same rows, each of which is key and value. A work item is a chunk of a token's
// rows and some of its panels of sixteen heads; it goes over them a block at a time with a running softmax (Dao et al.
// 2022). Results of chunks are merged afterwards: sums depend on a token's own rows and on nothing else of the batch.
//
// Floor: each row read once for each token.
#include "../attention/softmax.h"
#include "rows.h"

// out [tokens, heads, value_size] = softmax(scale * q . row) times the first value_size elements of those rows, over rows of
// `size` elements: chosen [tokens, width] of `rows` and more_chosen [tokens, more_width] of `more_rows`, up to the first -1
// of each. Rows of a list lie `chosen_stride` apart. `sinks` [heads] f32 are scores of one more key without a value; null means none.
#define SGL_MQA_ARGS(P, I, D)                                                                                     \
    P(q) I(q_stride) I(q_head_stride) P(out) P(sinks) I(tokens) I(heads) I(size) I(value_size) I(type) I(row_type) \
    I(exact) I(group) D(scale)
#define SGL_SPARSE_MQA_ARGS(P, I, D)                                                                              \
    SGL_MQA_ARGS(P, I, D) P(rows) I(row_stride) P(chosen) I(chosen_stride) I(width)                               \
    P(more_rows) I(more_row_stride) P(more_chosen) I(more_chosen_stride) I(more_width)
SGL_ARGS(SparseMqaArgs, SGL_SPARSE_MQA_ARGS)

// The same over the first lens[t] rows of the request of token t.
#define SGL_PAGED_MQA_ARGS(P, I, D) SGL_MQA_ARGS(P, I, D) P(rows) I(row_stride) SGL_PAGED_ARGS(P, I)
SGL_ARGS(PagedMqaArgs, SGL_PAGED_MQA_ARGS)

namespace sgl::SGL_ISA {
namespace {

constexpr int64_t kTokensOfThread = 4;       // from which on none waits for long at the end
constexpr int64_t kPartialFloats = 4 << 20;  // results of chunks that wait to be merged

// Rows that two lists name.
struct Lists {
    const SparseMqaArgs& args;
    static constexpr int64_t kChunk = kBlockRows;

    static int64_t named(const int32_t* list, int64_t width) {
        return std::partition_point(list, list + width, [](int32_t row) { return row >= 0; }) - list;
    }
    struct Of {
        const int32_t *chosen, *more;
        int64_t first, count;
    };
    Of of(int64_t token) const {
        const auto* chosen = row_of<int32_t>(args.chosen, token, args.chosen_stride);
        const auto* more = row_of<int32_t>(args.more_chosen, token, args.more_chosen_stride);
        int64_t first = named(chosen, args.width);
        return {chosen, more, first, first + (args.more_rows == nullptr ? 0 : named(more, args.more_width))};
    }
    const char* row(const Of& of, int64_t place) const {
        bool is_first = place < of.first;
        int64_t row = is_first ? of.chosen[place] : of.more[place - of.first];
        const void* rows = is_first ? args.rows : args.more_rows;
        return static_cast<const char*>(rows) + row * (is_first ? args.row_stride : args.more_row_stride) * bytes_of(args.row_type);
    }
};

// All rows of a request.
struct Paged {
    const PagedMqaArgs& args;
    static constexpr int64_t kChunk = 8 * kBlockRows;

    using Of = Pages;
    Of of(int64_t token) const { return {args, token}; }
    const char* row(const Of& of, int64_t place) const {
        return static_cast<const char*>(args.rows) + of.row(place) * args.row_stride * bytes_of(args.row_type);
    }
};

// A block of rows as words: keys side by side; of their values the same words, or pairs of two rows, or those turned.
template <class Words>
class Block {
  public:
    // Rows lie a cache line more than their size apart, so that a column of them does not fall on one set of the cache.
    static int64_t stride(int64_t size) { return up_to(size, kUnit<Words>) / Words::per_word + 16; }
    static int64_t words(int64_t size) {
        int64_t value = up_to(size, kUnit<Words>) + 16;
        return kBlockRows * stride(size) + (Words::per_word == 1 ? 0 : kBlockRows / 2 * value) +
               (Words::depth_unit == 1 ? 0 : value * kBlockRows / 2);
    }

    Block(uint32_t* memory, int64_t size)
        : keys_(memory), values_(memory + kBlockRows * stride(size)), size_(size), padded_(up_to(size, kUnit<Words>)),
          value_stride_(padded_ + 16), turned_(values_ + kBlockRows / 2 * value_stride_) {}

    Plain<Words>* row(int64_t i) const { return reinterpret_cast<Plain<Words>*>(keys_ + i * stride(size_)); }
    int64_t padded() const { return padded_; }

    // `count` rows have been filled, a multiple of Words::row_unit.
    Left keys(int64_t count) const { return {keys_, count, padded_ / Words::per_word, stride(size_), 1}; }
    Left values(int64_t count, int64_t size) const {
        if constexpr (Words::per_word == 1) {
            return {keys_, size, count, 1, stride(size_)};
        } else {
            for (int64_t i = 0; i < count; i += 2) pair(row(i), row(i + 1), values_ + i / 2 * value_stride_, size);
            if constexpr (Words::depth_unit == 1) return {values_, size, count / 2, 1, value_stride_};
            for (int64_t k = 0; k < count / 2; k += 16)
                for (int64_t d = 0; d < size; d += 16)
                    transpose(values_ + k * value_stride_ + d, value_stride_, turned_ + d * kBlockRows / 2 + k, kBlockRows / 2);
            return {turned_, size, count / 2, kBlockRows / 2, 1};
        }
    }

  private:
    static void pair(const bf16* even, const bf16* odd, uint32_t* to, int64_t size) {
        for (int64_t d = 0; d < size; ++d) to[d] = even[d] | static_cast<uint32_t>(odd[d]) << 16;
    }

    uint32_t *keys_, *values_;
    int64_t size_, padded_, value_stride_;
    uint32_t* turned_;
};

// A thread's memory for one item of so many panels.
template <class Words>
struct Scratch {
    uint32_t *rows, *queries, *block, *weights;
    float *scores, *factors, *partial;

    // `results`: floats of results that the thread keeps.
    Scratch(Pool& pool, int thread, int64_t panels, int64_t depth, int64_t size, int64_t results) {
        int64_t sizes[] = {kPanel * depth, panels * kPanel * depth, Block<Words>::words(size),
                           panels * kPanel * kBlockRows, panels * kPanel * kBlockRows, panels * kPanel, results};
        int64_t total = 0;
        for (int64_t one : sizes) total += one;
        auto* place = static_cast<uint32_t*>(pool.scratch(thread, static_cast<size_t>(total) * 4));
        uint32_t* parts[7];
        for (int i = 0; i < 7; place += sizes[i++]) parts[i] = place;
        rows = parts[0], queries = parts[1], block = parts[2], weights = parts[3];
        scores = reinterpret_cast<float*>(parts[4]), factors = reinterpret_cast<float*>(parts[5]);
        partial = reinterpret_cast<float*>(parts[6]);
    }
};

template <class Words, class Rows, class Args>
class Mqa {
  public:
    Mqa(const Args& args, Pool& pool)
        : args_(args), pool_(pool), rows_{args}, panels_((args.heads + kPanel - 1) / kPanel),
          depth_(up_to(args.size, kUnit<Words>) / Words::per_word), values_(up_to(args.value_size, kUnit<Words>)),
          panel_floats_((values_ + 2) * kPanel) {}

    // Many tokens are shared out whole. Of few, chunks are: as many tokens at a time as the memory for their results has room for.
    void run() {
        if (args_.tokens >= kTokensOfThread * pool_.threads())
            return pool_.run(args_.tokens, 1, [&](int64_t first, int64_t last, int thread) {
                for (int64_t token = first; token < last; ++token) whole(token, thread);
            });
        for (int64_t first = 0; first < args_.tokens;) {
            int64_t last = first, total = 0;
            while (last < args_.tokens) {
                int64_t more = chunks(last);
                if (last > first && (total + more) * panels_ * panel_floats_ > kPartialFloats) break;
                total += more, ++last;
            }
            batch(first, last, total);
            first = last;
        }
    }

  private:
    int64_t chunks(int64_t token) const { return (rows_.of(token).count + Rows::kChunk - 1) / Rows::kChunk; }

    // The tokens [first, last), of `total` chunks.
    void batch(int64_t first, int64_t last, int64_t total) {
        int64_t tokens = last - first;
        size_t start_bytes = static_cast<size_t>(up_to(8 * (tokens + 1), kLine));
        auto* memory = static_cast<char*>(pool_.shared(start_bytes + static_cast<size_t>(total * panels_ * panel_floats_) * 4));
        auto* starts = reinterpret_cast<int64_t*>(memory);
        auto* partial = reinterpret_cast<float*>(memory + start_bytes);
        starts[0] = 0;
        for (int64_t i = 0; i < tokens; ++i) starts[i + 1] = starts[i] + chunks(first + i);
        int64_t parts = std::min(panels_, (4 * pool_.threads() + total) / std::max<int64_t>(total, 1));
        if (pool_.threads() == 1) parts = 1;
        pool_.run(total * parts, 1, [&](int64_t begin, int64_t end, int thread) {
            for (int64_t item = begin; item < end; ++item) {
                int64_t chunk = item / parts, part = item % parts;
                int64_t place = std::upper_bound(starts, starts + tokens + 1, chunk) - starts - 1;
                int64_t panel = panels_ * part / parts, count = panels_ * (part + 1) / parts - panel;
                Scratch<Words> own(pool_, thread, count, depth_, args_.size, 0);
                pack(first + place, panel, count, own);
                attend(rows_.of(first + place), chunk - starts[place], count,
                       partial + (chunk * panels_ + panel) * panel_floats_, own);
            }
        });
        pool_.run(tokens * panels_, rows_of_part(total / tokens * values_ * kPanel), [&](int64_t begin, int64_t end, int) {
            for (int64_t item = begin; item < end; ++item) {
                int64_t place = item / panels_, panel = item % panels_;
                merge(first + place, panel, partial + (starts[place] * panels_ + panel) * panel_floats_,
                      starts[place + 1] - starts[place]);
            }
        });
    }

    // The results of all chunks stay in the thread's memory.
    void whole(int64_t token, int thread) const {
        auto of = rows_.of(token);
        int64_t count = (of.count + Rows::kChunk - 1) / Rows::kChunk, step = panels_ * panel_floats_;
        Scratch<Words> own(pool_, thread, panels_, depth_, args_.size, count * step);
        pack(token, 0, panels_, own);
        for (int64_t chunk = 0; chunk < count; ++chunk) attend(of, chunk, panels_, own.partial + chunk * step, own);
        for (int64_t panel = 0; panel < panels_; ++panel) merge(token, panel, own.partial + panel * panel_floats_, count);
    }

    void pack(int64_t token, int64_t panel, int64_t panels, const Scratch<Words>& own) const {
        const char* q = static_cast<const char*>(args_.q) + token * args_.q_stride * bytes_of(args_.type);
        for (int64_t i = 0; i < panels; ++i)
            pack_heads<Words>(q, args_.type, args_.q_head_stride, (panel + i) * kPanel, args_.heads, args_.size, depth_,
                              own.rows, own.queries + i * kPanel * depth_);
    }

    // Packed panels over one chunk: each one's sums [values][16], then the largest score and the total of its weights, [16] each.
    void attend(const typename Rows::Of& of, int64_t chunk, int64_t panels, float* partial, const Scratch<Words>& own) const {
        for (int64_t i = 0; i < panels; ++i) {
            float* ends = partial + i * panel_floats_ + values_ * kPanel;
            store(ends, set1(kLowest)), store(ends + kPanel, zero());
        }
        int64_t begin = chunk * Rows::kChunk, end = std::min(begin + Rows::kChunk, of.count);
        [[maybe_unused]] TilesInUse<Words> tiles;
        for (int64_t first = begin; first < end; first += kBlockRows)
            add_block(of, first, std::min(kBlockRows, end - first), panels, partial, first == begin, own);
    }

    void add_block(const typename Rows::Of& of, int64_t first, int64_t count, int64_t panels, float* partial, bool is_first,
                   const Scratch<Words>& own) const {
        constexpr int64_t kAhead = 4;
        Block<Words> block(own.block, args_.size);
        const Form form = Form::of(args_);
        int64_t padded = up_to(count, Words::row_unit), bytes = form.bytes();
        for (int64_t i = 0; i < padded; ++i) {
            if (i + kAhead < count) {
                const char* next = rows_.row(of, first + i + kAhead);
                for (int64_t at = 0; at < bytes; at += kLine) __builtin_prefetch(next + at);
            }
            copy_row(i < count ? rows_.row(of, first + i) : nullptr, form, block.padded(), block.row(i));
        }
        product<Words>(block.keys(padded), Panels{own.queries, panels, kPanel * depth_},
                       Result{own.scores, kBlockRows * kPanel, nullptr});
        for (int64_t i = 0; i < panels; ++i)
            weigh(own.scores + i * kBlockRows * kPanel, count, padded, partial + i * panel_floats_ + values_ * kPanel,
                  own.factors + i * kPanel, own.weights + i * kBlockRows * kPanel);
        product<Words>(block.values(padded, values_), Panels{own.weights, panels, kBlockRows * kPanel},
                       Result{partial, panel_floats_, is_first ? nullptr : own.factors});
    }

    // Scores [padded][16] to weights relative to the largest so far, and the factor that brings earlier sums there.
    void weigh(float* scores, int64_t count, int64_t padded, float* ends, float* factor, uint32_t* weights) const {
        f32x16 scale = set1(static_cast<float>(args_.scale) * kLog2E), before = load(ends), top = before;
        for (int64_t i = 0; i < count; ++i) {
            f32x16 score = mul(load(scores + i * kPanel), scale);
            store(scores + i * kPanel, score);
            top = max(score, top);
        }
        for (int64_t i = count; i < padded; ++i) store(scores + i * kPanel, set1(-INFINITY));
        f32x16 kept = power_of_two(sub(before, top)), even = zero(), odd = zero();
        for (int64_t i = 0; i < padded; i += 2) {
            f32x16 one = power_of_two(sub(load(scores + i * kPanel), top));
            f32x16 other = power_of_two(sub(load(scores + (i + 1) * kPanel), top));
            even = add(even, one), odd = add(odd, other);
            Words::put(weights + i / Words::per_word * kPanel, one, other);
        }
        store(ends, top), store(factor, kept);
        store(ends + kPanel, fma(load(ends + kPanel), kept, add(even, odd)));
    }

    f32x16 sinks(int64_t panel) const {
        if (args_.sinks == nullptr) return set1(kLowest);
        const auto* first = static_cast<const float*>(args_.sinks) + panel * kPanel;
        return mul(get(first, args_.heads - panel * kPanel), set1(kLog2E));
    }

    // A panel's results of all chunks of a token, `panels_` panels apart.
    void merge(int64_t token, int64_t panel, float* partial, int64_t chunks) const {
        int64_t step = panels_ * panel_floats_, ends = values_ * kPanel;
        f32x16 sink = sinks(panel), top = sink, total = zero();
        for (int64_t c = 0; c < chunks; ++c) top = max(load(partial + c * step + ends), top);
        if (args_.sinks != nullptr) total = power_of_two(sub(sink, top));
        for (int64_t c = 0; c < chunks; ++c) {
            float* own = partial + c * step + ends;
            f32x16 factor = power_of_two(sub(load(own), top));
            total = fma(load(own + kPanel), factor, total);
            store(own, factor);
        }
        f32x16 inverse = where_less(total, set1(1e-35f), zero(), div(set1(1.0f), total));
        for (int64_t d = 0; d < args_.value_size; d += 16) {
            f32x16 sums[16];
            for (int64_t i = 0; i < 16; ++i) sums[i] = zero();
            for (int64_t c = 0; c < chunks; ++c) {
                const float* own = partial + c * step;
                f32x16 factor = load(own + ends);
                for (int64_t i = 0; i < 16; ++i) sums[i] = fma(load(own + (d + i) * kPanel), factor, sums[i]);
            }
            alignas(64) float found[16 * kPanel], turned[16 * kPanel];
            for (int64_t i = 0; i < 16; ++i) store(found + i * kPanel, mul(sums[i], inverse));
            transpose(reinterpret_cast<const uint32_t*>(found), kPanel, reinterpret_cast<uint32_t*>(turned), kPanel);
            for (int64_t head = panel * kPanel; head < std::min(args_.heads, (panel + 1) * kPanel); ++head) {
                int64_t at = (token * args_.heads + head) * args_.value_size + d;
                f32x16 values = load(turned + head % kPanel * kPanel);
                if (args_.type == kF32) put(static_cast<float*>(args_.out) + at, values, args_.value_size - d);
                else put(static_cast<bf16*>(args_.out) + at, values, args_.value_size - d);
            }
        }
    }

    const Args& args_;
    Pool& pool_;
    Rows rows_;
    int64_t panels_, depth_, values_, panel_floats_;  // depth: words of a query; values: elements of a result
};

void sparse_mqa(const SparseMqaArgs& args, Pool& pool) {
    with_words(args.type, args.row_type, [&](auto words) { Mqa<decltype(words), Lists, SparseMqaArgs>(args, pool).run(); });
}

void paged_mqa(const PagedMqaArgs& args, Pool& pool) {
    with_words(args.type, args.row_type, [&](auto words) { Mqa<decltype(words), Paged, PagedMqaArgs>(args, pool).run(); });
}

}  // namespace

SGL_KERNELS(sparse_mqa,
    SGL_KERNEL("sparse_mqa", sparse_mqa, SparseMqaArgs),
    SGL_KERNEL("paged_mqa", paged_mqa, PagedMqaArgs))

}  // namespace sgl::SGL_ISA
