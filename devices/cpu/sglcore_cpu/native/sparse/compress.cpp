// Blocks of tokens as one row: a softmax of each channel weighs them. Then the state goes on, when all have read.
//
// Floor: what events read, and each token's values and gates read and written once.
#include "../attention/softmax.h"
#include "sparse.h"

// Values and gates side by side, [.., 2 * width]: kv_gate [tokens] of `type`, state f32. Event n reads `span` tokens: token
// i >= 0, row -2 - i of the state for i < -1, nothing for -1; out [events, width * ratio / span]. Then token t goes to row
// writes[t] (of `index_bytes`) of the state.
#define SGL_COMPRESS_ARGS(P, I, D)                                                                                \
    P(kv_gate) I(kv_gate_stride) P(state) I(state_stride) P(ape) P(reads) P(writes) I(index_bytes) P(out)          \
    I(tokens) I(events) I(span) I(ratio) I(width) I(type)
SGL_ARGS(CompressArgs, SGL_COMPRESS_ARGS)

namespace sgl::SGL_ISA {
namespace {

constexpr int64_t kChannels = 64;

template <class T>
class Compressor {
  public:
    explicit Compressor(const CompressArgs& args)
        : args_(args), out_size_(args.width * args.ratio / args.span), reads_(static_cast<const int32_t*>(args.reads)) {}

    int64_t out_size() const { return out_size_; }

    void strip(int64_t event, int64_t first) const {
        T* out = row_of<T>(args_.out, event, out_size_);
        int64_t last = std::min(first + kChannels, out_size_);
        for (int64_t at = first; at < last; at += 16) {
            const int32_t* reads = reads_ + event * args_.span;
            int64_t left = out_size_ - at;
            f32x16 top = set1(kLowest), total = zero(), sum = zero();
            for (int64_t i = 0; i < args_.span; ++i)
                if (reads[i] != -1) top = max(gate(reads[i], i, at, left), top);
            for (int64_t i = 0; i < args_.span; ++i) {
                if (reads[i] == -1) continue;
                f32x16 weight = power_of_two(sub(gate(reads[i], i, at, left), top));
                total = add(total, weight);
                sum = fma(weight, element(reads[i], channel(i, at), left), sum);
            }
            put(out + at, where_less(total, set1(0.5f), zero(), div(sum, total)), left);
        }
    }

    void keep(int64_t token) const {
        int64_t row = index_at(args_.writes, args_.index_bytes, token);
        const T* from = row_of<T>(args_.kv_gate, token, args_.kv_gate_stride);
        float* to = row_of<float>(args_.state, row, args_.state_stride);
        for (int64_t i = 0; i < 2 * args_.width; i += 16) put(to + i, get(from + i, 2 * args_.width - i), 2 * args_.width - i);
    }

  private:
    // Where two blocks are read, the newer counts by the second half of its channels.
    int64_t channel(int64_t place, int64_t at) const { return place / args_.ratio * out_size_ + at; }

    f32x16 element(int64_t read, int64_t at, int64_t left) const {
        if (read >= 0) return get(row_of<T>(args_.kv_gate, read, args_.kv_gate_stride) + at, left);
        return get(row_of<float>(args_.state, -2 - read, args_.state_stride) + at, left);
    }

    // To the base two.
    f32x16 gate(int64_t read, int64_t place, int64_t at, int64_t left) const {
        const float* ape = row_of<float>(args_.ape, place % args_.ratio, args_.width);
        int64_t own = channel(place, at);
        return mul(add(element(read, args_.width + own, left), get(ape + own, left)), set1(kLog2E));
    }

    const CompressArgs& args_;
    int64_t out_size_;
    const int32_t* reads_;
};

void compress(const CompressArgs& args, Pool& pool) {
    with_type(args.type, [&](auto element) {
        Compressor<decltype(element)> compressor(args);
        int64_t strips = (compressor.out_size() + kChannels - 1) / kChannels;
        pool.run(args.events * strips, rows_of_part(4 * args.span * kChannels), [&](int64_t first, int64_t last, int) {
            for (int64_t i = first; i < last; ++i) compressor.strip(i / strips, i % strips * kChannels);
        });
        each_row(pool, args.tokens, 2 * args.width, [&](int64_t token, int) { compressor.keep(token); });
    });
}

}  // namespace

SGL_KERNELS(sparse_compress,
    SGL_KERNEL("compress", compress, CompressArgs))

}  // namespace sgl::SGL_ISA
