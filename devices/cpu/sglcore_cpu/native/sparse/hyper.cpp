// Manifold-constrained hyper-connections (Xie et al. 2025): how a layer's streams are mixed, by the streams themselves.
#include <algorithm>

#include "../attention/softmax.h"
#include "../attention/sums.h"
#include "sparse.h"

// h [tokens, streams, size]; fn [mixes, streams * size], base [mixes], scale, post [tokens, streams] and comb [tokens, streams,
// streams] f32; x [tokens, size]. `mixes` is (2 + streams) * streams, or `streams` where post and comb are null.
#define SGL_HC_PRE_ARGS(P, I, D)                                                                                  \
    P(h) I(h_stride) P(fn) P(base) P(scale) P(x) P(post) P(comb) I(tokens) I(streams) I(size) D(norm_eps) D(hc_eps) I(iters) I(type)
SGL_ARGS(HcPreArgs, SGL_HC_PRE_ARGS)

// out[t, k] = post[t, k] * x[t] + the sum over j of comb[t, j, k] * h[t, j].
#define SGL_HC_POST_ARGS(P, I, D) \
    P(x) I(x_stride) P(h) I(h_stride) P(post) P(comb) P(out) I(tokens) I(streams) I(size) I(type)
SGL_ARGS(HcPostArgs, SGL_HC_POST_ARGS)

namespace sgl::SGL_ISA {
namespace {

constexpr int64_t kColumns = 1024;  // of one work item; sums depend on it and on nothing else of the batch
constexpr int64_t kTokens = 48, kLanes = 16;
constexpr int kRows = SGL_LEVEL >= 3 ? 8 : 4, kTogether = SGL_LEVEL >= 3 ? 3 : 1;  // rows and tokens whose sums stay in registers

// out[v * out_stride + r] = rows[r] . x[v] over `size` elements, of V tokens.
template <int V, class T>
void dots(const float* const (&rows)[kRows], const T* x, int64_t x_stride, int64_t size, float* out, int64_t out_stride) {
    f32x16 sums[V][kRows];
    for (int v = 0; v < V; ++v)
        for (int r = 0; r < kRows; ++r) sums[v][r] = zero();
    int64_t i = 0;
    for (; i + 16 <= size; i += 16) {
        f32x16 values[V];
        for (int v = 0; v < V; ++v) values[v] = load16(x + v * x_stride + i);
        for (int r = 0; r < kRows; ++r) {
            f32x16 row = load(rows[r] + i);
            for (int v = 0; v < V; ++v) sums[v][r] = fma(row, values[v], sums[v][r]);
        }
    }
    for (int v = 0; v < V && i < size; ++v)
        for (int r = 0; r < kRows; ++r)
            sums[v][r] = fma(get(rows[r] + i, size - i), get(x + v * x_stride + i, size - i), sums[v][r]);
    for (int at = 0; at < V * kRows; at += 16) {
        f32x16 part[16];
        for (int lane = 0; lane < 16; ++lane)
            part[kPlaceOfSum[lane]] = at + lane < V * kRows ? sums[(at + lane) / kRows][(at + lane) % kRows] : zero();
        alignas(64) float found[16];
        store(found, sixteen_sums(part));
        for (int i = at; i < std::min(at + 16, V * kRows); ++i) out[i / kRows * out_stride + i % kRows] = found[i - at];
    }
}

template <class T>
float squares(const T* x, int64_t size) {
    f32x16 sums[4] = {zero(), zero(), zero(), zero()};
    int64_t i = 0;
    for (; i + 64 <= size; i += 64)
        for (int part = 0; part < 4; ++part) {
            f32x16 value = load16(x + i + 16 * part);
            sums[part] = fma(value, value, sums[part]);
        }
    for (; i < size; i += 16) {
        f32x16 value = get(x + i, size - i);
        sums[0] = fma(value, value, sums[0]);
    }
    return reduce_add(add(add(sums[0], sums[1]), add(sums[2], sums[3])));
}

// What follows works on sixteen tokens, one in each lane.
SGL_INLINE f32x16 sigmoid(f32x16 x) { return div(set1(1.0f), add(set1(1.0f), exp(sub(zero(), x)))); }

// Brings `n` vectors, `step` lanes apart, to a sum of 1.
void bring_to_one(float* x, int64_t n, int64_t step, f32x16 eps) {
    f32x16 total = eps;
    for (int64_t i = 0; i < n; ++i) total = add(total, load(x + i * step));
    f32x16 inverse = div(set1(1.0f), total);
    for (int64_t i = 0; i < n; ++i) store(x + i * step, mul(load(x + i * step), inverse));
}

// comb [n][n] of logits: a softmax of each row, then columns and rows brought to length 1 by turns.
void balance(float* comb, int64_t n, f32x16 eps, int64_t iters) {
    constexpr int64_t step = kLanes;
    for (int64_t j = 0; j < n; ++j) {
        float* row = comb + j * n * step;
        f32x16 most = load(row);
        for (int64_t k = 1; k < n; ++k) most = max(load(row + k * step), most);
        for (int64_t k = 0; k < n; ++k) store(row + k * step, exp(sub(load(row + k * step), most)));
        bring_to_one(row, n, step, zero());
        for (int64_t k = 0; k < n; ++k) store(row + k * step, add(load(row + k * step), eps));
    }
    for (int64_t iter = 0; iter < iters; ++iter) {
        for (int64_t j = 0; iter > 0 && j < n; ++j) bring_to_one(comb + j * n * step, n, step, eps);
        for (int64_t k = 0; k < n; ++k) bring_to_one(comb + k * step, n, n * step, eps);
    }
}

template <class T>
class Mixer {
  public:
    Mixer(const HcPreArgs& args, Pool& pool)
        : args_(args), pool_(pool), flat_(args.streams * args.size), chunks_((flat_ + kColumns - 1) / kColumns),
          mixes_(args.comb == nullptr ? args.streams : (2 + args.streams) * args.streams), padded_(mixes_ + kRows) {}

