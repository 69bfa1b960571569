// Rows of one token. A work item is a chunk of a row's keys and some of its KV heads, whose cells it reads in the order
// in which they lie; who ends a row's last chunk merges them.
#include "decode.h"

#include <atomic>
#include <new>

#include "softmax.h"

namespace sgl::SGL_ISA {
namespace {

constexpr int64_t kAhead = 2 * kBlock;  // cells between what is fetched and what is read
constexpr int64_t kSharedHeads = 2;  // KV heads whose keys and values of a chunk stay in the second cache

struct Item {
    int64_t row, head, heads, first, last;  // KV heads [head, head + heads), keys [first, last)
    int64_t chunk, chunks, place;           // which chunk of how many; where the row's partial results lie
    std::atomic<int32_t>* left;             // chunks of the row that are not done
};

// What all threads share: work items, countdowns, for each chunk and query head its maximum, total and sums, and where
// each row's of those begin.
struct Work {
    Item* items;
    std::atomic<int32_t>* left;
    float* partial;
    int64_t* places;
    int64_t count;
};

struct Row {
    int64_t first, last;  // visible keys
    int64_t chunks() const { return (last + kChunk - 1) / kChunk - first / kChunk; }
};

template <int64_t Kind>
class Decoder {
  public:
    Decoder(const DecodeArgs& args, Pool& pool)
        : args_(args), pool_(pool), keys_(args.keys, args), values_(args.values, args),
          group_(args.heads / args.kv_heads), width_(rounded_up(args.dim, 32)) {}

    void run() {
        fill_zero(args_.out, args_.q_type, args_.rows, args_.tokens, args_.heads * args_.dim);
        Work work = plan();
        pool_.run(work.count, 1, [&](int64_t first, int64_t last, int thread) {
            for (int64_t i = first; i < last; ++i) attend(work.items[i], work, thread);
        });
    }

  private:
    // Rows of slot 0 have no keys.
    Row row(int64_t index) const {
        if (static_cast<const int32_t*>(args_.slots)[index] == 0) return {0, 0};
        int64_t last = std::max<int64_t>(static_cast<const int32_t*>(args_.seq_lens)[index], 0);
        return {args_.window > 0 ? std::max<int64_t>(last - args_.window, 0) : 0, last};
    }

    // KV heads go to work items of their own as far as that is needed to keep all threads busy.
    int64_t parts(int64_t chunks) const {
        int64_t wanted = pool_.threads() == 1 ? 1 : pool_.threads() * 16;
        int64_t parts = std::min((wanted + chunks - 1) / std::max<int64_t>(chunks, 1), args_.kv_heads);
        return std::max<int64_t>(parts, 1);
    }

    Work plan() const {
        int64_t chunks = 0, most = 0;
        for (int64_t i = 0; i < args_.rows; ++i) {
            int64_t own = row(i).chunks();
            chunks += own, most = std::max(most, own);
        }
        bool shares = chunks > 0 && rows_share();
        int64_t heads = (args_.kv_heads + parts(chunks) - 1) / parts(chunks);
        if (shares) heads = std::min(heads, kSharedHeads);
        Order order{heads, (args_.kv_heads + heads - 1) / heads};
        Work work = allocate(chunks, order.parts);
        // Rows that share pages meet a chunk one after the other, while it is in cache; what only few rows reach does not
        // go by that order, whose planning visits every row for every chunk.
        int64_t together = shares ? std::min(most, 2 * (chunks / args_.rows)) : 0;
        for (int64_t chunk = 0; chunk < together; ++chunk)
            for (int64_t part = 0; part < order.parts; ++part)
                for (int64_t i = 0; i < args_.rows; ++i) add_item(i, chunk, part, order, work);
        for (int64_t i = 0; i < args_.rows; ++i)
            for (int64_t chunk = together; chunk < row(i).chunks(); ++chunk)
                for (int64_t part = 0; part < order.parts; ++part) add_item(i, chunk, part, order, work);
        return work;
    }

    struct Order {
        int64_t heads, parts;  // KV heads of an item, items of a chunk
    };

