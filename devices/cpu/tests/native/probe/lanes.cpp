#include "isa.h"
#include "probe.h"

namespace sgl::SGL_ISA {

namespace {

struct Operands {
    const float *x, *y, *z;
    float* out;
    int64_t count;

    f32x16 a() const { return load(x); }
    f32x16 b() const { return load(y); }
    f32x16 c() const { return load(z); }
    void put(f32x16 value) const { store(out, value); }
    void put(i32x16 value) const { store_i32(reinterpret_cast<int32_t*>(out), value); }
    i32x16 a_i32() const { return load_i32(reinterpret_cast<const int32_t*>(x)); }
    i32x16 b_i32() const { return load_i32(reinterpret_cast<const int32_t*>(y)); }
    i32x16 c_i32() const { return load_i32(reinterpret_cast<const int32_t*>(z)); }
    bf16* out_bf16() const { return reinterpret_cast<bf16*>(out); }
};

using Function = void (*)(const Operands&);

// In the order of NAMES in test_native_lanes.py.
const Function kFunctions[] = {
    [](const Operands& o) { o.put(add(o.a(), o.b())); },
    [](const Operands& o) { o.put(sub(o.a(), o.b())); },
    [](const Operands& o) { o.put(mul(o.a(), o.b())); },
    [](const Operands& o) { o.put(div(o.a(), o.b())); },
    [](const Operands& o) { o.put(max(o.a(), o.b())); },
    [](const Operands& o) { o.put(min(o.a(), o.b())); },
    [](const Operands& o) { o.put(fma(o.a(), o.b(), o.c())); },
    [](const Operands& o) { o.put(round(o.a())); },
    [](const Operands& o) { o.put(exp(o.a())); },
    [](const Operands& o) { o.put(silu(o.a())); },
    [](const Operands& o) { o.put(rounded(o.a())); },
    [](const Operands& o) { o.put(where_less(o.a(), o.b(), o.c(), o.a())); },
    [](const Operands& o) { o.put(set1(reduce_add(o.a()))); },
    [](const Operands& o) { o.put(set1(reduce_max(o.a()))); },
    [](const Operands& o) { store_first(o.out, load_first(o.x, o.count), o.count); },
    [](const Operands& o) { o.put(load_first(o.x, o.count)); },
    [](const Operands& o) { store_bf16(o.out_bf16(), o.a()); },
    [](const Operands& o) { store_bf16_first(o.out_bf16(), o.a(), o.count); },
    [](const Operands& o) { o.put(load_bf16(reinterpret_cast<const bf16*>(o.x))); },
    [](const Operands& o) { o.put(load_bf16_first(reinterpret_cast<const bf16*>(o.x), o.count)); },
    [](const Operands& o) { o.put(load_f16(reinterpret_cast<const uint16_t*>(o.x))); },
    [](const Operands& o) { o.put(load_i8(reinterpret_cast<const int8_t*>(o.x))); },
    [](const Operands& o) { o.put(load_i8_first(reinterpret_cast<const int8_t*>(o.x), o.count)); },
    [](const Operands& o) { o.put(pair_first(load_line_first(o.x, o.count))); },
    [](const Operands& o) { o.put(pair_first(load_line(o.x))); },
    [](const Operands& o) { o.put(pair_second(load_line(o.x))); },
    [](const Operands& o) { o.put(dot_bf16(o.c(), load_line(o.x), load_line(o.y))); },
    [](const Operands& o) { o.put(dot_bf16(o.c(), load_line(o.x), broadcast4(o.y))); },
    [](const Operands& o) { o.put(add_i32(o.a_i32(), o.b_i32())); },
    [](const Operands& o) { o.put(mul_i32(o.a_i32(), o.b_i32())); },
    [](const Operands& o) { o.put(to_i32(o.a())); },
    [](const Operands& o) { o.put(to_f32(o.a_i32())); },
    [](const Operands& o) { o.put(scale_by_power(o.a(), o.b_i32())); },
    [](const Operands& o) { o.put(dot_u8s8(o.c_i32(), load_line(o.x), load_line(o.y))); },
    [](const Operands& o) { o.put(dot_u4s8(o.c_i32(), low_nibbles(load_line(o.x)), load_line(o.y))); },
    [](const Operands& o) { o.put(dot_u4s8(o.c_i32(), high_nibbles(load_line(o.x)), load_line(o.y))); },
    [](const Operands& o) { store_line(o.out, load_line(o.x)); },
    [](const Operands& o) { store_line(o.out, high_nibbles(load_line(o.x))); },
};

void probe_lanes(const ProbeLanesArgs& args, Pool&) {
    kFunctions[args.function]({static_cast<const float*>(args.x), static_cast<const float*>(args.y),
                               static_cast<const float*>(args.z), static_cast<float*>(args.out), args.count});
}

}  // namespace

SGL_KERNELS(probe_lanes, SGL_KERNEL("probe_lanes", probe_lanes, ProbeLanesArgs))

}  // namespace sgl::SGL_ISA
