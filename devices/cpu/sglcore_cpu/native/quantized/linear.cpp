// Products of activations with a quantised weight.
#include "args.h"
#include "product.h"

namespace sgl::SGL_ISA::quantized {

namespace {

constexpr int64_t kChunkBytes = 64 * 1024;     // of weights that a thread takes at once
constexpr int64_t kTokenBytes = 512 * 1024;    // of activations that stay near while panels pass

// The calls' common part: panels of the result times chunks of tiles of tokens, shared out to threads.
struct Work {
    const LinearQuantizedArgs& args;
    Weight weight;
    Activations x;
    int64_t tiles_at_once, chunks;

    Work(const LinearQuantizedArgs& given, Pool& pool)
        : args(given),
          weight(given),
          x(quantize(given.x, given.x_type, given.x_stride, given.tokens, weight, static_cast<float>(given.multiplier),
                     pool.shared(activation_bytes(weight, given.tokens)), pool)),
          tiles_at_once(most(1, kTokenBytes / x.tile_bytes())),
          chunks(parts(x.tiles(), tiles_at_once)) {}

    // body(pair, first tile, last tile, thread) for pairs of panels [0, pairs).
    template <class Body>
    void run(int64_t pairs, Pool& pool, Body body) const {
        int64_t grain = most(1, least(kChunkBytes / (2 * weight.panel_bytes()), pairs / (8 * pool.threads())));
        pool.run(chunks * pairs, grain, [&](int64_t first, int64_t last, int thread) {
            begin(x);
            for (int64_t item = first; item < last; ++item) {
                int64_t tile = item / pairs * tiles_at_once;
                body(item % pairs, tile, least(tile + tiles_at_once, x.tiles()), thread);
            }
        });
    }

    void put(int64_t token, int64_t panel, f32x16 value, int64_t width) const {
        void* row = row_of(args.out, args.out_type, args.out_stride, token);
        store_row(row, args.out_type, panel * kPanel, args.rounded ? rounded(value) : value, width);
    }

    // A panel's sums plus its bias.
    void put_sums(int64_t tile, int64_t panel, const Sums& sums) const {
        int64_t width = weight.width(panel);
        f32x16 bias = args.bias ? load_row(args.bias, args.bias_type, panel * kPanel, width) : zero();
        for (int64_t t = 0; t < x.tokens_of(tile); ++t)
            put(tile * x.height + t, panel, add(load(sums + t * kPanel), bias), width);
    }

    // Where the reference holds a value in the type of x.
    f32x16 cast(f32x16 value) const { return args.x_type == kBF16 ? rounded(value) : value; }
};

// x times the weight's transpose, plus the bias.
void linear(const LinearQuantizedArgs& args, Pool& pool) {
    if (args.tokens == 0) return;
    Work work(args, pool);
    const Activations& x = work.x;
    const int64_t all = work.weight.panels();
    work.run(parts(all, 2), pool, [&](int64_t pair, int64_t first, int64_t last, int thread) {
        Panels panels{{2 * pair, least(2 * pair + 1, all - 1)}, least(2, all - 2 * pair), 2};
        void* scratch = pool.scratch(thread, panel_scratch_bytes(work.weight, x.tokens));
        PreparedPanels prepared = prepare(work.weight, panels, x.tokens, scratch);
        for (int64_t tile = first; tile < last; ++tile) {
            alignas(64) Sums sums[2];
            product(prepared, x, tile, sums);
            for (int64_t p = 0; p < panels.count; ++p) work.put_sums(tile, panels.panel[p], sums[p]);
        }
    });
}

// silu(x gate) * (x up) [tokens, rows / 2] of a weight that is gate over up, rows a multiple of 32. The gate, its silu
// and up are rounded to the type of x.
void linear_gated(const LinearQuantizedArgs& args, Pool& pool) {
    if (args.tokens == 0) return;
    Work work(args, pool);
    const Activations& x = work.x;
    const int64_t half = work.weight.panels() / 2;
    work.run(half, pool, [&](int64_t panel, int64_t first, int64_t last, int thread) {
        void* scratch = pool.scratch(thread, panel_scratch_bytes(work.weight, x.tokens));
        PreparedPanels prepared = prepare(work.weight, {{panel, panel + half}, 2, 1}, x.tokens, scratch);
        for (int64_t tile = first; tile < last; ++tile) {
            alignas(64) Sums sums[2];
            product(prepared, x, tile, sums);
            for (int64_t t = 0; t < x.tokens_of(tile); ++t) {
                f32x16 active = work.cast(silu(work.cast(load(sums[0] + t * kPanel))));
                f32x16 up = work.cast(load(sums[1] + t * kPanel));
                work.put(tile * x.height + t, panel, mul(active, up), kPanel);
            }
        }
    });
}

}  // namespace

}  // namespace sgl::SGL_ISA::quantized

namespace sgl::SGL_ISA {

SGL_KERNELS(quantized_linear,
    SGL_KERNEL("linear_quantized", quantized::linear, LinearQuantizedArgs),
    SGL_KERNEL("linear_quantized_gated", quantized::linear_gated, LinearQuantizedArgs))

}  // namespace sgl::SGL_ISA
