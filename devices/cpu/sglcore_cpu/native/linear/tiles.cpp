// Products of bf16 by tiles: two of x, of sixteen tokens each, times two panels, into four of sums.
#include "tiles.h"

#include "product.h"

#if SGL_LEVEL >= 6

namespace sgl::SGL_ISA {
namespace {

constexpr int64_t kTileTokens = 16, kTilePanels = 2;
constexpr int64_t kTileBytes = 1024, kTileDepth = 32;

// x where tiles can be loaded from it: itself, or a copy whose rows are padded with zeros.
struct TileInput {
    const char* data;
    int64_t stride;  // bytes
};

TileInput tile_input(const Product& product, Pool& pool) {
    int64_t row = product.in_features * 2, padded = product.lines * 4;
    if (row == padded) return {product.x, product.x_stride * 2};
    auto* copy = static_cast<char*>(pool.shared(static_cast<size_t>(product.tokens * padded)));
    pool.run(product.tokens, most(1, (64 << 10) / padded), [&](int64_t first, int64_t last, int) {
        for (int64_t token = first; token < last; ++token) {
            std::memcpy(copy + token * padded, product.row(token), static_cast<size_t>(row));
            std::memset(copy + token * padded + row, 0, static_cast<size_t>(padded - row));
        }
    });
    return {copy, padded};
}

// Tiles 0 to 3 are sums, 4 and 5 x, 6 and 7 panels. `tokens` <= 32 are shared out to the two of x.
void configure(int64_t tokens) {
    TileShapes shapes;
    int first = static_cast<int>(least(tokens, kTileTokens)), second = static_cast<int>(tokens) - first;
    for (int tile : {0, 1, 4}) shapes.set(tile, first, 64);
    if (second > 0)
        for (int tile : {2, 3, 5}) shapes.set(tile, second, 64);
    for (int tile : {6, 7}) shapes.set(tile, 16, 64);
    tile_configure(shapes);
}

struct TilePass {
    const char* x;
    int64_t x_stride;
    const char* panels[2];
    int64_t steps;
    float* sums;
    int64_t width;  // of a row of sums, in bytes
    bool is_first;
    int64_t ahead;  // bytes from a tile to one that is fetched into cache beside it; 0: none
};

template <int A, int B>
SGL_INLINE void begin_sums(const TilePass& pass) {
    char* low = reinterpret_cast<char*>(pass.sums);
    char* high = low + kTileTokens * pass.width;
    if (pass.is_first) {
        SGL_TILE_ZERO(0);
        if constexpr (B == 2) SGL_TILE_ZERO(1);
        if constexpr (A == 2) SGL_TILE_ZERO(2);
        if constexpr (A == 2 && B == 2) SGL_TILE_ZERO(3);
        return;
    }
    SGL_TILE_LOAD(0, low, pass.width);
    if constexpr (B == 2) SGL_TILE_LOAD(1, low + 64, pass.width);
    if constexpr (A == 2) SGL_TILE_LOAD(2, high, pass.width);
    if constexpr (A == 2 && B == 2) SGL_TILE_LOAD(3, high + 64, pass.width);
}

template <int A, int B>
SGL_INLINE void end_sums(const TilePass& pass) {
    char* low = reinterpret_cast<char*>(pass.sums);
    char* high = low + kTileTokens * pass.width;
    SGL_TILE_STORE(0, low, pass.width);
    if constexpr (B == 2) SGL_TILE_STORE(1, low + 64, pass.width);
    if constexpr (A == 2) SGL_TILE_STORE(2, high, pass.width);
    if constexpr (A == 2 && B == 2) SGL_TILE_STORE(3, high + 64, pass.width);
}

SGL_INLINE void fetch_tile(const char* at) {
#pragma GCC unroll 16
    for (int64_t line = 0; line < 16; ++line) __builtin_prefetch(at + line * kLineBytes, 0, 2);
}

// Up to 16 A tokens times B panels.
template <int A, int B>
void tile_micro(const TilePass& pass) {
    begin_sums<A, B>(pass);
    const char* x = pass.x;
    for (int64_t offset = 0; offset < pass.steps * kTileBytes; offset += kTileBytes, x += kTileDepth * 2) {
        SGL_TILE_LOAD(6, pass.panels[0] + offset, kLineBytes);
        SGL_TILE_LOAD(4, x, pass.x_stride);
        SGL_TILE_BF16(0, 4, 6);
        if constexpr (B == 2) {
            SGL_TILE_LOAD(7, pass.panels[1] + offset, kLineBytes);
            SGL_TILE_BF16(1, 4, 7);
        }
        if constexpr (A == 2) {
            SGL_TILE_LOAD(5, x + kTileTokens * pass.x_stride, pass.x_stride);
            SGL_TILE_BF16(2, 5, 6);
        }
        if constexpr (A == 2 && B == 2) SGL_TILE_BF16(3, 5, 7);
        if (pass.ahead == 0) continue;
        for (int p = 0; p < B; ++p) fetch_tile(pass.panels[p] + offset + pass.ahead);
    }
    end_sums<A, B>(pass);
}

struct TilePlan {
    int64_t units, run_tokens, part_steps, items, columns;

