#include "row.h"
#include "sampling.h"

namespace sgl::SGL_ISA {

namespace {

template <class P>
const P* at(const void* data) {
    return static_cast<const P*>(data);
}

int32_t limit_of(const void* limits, int64_t row) { return limits == nullptr ? INT32_MAX : at<int32_t>(limits)[row]; }

template <class T>
void draw_row(const DrawArgs& args, int64_t row, void* memory, Workers workers) {
    Logits<T> logits{at<T>(args.logits) + row * args.stride, args.vocab};
    Wish wish{at<float>(args.scale)[row], at<bool>(args.greedy)[row], limit_of(args.top_k, row),
              limit_of(args.top_p, row), limit_of(args.min_p, row)};
    Key key(at<int32_t>(args.seed_words) + 2 * row, at<int32_t>(args.positions)[row]);
    Tables tables{at<int32_t>(args.gumbel), at<int32_t>(args.weight), at<int32_t>(args.hashed_ids)};
    RowMemory parts(memory, blocks_of(args.vocab));
    Drawn drawn = Row<T>(logits, wish, key, tables, parts, workers).draw();
    static_cast<int32_t*>(args.tokens)[row] = drawn.token;
    static_cast<bool*>(args.bad)[row] = drawn.bad;
}

// Rows side by side where there is one for each thread; else all threads at one row after the other.
template <class T>
void draw_rows(const DrawArgs& args, Pool& pool) {
    size_t bytes = RowMemory::bytes(blocks_of(args.vocab));
    if (args.rows >= pool.threads()) {
        pool.run(args.rows, 1, [&](int64_t first, int64_t last, int thread) {
            for (int64_t row = first; row < last; ++row)
                draw_row<T>(args, row, pool.scratch(thread, bytes), Workers{nullptr});
        });
        return;
    }
    void* memory = pool.shared(bytes);
    for (int64_t row = 0; row < args.rows; ++row) draw_row<T>(args, row, memory, Workers{&pool});
}

void draw(const DrawArgs& args, Pool& pool) {
    if (args.type == kBF16) return draw_rows<bf16>(args, pool);
    draw_rows<float>(args, pool);
}

}  // namespace

SGL_KERNELS(sampling_draw,
    SGL_KERNEL("draw", draw, DrawArgs))

}  // namespace sgl::SGL_ISA
