// Keys and values into cells of codes and scales.
#include "cells.h"

namespace sgl::SGL_ISA {
namespace {

f32x16 elements(const void* x, int64_t type, int64_t at, int64_t n) {
    if (type == kF32) return load_first(static_cast<const float*>(x) + at, n);
    return load_bf16_first(static_cast<const bf16*>(x) + at, n);
}

// One head. A NaN makes the scale NaN: the code of one would be a number.
void quantize(const void* x, int64_t type, int64_t at, int64_t dim, char* cell) {
    f32x16 most = zero(), nan = zero();
    for (int64_t i = 0; i < dim; i += 16) {
        f32x16 value = elements(x, type, at + i, std::min<int64_t>(16, dim - i));
        most = max(max(value, sub(zero(), value)), most);
        nan = fma(value, zero(), nan);
    }
    float scale = reduce_max(most) / 127.0f + reduce_add(nan);
    f32x16 inverse = set1(scale > 0 ? 1.0f / scale : 0.0f);
    for (int64_t i = 0; i < dim; i += 16) {
        int64_t n = std::min<int64_t>(16, dim - i);
        f32x16 code = mul(elements(x, type, at + i, n), inverse);
        int32_t lanes[16];
        store_i32(lanes, to_i32(max(min(round(code), set1(127.0f)), set1(-127.0f))));
        for (int64_t lane = 0; lane < n; ++lane) cell[i + lane] = static_cast<char>(lanes[lane]);
    }
    std::memcpy(cell + dim, &scale, 4);
}

void store_kv_int8(const StoreInt8Args& args, Pool& pool) {
    int64_t head_bytes = args.dim + 4, cell_bytes = args.kv_heads * head_bytes;
    pool.run(args.tokens, 16, [&](int64_t first, int64_t last, int) {
        for (int64_t token = first; token < last; ++token) {
            int64_t place = static_cast<const int64_t*>(args.locations)[token] * cell_bytes;
            for (int64_t head = 0; head < args.kv_heads; ++head) {
                int64_t at = place + head * head_bytes, from = head * args.dim;
                quantize(args.key, args.type, token * args.key_stride + from, args.dim,
                         static_cast<char*>(args.keys) + at);
                quantize(args.value, args.type, token * args.value_stride + from, args.dim,
                         static_cast<char*>(args.values) + at);
            }
        }
    });
}

}  // namespace

SGL_KERNELS(attention_store,
    SGL_KERNEL("store_kv_int8", store_kv_int8, StoreInt8Args))

}  // namespace sgl::SGL_ISA
