// Integers of a step: which rows its tokens see, which blocks they complete, and where their state goes.
#include <algorithm>

#include "sparse.h"

// The plan of `compress`, as the kernel table says; out_rows and writes have `index_bytes`. Null: starts (row b is token b), state_table,
// state_offsets (0).
#define SGL_COMPRESS_PLAN_ARGS(P, I, D)                                                                           \
    P(slots) P(seq_lens) P(lengths) P(starts) P(positions) P(table) I(table_stride) P(state_table)                 \
    I(state_table_stride) I(state_pages) P(state_offsets) I(page_size) I(ratio) I(ring) P(reads)                  \
    P(block_positions) P(out_rows) I(out_bytes) P(writes) I(write_bytes) I(rows) I(tokens) I(events) I(span)
SGL_ARGS(CompressPlanArgs, SGL_COMPRESS_PLAN_ARGS)

// out [tokens, width]: of the last `width` tokens up to each, or of its complete blocks of `ratio` where that is not 0.
#define SGL_LIST_ARGS(P, I, D)                                                                                    \
    P(table) I(table_stride) P(token_slots) P(positions) P(out) I(tokens) I(width) I(page_size) I(ratio)
SGL_ARGS(ListArgs, SGL_LIST_ARGS)

namespace sgl::SGL_ISA {
namespace {

// The row at a position, counted from the first page of these, in a pool with so many rows for each page.
int64_t row_at(const int32_t* pages, int64_t position, int64_t page_rows) {
    return pages[position / page_rows] * page_rows + position % page_rows;
}

class Plan {
  public:
    explicit Plan(const CompressPlanArgs& args) : args_(args) {}

    void run() {
        for (int64_t i = 0; i < args_.tokens; ++i) put_index(args_.writes, args_.write_bytes, i, 0);
        for (int64_t row = 0; row < args_.rows; ++row)
            if (i32_at(args_.slots, row) > 0) plan(row);
        std::fill(reads() + event_ * args_.span, reads() + args_.events * args_.span, -1);
        for (; event_ < args_.events; ++event_) put_event(0, 0);
    }

  private:
    int32_t* reads() const { return static_cast<int32_t*>(args_.reads); }

    void put_event(int64_t position, int64_t row) const {
        static_cast<int32_t*>(args_.block_positions)[event_] = static_cast<int32_t>(position);
        put_index(args_.out_rows, args_.out_bytes, event_, row);
    }

    void plan(int64_t row) {
        int64_t slot = i32_at(args_.slots, row), end = i32_at(args_.seq_lens, row);
        int64_t begin = end - (args_.lengths == nullptr ? 1 : i32_at(args_.lengths, row));
        int64_t first = args_.starts == nullptr ? row : i32_at(args_.starts, row);
        int64_t offset = args_.state_offsets == nullptr ? 0 : i32_at(args_.state_offsets, row);
        for (int64_t block = begin / args_.ratio; block < end / args_.ratio && event_ < args_.events; ++block, ++event_) {
            int64_t source = (block + 1) * args_.ratio - args_.span;
            for (int64_t i = 0; i < args_.span; ++i, ++source) {
                int64_t found = source >= begin ? first + source - begin : source < 0 ? -1 : -2 - state(slot, offset, source);
                reads()[event_ * args_.span + i] = static_cast<int32_t>(found);
            }
            put_event(block * args_.ratio, row_at(row_of<int32_t>(args_.table, slot, args_.table_stride), block,
                                                  args_.page_size / args_.ratio));
        }
        for (int64_t i = first; i < std::min(first + end - begin, args_.tokens); ++i) {
            int64_t position = i32_at(args_.positions, i), last = end;
            if (args_.state_table != nullptr) last = std::min(end, (position / args_.page_size + 1) * args_.page_size);
            if (position + args_.ring >= last) put_index(args_.writes, args_.write_bytes, i, state(slot, offset, position));
        }
    }

    int64_t state(int64_t slot, int64_t offset, int64_t position) const {
        if (args_.state_table == nullptr) return slot * args_.ring + position % args_.ring;
        const auto* pages = row_of<int32_t>(args_.state_table, slot, args_.state_table_stride);
        int64_t page = std::clamp<int64_t>((position - offset) / args_.page_size, 0, args_.state_pages - 1);
        return pages[page] * args_.ring + position % args_.ring;
    }

    const CompressPlanArgs& args_;
    int64_t event_ = 0;
};

void compress_plan(const CompressPlanArgs& args, Pool&) { Plan(args).run(); }

void list_rows(const ListArgs& args, Pool& pool) {
    each_row(pool, args.tokens, 8 * args.width, [&](int64_t token, int) {
        int64_t position = i32_at(args.positions, token);
        const int32_t* pages = row_of<int32_t>(args.table, i32_at(args.token_slots, token), args.table_stride);
        int32_t* out = row_of<int32_t>(args.out, token, args.width);
        int64_t first = args.ratio ? 0 : std::max<int64_t>(0, position - args.width + 1);
        int64_t count = args.ratio ? (position + 1) / args.ratio : position + 1 - first;
        int64_t rows = args.ratio ? args.page_size / args.ratio : args.page_size;
        count = std::min(count, args.width);
        for (int64_t done = 0; done < count;) {
            int64_t start = row_at(pages, first + done, rows), run = std::min(rows - (first + done) % rows, count - done);
            for (int64_t i = 0; i < run; ++i) out[done + i] = static_cast<int32_t>(start + i);
            done += run;
        }
        std::fill(out + count, out + args.width, -1);
    });
}

}  // namespace

SGL_KERNELS(sparse_plan,
    SGL_KERNEL("compress_plan", compress_plan, CompressPlanArgs),
    SGL_KERNEL("list_rows", list_rows, ListArgs))

}  // namespace sgl::SGL_ISA