    void run() {
        auto* partial = static_cast<float*>(pool_.shared(static_cast<size_t>(args_.tokens * chunks_ * padded_) * 4));
        int64_t rounds = (args_.tokens + kTokens - 1) / kTokens;
        if (rounds >= pool_.threads())  // the tokens of a round stay near until they are mixed
            return pool_.run(rounds, 1, [&](int64_t begin, int64_t end, int thread) {
                for (int64_t token = begin * kTokens; token < std::min(end * kTokens, args_.tokens); token += kTokens) {
                    for (int64_t chunk = 0; chunk < chunks_; ++chunk) add_up(chunk, token, partial);
                    mix_all(token, std::min(token + kTokens, args_.tokens), partial, thread);
                }
            });
        pool_.run(chunks_ * rounds, 1, [&](int64_t begin, int64_t end, int) {
            for (int64_t item = begin; item < end; ++item) add_up(item / rounds, item % rounds * kTokens, partial);
        });
        int64_t groups = (args_.tokens + kLanes - 1) / kLanes;
        pool_.run(groups, rows_of_part(2 * kLanes * flat_), [&](int64_t begin, int64_t end, int thread) {
            mix_all(begin * kLanes, std::min(end * kLanes, args_.tokens), partial, thread);
        });
    }

  private:
    // A chunk of the columns of some tokens: every row's product, then the sum of the squares. Rows that are read together
    // stay in the nearest cache while the tokens pass.
    void add_up(int64_t chunk, int64_t first, float* partial) const {
        int64_t begin = chunk * kColumns, count = std::min(kColumns, flat_ - begin), step = chunks_ * padded_;
        int64_t last = std::min(first + kTokens, args_.tokens);
        auto h = [&](int64_t token) { return row_of<T>(args_.h, token, args_.h_stride) + begin; };
        auto out = [&](int64_t token) { return partial + (token * chunks_ + chunk) * padded_; };
        for (int64_t row = 0; row < mixes_; row += kRows) {
            const float* rows[kRows];
            for (int64_t r = 0; r < kRows; ++r) rows[r] = row_of<float>(args_.fn, std::min(row + r, mixes_ - 1), flat_) + begin;
            const float* const(&fixed)[kRows] = rows;
            int64_t token = first;
            for (; token + kTogether <= last; token += kTogether)
                dots<kTogether>(fixed, h(token), args_.h_stride, count, out(token) + row, step);
            for (; token < last; ++token) dots<1>(fixed, h(token), args_.h_stride, count, out(token) + row, step);
        }
        for (int64_t token = first; token < last; ++token) out(token)[mixes_] = squares(h(token), count);
    }

    void mix_all(int64_t first, int64_t last, const float* partial, int thread) const {
        for (; first < last; first += kLanes) mix(first, std::min(first + kLanes, last), partial, thread);
    }

