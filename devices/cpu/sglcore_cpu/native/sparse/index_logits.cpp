// Scores of an indexer: all heads of a token against the keys of its request, a block of them at a time.
//
// Floor: each key read once for each token, and the scores written.
#include "../attention/sums.h"
#include "rows.h"

// out f32 [tokens, width]: scale * sum over h of weights[t, h] * max(q[t, h] . key, 0) for the first lens[t] keys; -inf after them. Weights
// have `weight_type`.
#define SGL_INDEX_LOGITS_ARGS(P, I, D)                                                                            \
    P(q) I(q_stride) I(q_head_stride) P(weights) I(weight_stride) I(weight_type) P(keys) I(key_stride) P(out)      \
    I(tokens) I(heads) I(size) I(width) I(type) I(row_type) I(exact) I(group) D(scale) SGL_PAGED_ARGS(P, I)
SGL_ARGS(IndexLogitsArgs, SGL_INDEX_LOGITS_ARGS)

namespace sgl::SGL_ISA {
namespace {

constexpr int64_t kChunk = 4 * kBlockRows;  // keys of one work item

template <class Words>
class Indexer {
  public:
    Indexer(const IndexLogitsArgs& args, Pool& pool)
        : args_(args), pool_(pool), panels_((args.heads + kPanel - 1) / kPanel),
          depth_(up_to(args.size, kUnit<Words>) / Words::per_word) {}

    // Neighbours of one request are scored together where there are enough of them, for they share the keys.
    void run() {
        int64_t chunks = (args_.width + kChunk - 1) / kChunk, together = std::clamp<int64_t>(12 / panels_, 1, 6);
        if (args_.tokens < 4 * together * pool_.threads()) together = 1;
        pool_.run((args_.tokens + together - 1) / together * chunks, 1, [&](int64_t begin, int64_t end, int thread) {
            for (int64_t item = begin; item < end; ++item) {
                int64_t token = item / chunks * together, last = std::min(token + together, args_.tokens), next;
                for (; token < last; token = next) {
                    for (next = token + 1; next < last && slot(next) == slot(token);) ++next;
                    score(token, next - token, item % chunks * kChunk, thread);
                }
            }
        });
    }

  private:
    int32_t slot(int64_t token) const { return i32_at(args_.token_slots, token); }

    // Places [first, first + kChunk) of `count` tokens of one request.
    void score(int64_t token, int64_t count, int64_t first, int thread) const {
        int64_t end = std::min(first + kChunk, args_.width), most = first, panels = panels_ * count;
        for (int64_t t = token; t < token + count; ++t) {
            int64_t known = std::clamp<int64_t>(i32_at(args_.lens, t), first, end);
            float* out = static_cast<float*>(args_.out) + t * args_.width;
            std::fill(out + known, out + end, -INFINITY);
            most = std::max(most, known);
        }
        if (most == first) return;
        auto* rows = static_cast<uint32_t*>(pool_.scratch(thread, static_cast<size_t>(4 * kPanel *
            (depth_ * (1 + panels) + kBlockRows * panels + panels + kBlockRows / kPanel * depth_))));
        uint32_t *queries = rows + kPanel * depth_, *block = queries + panels * kPanel * depth_;
        auto* scores = reinterpret_cast<float*>(block + kBlockRows * depth_);
        float* weights = scores + panels * kPanel * kBlockRows;
        for (int64_t i = 0; i < count; ++i)
            pack(token + i, rows, queries + i * panels_ * kPanel * depth_, weights + i * panels_ * kPanel);
        Pages keys(args_, token);
        [[maybe_unused]] TilesInUse<Words> tiles;
        for (; first < most; first += kBlockRows) {
            int64_t found = std::min(kBlockRows, most - first), padded = up_to(found, Words::row_unit);
            for (int64_t i = 0; i < padded; ++i)
                copy_row(i < found ? key(keys.row(first + i)) : nullptr, Form::of(args_),
                         depth_ * Words::per_word, reinterpret_cast<Plain<Words>*>(block + i * depth_));
            product<Words>({block, padded, depth_, depth_, 1}, {queries, panels, kPanel * depth_},
                           {scores, kBlockRows * kPanel, nullptr});
            for (int64_t t = 0; t < count; ++t) {
                float* out = static_cast<float*>(args_.out) + (token + t) * args_.width;
                int64_t known = std::min<int64_t>(i32_at(args_.lens, token + t), end) - first;
                const float* own = scores + t * panels_ * kBlockRows * kPanel;
                for (int64_t i = 0; i < std::min(known, found); i += 16)
                    put(out + first + i, sums(own + i * kPanel, weights + t * panels_ * kPanel), known - i);
            }
        }
    }

    const char* key(int64_t row) const {
        return static_cast<const char*>(args_.keys) + row * args_.key_stride * bytes_of(args_.row_type);
    }

    void pack(int64_t token, uint32_t* rows, uint32_t* queries, float* weights) const {
        const char* q = static_cast<const char*>(args_.q) + token * args_.q_stride * bytes_of(args_.type);
        const char* own = static_cast<const char*>(args_.weights) + token * args_.weight_stride * bytes_of(args_.weight_type);
        f32x16 scale = set1(static_cast<float>(args_.scale));
        for (int64_t panel = 0; panel < panels_; ++panel) {
            pack_heads<Words>(q, args_.type, args_.q_head_stride, panel * kPanel, args_.heads, args_.size, depth_, rows,
                              queries + panel * kPanel * depth_);
            store(weights + panel * kPanel, mul(scale, sixteen(own, args_.weight_type, panel * kPanel, args_.heads)));
        }
    }

    // Of sixteen keys, whose scores are [16] each and so on in every panel.
    f32x16 sums(const float* scores, const float* weights) const {
        f32x16 found[16];
        for (int64_t i = 0; i < 16; ++i) {
            f32x16 sum = zero();
            for (int64_t panel = 0; panel < panels_; ++panel) {
                f32x16 score = load(scores + panel * kBlockRows * kPanel + i * kPanel);
                sum = fma(max(zero(), score), load(weights + panel * kPanel), sum);
            }
            found[kPlaceOfSum[i]] = sum;
        }
        return sixteen_sums(found);
    }

    const IndexLogitsArgs& args_;
    Pool& pool_;
    int64_t panels_, depth_;
};

void index_logits(const IndexLogitsArgs& args, Pool& pool) {
    with_words(args.type, args.row_type, [&](auto words) { Indexer<decltype(words)>(args, pool).run(); });
}

}  // namespace

SGL_KERNELS(sparse_index_logits,
    SGL_KERNEL("index_logits", index_logits, IndexLogitsArgs))

}  // namespace sgl::SGL_ISA
