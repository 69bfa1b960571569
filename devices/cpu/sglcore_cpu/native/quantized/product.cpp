#include "product.h"

#include "dots.h"
#include "tile_dots.h"

namespace sgl::SGL_ISA::quantized {

#if SGL_LEVEL >= 6

namespace {

// Up to this, vectors compute sooner: a panel of 8 bits is read from memory for longer, one of 4 must be spread for tiles.
constexpr int64_t kVectorTokens8 = 4, kVectorTokens4 = 12;
SGL_INLINE bool by_vectors(const Weight& weight, int64_t tokens) {
    return tokens <= (weight.bits == 8 ? kVectorTokens8 : kVectorTokens4);
}
constexpr int64_t kFetchingTiles = 4;

}  // namespace

size_t panel_scratch_bytes(const Weight& weight, int64_t tokens) {
    return weight.bits == 4 && !by_vectors(weight, tokens) ? static_cast<size_t>(2 * weight.padded * kPanel) : 0;
}

PreparedPanels prepare(const Weight& weight, const Panels& panels, int64_t tokens, void* scratch) {
    if (by_vectors(weight, tokens)) return {weight, panels, {}};
    if (weight.bits == 8) return {weight, panels, {weight.codes_of(panels.panel[0]), weight.codes_of(panels.panel[1])}};
    auto* codes = static_cast<uint8_t*>(scratch);
    for (int64_t p = 0; p < panels.count; ++p) spread(weight, panels.panel[p], codes + p * weight.padded * kPanel);
    return {weight, panels, {codes, codes + weight.padded * kPanel}};
}

void begin(const Activations& x) {
    if (x.tokens > kVectorTokens8) configure_tiles(x.height, x.group);
}

void product(const PreparedPanels& panels, const Activations& x, int64_t tile, Sums (&sums)[2]) {
    if (!panels.codes[0]) return dots_of_tile(panels.weight, panels.panels, x, tile, sums);
    const Weight& weight = panels.weight;
    // The first tiles share out the panels that follow: memory is not idle while tiles compute.
    int64_t sharers = least(x.tiles(), kFetchingTiles), share = weight.panel_bytes() / 64 / weight.groups() / sharers;
    for (int64_t p = 0; p < panels.panels.count; ++p) {
        const uint8_t* next = weight.codes_of(panels.panels.panel[p] + panels.panels.next);
        BytePanel panel{weight, panels.panels.panel[p], panels.codes[p], next + tile * share * weight.groups() * 64,
                          tile < sharers ? share : 0};
        tile_dots(panel, x, tile, sums[p]);
    }
}

#else

size_t panel_scratch_bytes(const Weight&, int64_t) { return 0; }
PreparedPanels prepare(const Weight& weight, const Panels& panels, int64_t, void*) { return {weight, panels, {}}; }
void begin(const Activations&) {}
void product(const PreparedPanels& panels, const Activations& x, int64_t tile, Sums (&sums)[2]) {
    dots_of_tile(panels.weight, panels.panels, x, tile, sums);
}

#endif

}  // namespace sgl::SGL_ISA::quantized
