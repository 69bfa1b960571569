// Rows into panels, and back out of them.
#include <limits>
#include <type_traits>

#include "product.h"

namespace sgl::SGL_ISA {
namespace {

constexpr int64_t kWords = 16;  // of four bytes, of each row at a time: a line of cache

float widened(float value) { return value; }
float widened(bf16 value) { return from_bf16(value); }
void narrow_to(float* to, float value) { *to = value; }
void narrow_to(bf16* to, float value) { *to = to_bf16(value); }

// `count` values from `from`, which may lie at any address, as those of another type.
template <class From, class To>
void convert(const char* from, To* to, int64_t count) {
    if constexpr (std::is_same_v<From, To>) {
        std::memcpy(to, from, static_cast<size_t>(count) * sizeof(To));
        return;
    }
    for (int64_t i = 0; i < count; ++i) {
        From value;
        std::memcpy(&value, from + i * sizeof(From), sizeof(From));
        narrow_to(to + i, widened(value));
    }
}

// Sixteen lines of a panel: of each of its rows, `count` values from `input` on.
template <class From, class To>
void pack_lines(const PackArgs& args, int64_t first_row, int64_t input, int64_t count, uint32_t* to) {
    constexpr int64_t per_word = 4 / sizeof(To);
    int64_t rows = least(kRows, args.out_features - first_row);
    const auto* from = static_cast<const char*>(args.source) + (first_row * args.source_stride + input) * sizeof(From);
    alignas(64) To values[kWords * per_word] = {};
    if (rows < kRows) std::memset(to, 0, kWords * kLineBytes);
    for (int64_t r = 0; r < rows; ++r, from += args.source_stride * sizeof(From)) {
        convert<From>(from, values, least(count, kWords * per_word));
        for (int64_t i = 0; i < kWords; ++i) std::memcpy(to + i * kRows + r, values + i * per_word, 4);
    }
}

template <class From, class To>
void pack_panel(const PackArgs& args, int64_t panel) {
    constexpr int64_t per_word = 4 / sizeof(To);
    int64_t lines = panel_lines(args.type, args.in_features);
    auto* to = static_cast<uint32_t*>(args.panels) + panel * lines * kRows;
    for (int64_t line = 0; line < lines; line += kWords, to += kWords * kRows) {
        int64_t input = line * per_word, count = args.in_features - input;
        if (lines - line >= kWords) {
            pack_lines<From, To>(args, panel * kRows, input, count, to);
            continue;
        }
        alignas(64) uint32_t last[kWords * kRows];
        pack_lines<From, To>(args, panel * kRows, input, count, last);
        std::memcpy(to, last, static_cast<size_t>((lines - line) * kLineBytes));
    }
}

template <class From, class To>
void copy_row(const RowsArgs& args, int64_t row, To* to) {
    constexpr int64_t per_word = 4 / sizeof(From);
    int64_t lines = panel_lines(args.type, args.in_features);
    const auto* from = static_cast<const uint32_t*>(args.panels) + row / kRows * lines * kRows + row % kRows;
    for (int64_t input = 0; input < args.in_features; input += per_word, from += kRows)
        convert<From>(reinterpret_cast<const char*>(from), to + input, least(per_word, args.in_features - input));
}

int64_t id_at(const RowsArgs& args, int64_t token) {
    if (args.id_bytes == 8) return static_cast<const int64_t*>(args.ids)[token];
    return static_cast<const int32_t*>(args.ids)[token];
}

template <class From, class To>
void copy_rows(const RowsArgs& args, int64_t first, int64_t last) {
    for (int64_t token = first; token < last; ++token) {
        int64_t row = id_at(args, token);
        To* to = static_cast<To*>(args.out) + token * args.out_stride;
        if (row >= 0 && row < args.out_features) {
            copy_row<From>(args, row, to);
            continue;
        }
        for (int64_t i = 0; i < args.in_features; ++i) narrow_to(to + i, std::numeric_limits<float>::quiet_NaN());
    }
}

void pack_panels(const PackArgs& args, Pool& pool) {
    bool is_from_f32 = args.source_type == kF32, is_to_f32 = args.type == kF32;
    auto pack = is_from_f32 ? (is_to_f32 ? pack_panel<float, float> : pack_panel<float, bf16>)
                            : (is_to_f32 ? pack_panel<bf16, float> : pack_panel<bf16, bf16>);
    int64_t panels = ceil_div(args.out_features, kRows);
    int64_t grain = claim_size(panels, panel_lines(args.type, args.in_features) * kLineBytes, pool.threads());
    pool.run(panels, grain, [&](int64_t first, int64_t last, int) {
        for (int64_t panel = first; panel < last; ++panel) pack(args, panel);
    });
}

void panel_rows(const RowsArgs& args, Pool& pool) {
    bool is_from_f32 = args.type == kF32, is_to_f32 = args.out_type == kF32;
    auto copy = is_from_f32 ? (is_to_f32 ? copy_rows<float, float> : copy_rows<float, bf16>)
                            : (is_to_f32 ? copy_rows<bf16, float> : copy_rows<bf16, bf16>);
    pool.run(args.tokens, 8, [&](int64_t first, int64_t last, int) { copy(args, first, last); });
}

}  // namespace

SGL_KERNELS(linear_pack,
    SGL_KERNEL("pack_panels", pack_panels, PackArgs),
    SGL_KERNEL("panel_rows", panel_rows, RowsArgs))

}  // namespace sgl::SGL_ISA