    // Memory for all items, with every row's countdowns and place; rows without keys are zero at once.
    Work allocate(int64_t chunks, int64_t parts) const {
        size_t item_bytes = sizeof(Item) * static_cast<size_t>(chunks * parts);
        size_t place_bytes = static_cast<size_t>(rounded_up(8 * args_.rows, 64));
        size_t left_bytes = static_cast<size_t>(rounded_up(4 * args_.rows * parts, 64));
        int64_t partial = 0;
        for (int64_t i = 0; i < args_.rows; ++i) partial += row(i).chunks() > 1 ? row(i).chunks() : 0;
        size_t floats = static_cast<size_t>(partial * args_.heads * (width_ + 16));
        auto* memory = static_cast<char*>(pool_.shared(left_bytes + place_bytes + floats * 4 + item_bytes));
        auto* places = reinterpret_cast<int64_t*>(memory + left_bytes);
        auto* sums = reinterpret_cast<float*>(memory + left_bytes + place_bytes);
        Work work{reinterpret_cast<Item*>(sums + floats), reinterpret_cast<std::atomic<int32_t>*>(memory), sums, places, 0};
        int64_t place = 0;
        for (int64_t i = 0; i < args_.rows; ++i) {
            int64_t own = row(i).chunks();
            places[i] = place, place += own > 1 ? own : 0;
            if (own == 0) fill_zero(args_.out, args_.q_type, i, i + 1, args_.heads * args_.dim);
            for (int64_t part = 0; part < parts && own; ++part)
                new (work.left + i * parts + part) std::atomic<int32_t>(static_cast<int32_t>(own));
        }
        return work;
    }

    void add_item(int64_t index, int64_t chunk, int64_t part, const Order& order, Work& work) const {
        Row keys = row(index);
        int64_t chunks = keys.chunks(), head = part * order.heads;
        if (chunk >= chunks) return;
        int64_t begin = (keys.first / kChunk + chunk) * kChunk;
        work.items[work.count++] = {index, head, std::min(order.heads, args_.kv_heads - head),
                                    std::max(begin, keys.first), std::min(begin + kChunk, keys.last),
                                    chunk, chunks, work.places[index], work.left + index * order.parts + part};
    }

    // Whether most rows have their first chunk's last page in common with the row before.
    bool rows_share() const {
        if (args_.window > 0 || args_.rows < 2) return false;
        const auto* table = static_cast<const int32_t*>(args_.page_table);
        const auto* slots = static_cast<const int32_t*>(args_.slots);
        int64_t column = (kChunk - 1) / args_.page_size, alike = 0;
        for (int64_t i = 1; i < args_.rows; ++i) {
            bool is_long = row(i).last >= kChunk && row(i - 1).last >= kChunk;
            alike += is_long && table[slots[i] * args_.table_stride + column] == table[slots[i - 1] * args_.table_stride + column];
        }
        return alike * 2 >= args_.rows;
    }

    // A thread's own memory for one item.
    struct Scratch {
        int64_t* cells;
        float *q, *scores, *sums, *tops;  // [heads][width], [heads][kChunk], [heads][width], [heads][2]
    };

    Scratch scratch(const Item& item, int thread) const {
        int64_t heads = item.heads * group_;
        auto floats = static_cast<size_t>(heads * (2 * width_ + kChunk + 2));
        auto* cells = static_cast<int64_t*>(pool_.scratch(thread, kChunk * 8 + floats * 4));
        auto* q = reinterpret_cast<float*>(cells + kChunk);
        return {cells, q, q + heads * width_, q + heads * (width_ + kChunk), q + heads * (2 * width_ + kChunk)};
    }

    void attend(const Item& item, const Work& work, int thread) const {
        Scratch own = scratch(item, thread);
        int64_t heads = item.heads * group_, count = item.last - item.first;
        const auto* table = static_cast<const int32_t*>(args_.page_table);
        int64_t slot = static_cast<const int32_t*>(args_.slots)[item.row];
        locate(table + slot * args_.table_stride, args_.page_size, item.first, count, own.cells);
        if (args_.visible) leave_out(table + slot * args_.table_stride, item, own.cells);
        for (int64_t head = 0; head < heads; ++head) {
            int64_t at = item.row * args_.q_stride + (item.head * group_ + head) * args_.dim;
            arrange<Kind>(args_.q, args_.q_type, at, args_.dim, own.q + head * width_);
        }
        Chunk chunk{own.cells, count, args_.dim, width_};
        Fetcher ahead(keys_, values_, own.cells, count, item.head, item.heads);
        for (int64_t i = 0; i < kAhead * item.heads; ++i) Fetcher::fetch<0>(ahead);
        walk<true>(keys_, item, chunk, own, ahead);
        for (int64_t head = 0; head < heads; ++head)
            normalize(own.scores + head * kChunk, count, own.tops + 2 * head, item,
                      item.chunk == 0 ? sink(args_, item.head * group_ + head) : kLowest);
        std::fill(own.sums, own.sums + heads * width_, 0.0f);
        walk<false>(values_, item, chunk, own, ahead);
        finish(item, work, own);
    }

