#include "recurrent.h"

// out [tokens, size] = the sum over j of weight[j] * x[t - taps + 1 + j], plus bias if that is not null, and its silu if
// wanted; weight [taps, size], tails [.., taps - 1, size] of `type`.
#define SGL_CAUSAL_CONV_ARGS(P, I, D) \
    P(x) I(x_stride) P(weight) P(bias) I(silu) P(tails) P(out) I(size) I(taps) SGL_ROWS_ARGS(P, I)
SGL_ARGS(CausalConvArgs, SGL_CAUSAL_CONV_ARGS)

namespace sgl::SGL_ISA {

namespace {

constexpr int64_t kChannels = 64;

// The tokens of one row, `count` <= 16 channels of it. Floor: x and out once, and a tail read and written.
template <class T>
void convolve(const CausalConvArgs& args, const Row& row, int64_t channel, int64_t count) {
    int64_t past = args.taps - 1;
    T* tail = static_cast<T*>(args.tails) + row.slot * past * args.size + channel;
    const T* weight = static_cast<const T*>(args.weight) + channel;
    const T* x = row_of<T>(args.x, row.first, args.x_stride) + channel;
    T* out = row_of<T>(args.out, row.first, args.size) + channel;
    f32x16 bias = args.bias ? get(static_cast<const T*>(args.bias) + channel, count) : zero();
    int64_t length = row.last - row.first;
    // What stood `past - place` tokens before the row's first of this step.
    auto at = [&](int64_t place) {
        return get(place < past ? tail + place * args.size : x + (place - past) * args.x_stride, count);
    };
    for (int64_t token = 0; token < length; ++token) {
        f32x16 sum = bias;
        for (int64_t tap = 0; tap < args.taps; ++tap) sum = fma(at(token + tap), get(weight + tap * args.size, count), sum);
        sum = cast<T>(sum);
        put(out + token * args.size, args.silu ? silu(sum) : sum, count);
    }
    if (!row.target) return;
    T* to = static_cast<T*>(args.tails) + row.target * past * args.size + channel;
    for (int64_t place = 0; place < past; ++place) put(to + place * args.size, at(length + place), count);
}

void causal_conv(const CausalConvArgs& args, Pool& pool) {
    with_type(args.type, [&](auto element) {
        using T = decltype(element);
        int64_t parts = (args.size + kChannels - 1) / kChannels;
        each_part<T>(pool, args, parts, 4 * kChannels, args.size, [&](const Row& row, int64_t part, int) {
            int64_t last = std::min(args.size, (part + 1) * kChannels);
            for (int64_t i = part * kChannels; i < last; i += 16) convolve<T>(args, row, i, std::min<int64_t>(16, last - i));
        });
    });
}

}  // namespace

SGL_KERNELS(recurrent_convolution,
    SGL_KERNEL("causal_conv", causal_conv, CausalConvArgs))

}  // namespace sgl::SGL_ISA