    // Up to sixteen tokens.
    void mix(int64_t first, int64_t last, const float* partial, int thread) const {
        int64_t count = last - first, n = args_.streams;
        auto* lanes = static_cast<float*>(pool_.scratch(thread, static_cast<size_t>((mixes_ + 1) * kLanes) * 4));
        std::fill_n(lanes, (mixes_ + 1) * kLanes, 0.0f);
        for (int64_t t = 0; t < count; ++t) {
            const float* sums = partial + (first + t) * chunks_ * padded_;
            for (int64_t chunk = 0; chunk < chunks_; ++chunk)
                for (int64_t i = 0; i <= mixes_; ++i) lanes[i * kLanes + t] += sums[chunk * padded_ + i];
            float& square = lanes[mixes_ * kLanes + t];
            square = 1.0f / std::sqrt(square / static_cast<float>(flat_) + static_cast<float>(args_.norm_eps));
        }
        f32x16 factor = load(lanes + mixes_ * kLanes), eps = set1(static_cast<float>(args_.hc_eps));
        const auto *base = static_cast<const float*>(args_.base), *scale = static_cast<const float*>(args_.scale);
        for (int64_t i = 0; i < mixes_; ++i) {
            f32x16 share = set1(scale[std::min<int64_t>(i / n, 2)]);
            f32x16 logit = fma(mul(load(lanes + i * kLanes), factor), share, set1(base[i]));
            if (i < n) logit = add(sigmoid(logit), eps);
            else if (i < 2 * n) logit = mul(set1(2.0f), sigmoid(logit));
            store(lanes + i * kLanes, logit);
        }
        if (args_.comb != nullptr) balance(lanes + 2 * n * kLanes, n, eps, args_.iters);
        for (int64_t t = 0; t < count; ++t) {
            collapse(first + t, lanes + t);
            for (int64_t i = n; i < mixes_; ++i) {
                bool is_post = i < 2 * n;
                float* out = row_of<float>(is_post ? args_.post : args_.comb, first + t, is_post ? n : n * n);
                out[i - (is_post ? n : 2 * n)] = lanes[i * kLanes + t];
            }
        }
    }

    void collapse(int64_t token, const float* shares) const {
        const T* h = row_of<T>(args_.h, token, args_.h_stride);
        for (int64_t i = 0; i < args_.size; i += 16) {
            f32x16 sum = zero();
            for (int64_t stream = 0; stream < args_.streams; ++stream)
                sum = fma(set1(shares[stream * kLanes]), get(h + stream * args_.size + i, args_.size - i), sum);
            put(row_of<T>(args_.x, token, args_.size) + i, sum, args_.size - i);
        }
    }

    const HcPreArgs& args_;
    Pool& pool_;
    int64_t flat_, chunks_, mixes_, padded_;
};

// The elements [first, last) of one token. N: how many streams, or 0 for any.
template <int N, class T>
void widen_strip(const HcPostArgs& args, int64_t token, int64_t first, int64_t last) {
    const int64_t n = N ? N : args.streams;
    const T *x = row_of<T>(args.x, token, args.x_stride), *h = row_of<T>(args.h, token, args.h_stride);
    const float *post = row_of<float>(args.post, token, n), *comb = row_of<float>(args.comb, token, n * n);
    T* out = row_of<T>(args.out, token, n * args.size);
    for (int64_t i = first; i < last; i += 16) {
        int64_t left = args.size - i;
        f32x16 block = get(x + i, left), streams[N ? N : 1];
        for (int j = 0; j < N; ++j) streams[j] = get(h + j * args.size + i, left);
        for (int64_t k = 0; k < n; ++k) {
            f32x16 sum = mul(set1(post[k]), block);
            for (int64_t j = 0; j < n; ++j)
                sum = fma(set1(comb[j * n + k]), N ? streams[N ? j : 0] : get(h + j * args.size + i, left), sum);
            put(out + k * args.size + i, sum, left);
        }
    }
}

// Floor: fn and h read once.
void hc_pre(const HcPreArgs& args, Pool& pool) {
    with_type(args.type, [&](auto element) { Mixer<decltype(element)>(args, pool).run(); });
}

// Floor: h and x read and out written once.
void hc_post(const HcPostArgs& args, Pool& pool) {
    with_type(args.type, [&](auto element) {
        using T = decltype(element);
        int64_t strips = (args.size + kColumns - 1) / kColumns;
        pool.run(args.tokens * strips, rows_of_part(args.streams * args.streams * kColumns), [&](int64_t begin, int64_t end, int) {
            for (int64_t item = begin; item < end; ++item) {
                int64_t token = item / strips, first = item % strips * kColumns, last = std::min(first + kColumns, args.size);
                if (args.streams == 4) widen_strip<4, T>(args, token, first, last);
                else widen_strip<0, T>(args, token, first, last);
            }
        });
    });
}

}  // namespace

SGL_KERNELS(sparse_hyper,
    SGL_KERNEL("hc_pre", hc_pre, HcPreArgs),
    SGL_KERNEL("hc_post", hc_post, HcPostArgs))

}  // namespace sgl::SGL_ISA
