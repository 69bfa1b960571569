#include "pack.h"

namespace sgl::SGL_ISA::quantized {

namespace {

// Sixteen rows' values for one group, [group][row]; the middle or 0 where the weight has none.
void read_values(const float* source, const Weight& weight, int64_t panel, int64_t group, float beyond, float* out) {
    int64_t groups = parts(weight.columns, weight.group);
    for (int64_t row = 0; row < kPanel; ++row) {
        bool is_there = row < weight.width(panel) && group < groups;
        out[row] = is_there ? source[(panel * kPanel + row) * groups + group] : beyond;
    }
}

struct CodePacker {
    const PackCodesArgs& args;
    Weight weight;

    void panel(int64_t panel) const {
        f32x16 codes[128];
        for (int64_t group = 0; group < weight.groups(); ++group) {
            parameters(panel, group);
            alignas(64) float lanes[16];
            for (int64_t i = 0; i < weight.group; ++i) {
                for (int64_t row = 0; row < kPanel; ++row) lanes[row] = code(panel, row, group * weight.group + i);
                codes[i] = load(lanes);
            }
            put_codes(weight, codes, weight.codes_of(panel) + group * weight.group * kPanel * weight.bits / 8);
        }
    }

  private:
    float code(int64_t panel, int64_t row, int64_t column) const {
        if (row >= weight.width(panel) || column >= weight.columns) return static_cast<float>(weight.middle());
        return static_cast<const uint8_t*>(args.source)[(panel * kPanel + row) * args.source_stride + column];
    }

    void parameters(int64_t panel, int64_t group) const {
        alignas(64) float values[16];
        read_values(static_cast<const float*>(args.source_scales), weight, panel, group, 0.0f, values);
        f32x16 scales = mul(load(values), set1(static_cast<float>(1.0 / args.multiplier)));
        put_f16(weight.scales_of(panel) + group * kPanel, scales);
        if (!weight.zeros) return;
        auto beyond = static_cast<float>(weight.middle());
        read_values(static_cast<const float*>(args.source_zeros), weight, panel, group, beyond, values);
        put_f16(weight.zeros_of(panel) + group * kPanel, load(values));
    }
};

void pack_codes(const PackCodesArgs& args, Pool& pool) {
    CodePacker packer{args, Weight(args)};
    pool.run(packer.weight.panels(), 1, [&](int64_t first, int64_t last, int) {
        for (int64_t panel = first; panel < last; ++panel) packer.panel(panel);
    });
}

}  // namespace

}  // namespace sgl::SGL_ISA::quantized

namespace sgl::SGL_ISA {

SGL_KERNELS(quantized_pack,
    SGL_KERNEL("pack_codes", quantized::pack_codes, PackCodesArgs))

}  // namespace sgl::SGL_ISA