    explicit TilePlan(const Product& product) {
        // A part of two panels is 32 KiB of first-level cache; x of a run stays in the second level.
        constexpr int64_t few = 2 * kTileTokens, cached = 1 << 20, most_tokens = 512, part = 16;
        units = kTilePanels / product.unit_panels, columns = ceil_div(product.units, units);
        bool is_few = product.tokens <= few;
        int64_t fitting = least(most_tokens, cached / (product.lines * 4)) / few * few;
        run_tokens = is_few ? product.tokens : most(4 * few, fitting);
        part_steps = is_few ? product.lines / kRows : part;
        items = columns * ceil_div(product.tokens, run_tokens);
    }
};

// One item: two panels (or the last one), times its run of tokens.
class TileItem {
  public:
    TileItem(const Product& product, const TilePlan& plan, const TileInput& input, float* sums)
        : product_(product), plan_(plan), input_(input), sums_(sums) {}

    void run(int64_t item) {
        unit_ = item % plan_.columns * plan_.units, first_ = item / plan_.columns * plan_.run_tokens;
        last_ = least(first_ + plan_.run_tokens, product_.tokens);
        int64_t units = least(plan_.units, product_.units - unit_), steps = product_.lines / kRows;
        for (int64_t step = 0; step < steps; step += plan_.part_steps)
            add_part(step, least(plan_.part_steps, steps - step), units * product_.unit_panels);
        finish_units(product_, sums_, kTilePanels * kRows, {first_, last_, unit_, units});
    }

  private:
    void add_part(int64_t step, int64_t steps, int64_t panels) {
        TilePass pass{};
        pass.x_stride = input_.stride, pass.steps = steps;
        pass.width = kTilePanels * kRows * 4, pass.is_first = step == 0;
        for (int64_t i = 0; i < panels; ++i) pass.panels[i] = product_.panel_at(unit_, i) + step * kTileBytes;
        for (int64_t token = first_; token < last_; token += 2 * kTileTokens) {
            int64_t count = least(2 * kTileTokens, last_ - token);
            shape_for(count);
            pass.x = input_.data + token * input_.stride + step * kTileDepth * 2;
            pass.sums = sums_ + (token - first_) * kTilePanels * kRows;
            pass.ahead = token == first_ ? plan_.units * product_.panel_bytes() : 0;
            bool is_tall = count > kTileTokens;
            if (panels == 2)
                is_tall ? tile_micro<2, 2>(pass) : tile_micro<1, 2>(pass);
            else
                is_tall ? tile_micro<2, 1>(pass) : tile_micro<1, 1>(pass);
        }
    }

    void shape_for(int64_t tokens) {
        if (shaped_ != tokens) configure(tokens);
        shaped_ = tokens;
    }

    const Product& product_;
    const TilePlan& plan_;
    const TileInput& input_;
    float* sums_;
    int64_t unit_ = 0, first_ = 0, last_ = 0, shaped_ = 0;
};

}  // namespace

void multiply_tiles(const Product& product, Pool& pool) {
    TilePlan plan(product);
    TileInput input = tile_input(product, pool);
    size_t sums = static_cast<size_t>(ceil_div(plan.run_tokens, kTileTokens) * kTileTokens * kTilePanels * kRows) * 4;
    int64_t run_weights = kTilePanels * product.panel_bytes() * ceil_div(plan.run_tokens, 2 * kTileTokens);
    int64_t grain = claim_size(plan.items, run_weights, pool.threads());
    pool.run(plan.items, grain, [&](int64_t first, int64_t last, int thread) {
        TileItem item(product, plan, input, static_cast<float*>(pool.scratch(thread, sums)));
        for (int64_t i = first; i < last; ++i) item.run(i);
    });
}

}  // namespace sgl::SGL_ISA

#endif
