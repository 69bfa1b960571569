#include <limits>

#include "pack.h"
#include "search.h"

namespace sgl::SGL_ISA::quantized {

namespace {

// The largest magnitude of a row; NaN where a value is not finite.
float row_magnitude(const QuantizeRowsArgs& args, int64_t row) {
    const void* values = row_of(static_cast<const void*>(args.source), args.source_type, args.source_stride, row);
    f32x16 largest = zero(), poison = zero();
    for (int64_t at = 0; at < args.columns; at += 16) {
        f32x16 value = load_row(values, args.source_type, at, least(16, args.columns - at));
        largest = max(largest, max(value, sub(zero(), value)));
        poison = fma(value, zero(), poison);
    }
    return reduce_max(largest) + reduce_add(poison);
}

// Of the whole weight, by all threads.
float magnitude(const QuantizeRowsArgs& args, Pool& pool) {
    auto* largest = static_cast<float*>(pool.shared(static_cast<size_t>(args.rows) * sizeof(float)));
    pool.run(args.rows, 16, [&](int64_t first, int64_t last, int) {
        for (int64_t row = first; row < last; ++row) largest[row] = row_magnitude(args, row);
    });
    float all = 0.0f;
    for (int64_t row = 0; row < args.rows; ++row)
        if (!(largest[row] <= all)) all = std::isnan(all) ? all : largest[row];
    return all;
}

// A power of two that brings the largest scale to at most 2^15, near the top of float16's range.
double multiplier_of(float magnitude) {
    if (!(magnitude > 0.0f)) return magnitude == 0.0f ? 1.0 : std::numeric_limits<double>::quiet_NaN();
    return std::ldexp(1.0, (magnitude < 1e-30f ? -100 : std::ilogb(magnitude)) - 15);
}

struct Quantizer {
    const QuantizeRowsArgs& args;
    Weight weight;
    float multiplier;

    void panel(int64_t panel) const {
        f32x16 values[128];
        for (int64_t group = 0; group < weight.groups(); ++group) {
            read(panel, group, values);
            Fit fit = stored(panel, group, choose(values));
            f32x16 inverse = inverse_of(fit.scale);
            auto high = static_cast<float>(2 * weight.middle() - 1), low = weight.bits == 8 ? 1.0f : 0.0f;
            for (int64_t i = 0; i < weight.group; ++i)
                values[i] = clamp(round(fma(values[i], inverse, fit.zero)), low, high);
            put_codes(weight, values, weight.codes_of(panel) + group * weight.group * kPanel * weight.bits / 8);
        }
    }

  private:
    // The group's columns, lanes are rows; zeros beyond the weight.
    void read(int64_t panel, int64_t group, f32x16* values) const {
        alignas(64) float lanes[16];
        auto* target = reinterpret_cast<float*>(values);
        for (int64_t row = 0; row < kPanel; ++row) {
            bool is_there = row < weight.width(panel);
            const void* source = row_of(static_cast<const void*>(args.source), args.source_type, args.source_stride,
                                        is_there ? panel * kPanel + row : 0);
            for (int64_t at = 0; at < weight.group; at += 16) {
                int64_t column = group * weight.group + at, count = is_there ? least(16, weight.columns - column) : 0;
                store(lanes, count > 0 ? load_row(source, args.source_type, column, count) : zero());
                for (int64_t i = 0; i < 16; ++i) target[(at + i) * kPanel + row] = lanes[i];
            }
        }
    }

    Fit choose(const f32x16* values) const {
        Extremes all = extremes(values, weight.group);
        if (weight.bits == 4)
            return weight.zeros ? search_line(values, weight.group, all) : search_scale(values, weight.group, all);
        f32x16 most = max(all.high, sub(zero(), all.low));
        return {div(most, set1(127.0f)), set1(128.0f), zero()};
    }

    // What the kernels will read: the scale and the zero as float16 hold them.
    Fit stored(int64_t panel, int64_t group, Fit fit) const {
        f32x16 scale = put_f16(weight.scales_of(panel) + group * kPanel, div(fit.scale, set1(multiplier)));
        fit.scale = mul(scale, set1(multiplier));
        if (weight.zeros) fit.zero = put_f16(weight.zeros_of(panel) + group * kPanel, fit.zero);
        return fit;
    }

    // 0 for a scale of 0.
    static f32x16 inverse_of(f32x16 scale) {
        return sub(ratio(set1(1.0f), scale), ratio(set1(1.0f), sub(zero(), scale)));
    }
};

void quantize_rows(const QuantizeRowsArgs& args, Pool& pool) {
    double multiplier = multiplier_of(magnitude(args, pool));
    *static_cast<double*>(args.chosen) = multiplier;
    if (std::isnan(multiplier)) return;
    Quantizer quantizer{args, Weight(args), static_cast<float>(multiplier)};
    pool.run(quantizer.weight.panels(), 1, [&](int64_t first, int64_t last, int) {
        for (int64_t panel = first; panel < last; ++panel) quantizer.panel(panel);
    });
}

}  // namespace

}  // namespace sgl::SGL_ISA::quantized

namespace sgl::SGL_ISA {

SGL_KERNELS(quantized_quantize,
    SGL_KERNEL("quantize_rows", quantized::quantize_rows, QuantizeRowsArgs))

}  // namespace sgl::SGL_ISA