    // Every block of keys, every KV head, a few query heads at once.
    template <bool Scoring>
    void walk(const Cells& cells, const Item& item, const Chunk& chunk, const Scratch& own, Fetcher& ahead) const {
        for (int64_t first = 0; first < chunk.count; first += kBlock)
            for (int64_t head = 0; head < item.heads; ++head) {
                const char* base = cells.base + (item.head + head) * cells.head_bytes;
                Visit visit{chunk, base, cells.cell_bytes, first, std::min(first + kBlock, chunk.count), own, ahead};
                visit_heads<Scoring, true>(visit, head * group_, std::min<int64_t>(kHeads, group_));
                for (int64_t done = kHeads; done < group_; done += kHeads)
                    visit_heads<Scoring, false>(visit, head * group_ + done, std::min<int64_t>(kHeads, group_ - done));
            }
    }

    // One KV head's cells of a block.
    struct Visit {
        const Chunk& chunk;
        const char* base;
        int64_t cell_bytes, first, last;
        const Scratch& own;
        Fetcher& ahead;
    };

    template <bool Scoring, bool Fetches>
    void visit_heads(const Visit& visit, int64_t head, int64_t count) const {
        if (count == 1) visit_few<Scoring, 1, Fetches>(visit, head);
        if (count == 2) visit_few<Scoring, 2, Fetches>(visit, head);
        if constexpr (kHeads > 2) {
            if (count == 3) visit_few<Scoring, 3, Fetches>(visit, head);
            if (count == 4) visit_few<Scoring, 4, Fetches>(visit, head);
        }
    }

    template <bool Scoring, int N, bool Fetches>
    void visit_few(const Visit& v, int64_t head) const {
        float *scores = v.own.scores + head * kChunk, *sums = v.own.sums + head * width_;
        const float* q = v.own.q + head * width_;
        if (args_.dim == 128) return visit_size<Scoring, N, 4, Fetches>(v, q, scores, sums);
        if (args_.dim == 64) return visit_size<Scoring, N, 2, Fetches>(v, q, scores, sums);
        visit_size<Scoring, N, kAnySize, Fetches>(v, q, scores, sums);
    }

    template <bool Scoring, int N, int Lines, bool Fetches>
    void visit_size(const Visit& v, const float* q, float* scores, float* sums) const {
        if constexpr (Scoring)
            score<Kind, N, Lines, Fetches>(v.chunk, v.base, v.cell_bytes, v.first, v.last, q, scores, v.ahead);
        else
            gather<Kind, N, Lines, Fetches>(v.chunk, v.base, v.cell_bytes, v.first, v.last, scores, sums, v.ahead);
    }

    // Scores become probabilities relative to their maximum; `tops` gets that and their total. A sink counts among them.
    void normalize(float* scores, int64_t count, float* tops, const Item& item, float sink) const {
        if (args_.softcap > 0) cap(scores, rounded_up(count, kBlock), args_.scaling, args_.softcap);
        if (args_.visible) hide(scores, item);
        f32x16 factor = set1(static_cast<float>(args_.scaling) * kLog2E), top = set1(sink), sum = zero();
        for (int64_t i = 0; i < count; i += 16) {
            f32x16 score = i + 16 <= count ? mul(load(scores + i), factor) : masked(scores + i, factor, count - i);
            store(scores + i, score);
            top = max(score, top);
        }
        tops[0] = reduce_max(top);
        for (int64_t i = 0; i < count; i += 16) {
            f32x16 p = power_of_two(sub(load(scores + i), set1(tops[0])));
            store(scores + i, p);
            sum = add(sum, p);
        }
        tops[1] = reduce_add(sum) + power_of_two(sink - tops[0]);
    }

