// A quantised weight as plain numbers.
#include <limits>

#include "args.h"
#include "weight.h"

namespace sgl::SGL_ISA::quantized {

namespace {

struct RowReader {
    Weight weight;
    float multiplier;
    void* out;
    int64_t out_stride, type;

    template <class Args>
    explicit RowReader(const Args& args)
        : weight(args),
          multiplier(static_cast<float>(args.multiplier)),
          out(args.out),
          out_stride(args.out_stride),
          type(args.out_type) {}

    void read(int64_t row, int64_t place) const {
        void* target = row_of(out, type, out_stride, place);
        for (int64_t column = 0; column < weight.columns; column += 16)
            store_row(target, type, column, values(row, column), least(16, weight.columns - column));
    }

    void fill(int64_t place, float value) const {
        void* target = row_of(out, type, out_stride, place);
        for (int64_t column = 0; column < weight.columns; column += 16)
            store_row(target, type, column, set1(value), least(16, weight.columns - column));
    }

  private:
    // scale * (code - zero) of sixteen columns, which lie in one group.
    f32x16 values(int64_t row, int64_t column) const {
        int64_t panel = row / kPanel, lane = row % kPanel, place = column / weight.group * kPanel;
        alignas(64) float lanes[16];
        store(lanes, load_f16(weight.scales_of(panel) + place));
        f32x16 scale = set1(lanes[lane] * multiplier), shift = set1(static_cast<float>(weight.middle()));
        if (weight.zeros) {
            store(lanes, load_f16(weight.zeros_of(panel) + place));
            shift = set1(lanes[lane]);
        }
        codes(weight.codes_of(panel) + lane * 4, column, lanes);
        return mul(scale, sub(load(lanes), shift));
    }

    void codes(const uint8_t* panel, int64_t column, float* out) const {
        for (int64_t i = 0; i < 16; ++i) {
            int64_t k = column + i;
            if (weight.bits == 8) {
                out[i] = panel[k / 4 * 64 + k % 4];
            } else {
                uint8_t both = panel[k / 8 * 64 + k % 4];
                out[i] = static_cast<float>(k % 8 < 4 ? both & 15 : both >> 4);
            }
        }
    }
};

int64_t id_at(const QuantizedRowsArgs& args, int64_t place) {
    if (args.id_bytes == 8) return static_cast<const int64_t*>(args.ids)[place];
    return static_cast<const int32_t*>(args.ids)[place];
}

void quantized_rows(const QuantizedRowsArgs& args, Pool& pool) {
    RowReader reader(args);
    pool.run(args.count, 4, [&](int64_t first, int64_t last, int) {
        for (int64_t place = first; place < last; ++place) {
            int64_t row = id_at(args, place);
            if (row >= 0 && row < args.rows) reader.read(row, place);
            else reader.fill(place, std::numeric_limits<float>::quiet_NaN());
        }
    });
}

void dequantize(const DequantizeArgs& args, Pool& pool) {
    RowReader reader(args);
    pool.run(args.rows, kPanel, [&](int64_t first, int64_t last, int) {
        for (int64_t row = first; row < last; ++row) reader.read(row, row);
    });
}

}  // namespace

}  // namespace sgl::SGL_ISA::quantized

namespace sgl::SGL_ISA {

SGL_KERNELS(quantized_rows,
    SGL_KERNEL("quantized_rows", quantized::quantized_rows, QuantizedRowsArgs),
    SGL_KERNEL("dequantize", quantized::dequantize, DequantizeArgs))

}  // namespace sgl::SGL_ISA
