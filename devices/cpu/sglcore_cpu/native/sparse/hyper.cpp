// Manifold-constrained hyper-connections (Xie et al. 2025): how a layer's streams are mixed, by the streams themselves.
#include <algorithm>

#include "sparse.h"

namespace sgl::SGL_ISA {
namespace {

constexpr int64_t kColumns = 1024;  // of one work item; sums depend on it and on nothing else of the batch
constexpr int64_t kTokens = 48;
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
    for (int v = 0; v < V; ++v)
        for (int r = 0; r < kRows; ++r) {
            if (i < size) sums[v][r] = fma(get(rows[r] + i, size - i), get(x + v * x_stride + i, size - i), sums[v][r]);
            out[v * out_stride + r] = reduce_add(sums[v][r]);
        }
}

template <class T>
float squares(const T* x, int64_t size) {
    f32x16 sum = zero();
    for (int64_t i = 0; i < size; i += 16) {
        f32x16 value = get(x + i, size - i);
        sum = fma(value, value, sum);
    }
    return reduce_add(sum);
}

float sigmoid(float x) { return 1.0f / (1.0f + std::exp(-x)); }

// comb [n][n] of logits: a softmax of each row, then columns and rows brought to length 1 by turns. N: n, or 0 for any.
template <int N>
void balance(float* comb, int64_t streams, float eps, int64_t iters) {
    const int64_t n = N ? N : streams;
    for (int64_t j = 0; j < n; ++j) {
        float *row = comb + j * n, most = *std::max_element(row, row + n), total = 0.0f;
        for (int64_t k = 0; k < n; ++k) total += row[k] = std::exp(row[k] - most);
        for (int64_t k = 0; k < n; ++k) row[k] = row[k] / total + eps;
    }
    for (int64_t iter = 0; iter < iters; ++iter) {
        for (int64_t j = 0; iter > 0 && j < n; ++j) {
            float total = eps;
            for (int64_t k = 0; k < n; ++k) total += comb[j * n + k];
            for (int64_t k = 0; k < n; ++k) comb[j * n + k] /= total;
        }
        for (int64_t k = 0; k < n; ++k) {
            float total = eps;
            for (int64_t j = 0; j < n; ++j) total += comb[j * n + k];
            for (int64_t j = 0; j < n; ++j) comb[j * n + k] /= total;
        }
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
        pool_.run(chunks_ * rounds, 1, [&](int64_t begin, int64_t end, int) {
            for (int64_t item = begin; item < end; ++item) add_up(item / rounds, item % rounds * kTokens, partial);
        });
        each_row(pool_, args_.tokens, 2 * flat_, [&](int64_t token, int) { mix(token, partial + token * chunks_ * padded_); });
    }

  private:
    // A chunk of the columns of some tokens: every row's product, then the sum of the squares.
    void add_up(int64_t chunk, int64_t first, float* partial) const {
        int64_t token = first, last = std::min(first + kTokens, args_.tokens);
        for (; token + kTogether <= last; token += kTogether) add_tokens<kTogether>(chunk, token, partial);
        for (; token < last; ++token) add_tokens<1>(chunk, token, partial);
    }

    template <int V>
    void add_tokens(int64_t chunk, int64_t token, float* partial) const {
        int64_t begin = chunk * kColumns, count = std::min(kColumns, flat_ - begin), step = chunks_ * padded_;
        const T* h = row_of<T>(args_.h, token, args_.h_stride) + begin;
        float* out = partial + (token * chunks_ + chunk) * padded_;
        for (int64_t row = 0; row < mixes_; row += kRows) {
            const float* rows[kRows];
            for (int64_t r = 0; r < kRows; ++r) rows[r] = row_of<float>(args_.fn, std::min(row + r, mixes_ - 1), flat_) + begin;
            const float* const(&fixed)[kRows] = rows;
            dots<V>(fixed, h, args_.h_stride, count, out + row, step);
        }
        for (int64_t v = 0; v < V; ++v) out[v * step + mixes_] = squares(h + v * args_.h_stride, count);
    }

    void mix(int64_t token, float* sums) const {
        for (int64_t chunk = 1; chunk < chunks_; ++chunk)
            for (int64_t i = 0; i <= mixes_; ++i) sums[i] += sums[chunk * padded_ + i];
        int64_t n = args_.streams;
        float factor = 1.0f / std::sqrt(sums[mixes_] / static_cast<float>(flat_) + static_cast<float>(args_.norm_eps));
        float eps = static_cast<float>(args_.hc_eps);
        const auto *base = static_cast<const float*>(args_.base), *scale = static_cast<const float*>(args_.scale);
        for (int64_t i = 0; i < mixes_; ++i) sums[i] = sums[i] * factor * scale[std::min<int64_t>(i / n, 2)] + base[i];
        for (int64_t i = 0; i < n; ++i) sums[i] = sigmoid(sums[i]) + eps;
        collapse(token, sums);
        if (args_.comb == nullptr) return;
        for (int64_t i = 0; i < n; ++i) row_of<float>(args_.post, token, n)[i] = 2.0f * sigmoid(sums[n + i]);
        float* comb = row_of<float>(args_.comb, token, n * n);
        std::copy_n(sums + 2 * n, n * n, comb);
        if (n == 4) balance<4>(comb, n, eps, args_.iters);
        else balance<0>(comb, n, eps, args_.iters);
    }

    void collapse(int64_t token, const float* shares) const {
        const T* h = row_of<T>(args_.h, token, args_.h_stride);
        for (int64_t i = 0; i < args_.size; i += 16) {
            f32x16 sum = zero();
            for (int64_t stream = 0; stream < args_.streams; ++stream)
                sum = fma(set1(shares[stream]), get(h + stream * args_.size + i, args_.size - i), sum);
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

}  // namespace

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

}  // namespace sgl::SGL_ISA