    // `hidden(i)` for each key first + i of an item that its row does not see.
    template <typename Hidden>
    void for_hidden(const Item& item, Hidden hidden) const {
        constexpr int64_t kBits = 32;
        auto seen = static_cast<uint32_t>(static_cast<const int32_t*>(args_.visible)[item.row]);
        int64_t own = static_cast<const int32_t*>(args_.seq_lens)[item.row] - 1;
        for (int64_t key = std::max(item.first, own - kBits + 1); key < item.last; ++key)
            if (!(seen >> (kBits - 1 - (own - key)) & 1)) hidden(key - item.first);
    }

    // The row's own cell is read in place of those, which may hold no numbers.
    void leave_out(const int32_t* pages, const Item& item, int64_t* cells) const {
        int64_t own = static_cast<const int32_t*>(args_.seq_lens)[item.row] - 1;
        int64_t cell = pages[own / args_.page_size] * static_cast<int64_t>(args_.page_size) + own % args_.page_size;
        for_hidden(item, [&](int64_t i) { cells[i] = cell; });
    }

    // Scales are positive.
    void hide(float* scores, const Item& item) const {
        for_hidden(item, [&](int64_t i) { scores[i] = -INFINITY; });
    }

    // A factor may be negative or zero, so what is absent is put in after the product.
    f32x16 masked(const float* scores, f32x16 factor, int64_t count) const {
        alignas(64) float lanes[16];
        store(lanes, mul(load_first(scores, count), factor));
        for (int64_t i = count; i < 16; ++i) lanes[i] = -INFINITY;
        return load(lanes);
    }

    float* partial(const Item& item, const Work& work, int64_t chunk, int64_t head) const {
        return work.partial + ((item.place + chunk) * args_.heads + item.head * group_ + head) * (width_ + 16);
    }

    void finish(const Item& item, const Work& work, const Scratch& own) const {
        int64_t heads = item.heads * group_;
        if (item.chunks == 1) {
            for (int64_t head = 0; head < heads; ++head)
                write(item, head, own.sums + head * width_, 1.0f / own.tops[2 * head + 1]);
            return;
        }
        for (int64_t head = 0; head < heads; ++head) {
            float* to = partial(item, work, item.chunk, head);
            std::memcpy(to, own.tops + 2 * head, 8);
            std::memcpy(to + 16, own.sums + head * width_, static_cast<size_t>(width_) * 4);
        }
        if (item.left->fetch_sub(1, std::memory_order_acq_rel) != 1) return;
        for (int64_t head = 0; head < heads; ++head) merge(item, work, own, head);
    }

    // Partial softmaxes of one head are brought to their common maximum (Milakov and Gimelshein 2018), first to last.
    void merge(const Item& item, const Work& work, const Scratch& own, int64_t head) const {
        float most = kLowest, total = 0;
        for (int64_t chunk = 0; chunk < item.chunks; ++chunk) {
            float own_most = partial(item, work, chunk, head)[0];
            most = own_most > most ? own_most : most;
        }
        float* sums = own.sums;
        std::fill(sums, sums + width_, 0.0f);
        for (int64_t chunk = 0; chunk < item.chunks; ++chunk) {
            const float* from = partial(item, work, chunk, head);
            float weight = power_of_two(from[0] - most);
            total += weight * from[1];
            for (int64_t i = 0; i < width_; i += 16)
                store(sums + i, fma(set1(weight), load(from + 16 + i), load(sums + i)));
        }
        write(item, head, sums, 1.0f / total);
    }

    void write(const Item& item, int64_t head, const float* sums, float factor) const {
        int64_t at = (item.row * args_.heads + item.head * group_ + head) * args_.dim;
        restore<Kind>(sums, factor, args_.out, args_.q_type, at, args_.dim);
    }

    const DecodeArgs& args_;
    Pool& pool_;
    Cells keys_, values_;
    int64_t group_, width_;
};

void paged_decode(const DecodeArgs& args, Pool& pool) {
    if (args.kv_type == kF32) return Decoder<kF32>(args, pool).run();
    if (args.kv_type == kBF16) return Decoder<kBF16>(args, pool).run();
    Decoder<kI8>(args, pool).run();
}

}  // namespace

SGL_KERNELS(attention_decode,
    SGL_KERNEL("paged_decode", paged_decode, DecodeArgs))

}  // namespace sgl::SGL_ISA
