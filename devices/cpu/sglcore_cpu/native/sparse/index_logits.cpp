// Scores of an indexer: all heads of a token against the keys of its request, a block of them at a time.
//
// Floor: each key read once for each token, and the scores written.
#include "../attention/sums.h"
#include "rows.h"

namespace sgl::SGL_ISA {
namespace {

constexpr int64_t kChunk = 4 * kBlockRows;  // keys of one work item

template <class Words>
class Indexer {
  public:
    Indexer(const IndexLogitsArgs& args, Pool& pool)
        : args_(args), pool_(pool), panels_((args.heads + kPanel - 1) / kPanel),
          depth_(up_to(args.size, kUnit<Words>) / Words::per_word) {}

    void run() {
        int64_t chunks = (args_.width + kChunk - 1) / kChunk;
        pool_.run(args_.tokens * chunks, 1, [&](int64_t first, int64_t last, int thread) {
            for (int64_t item = first; item < last; ++item) score(item / chunks, item % chunks * kChunk, thread);
        });
    }

  private:
    // Places [first, first + kChunk) of one token.
    void score(int64_t token, int64_t first, int thread) const {
        Pages keys(args_, token);
        float* out = static_cast<float*>(args_.out) + token * args_.width;
        int64_t end = std::min(first + kChunk, args_.width), known = std::clamp(keys.count, first, end);
        std::fill(out + known, out + end, -INFINITY);
        if (known == first) return;
        auto* rows = static_cast<uint32_t*>(pool_.scratch(thread, static_cast<size_t>(4 * kPanel *
            (depth_ * (1 + panels_) + kBlockRows * panels_ + panels_ + kBlockRows / kPanel * depth_))));
        uint32_t *queries = rows + kPanel * depth_, *block = queries + panels_ * kPanel * depth_;
        auto* scores = reinterpret_cast<float*>(block + kBlockRows * depth_);
        float* weights = scores + panels_ * kPanel * kBlockRows;
        pack(token, rows, queries, weights);
        [[maybe_unused]] TilesInUse<Words> tiles;
        for (; first < known; first += kBlockRows) {
            int64_t count = std::min(kBlockRows, known - first), padded = up_to(count, Words::row_unit);
            for (int64_t i = 0; i < padded; ++i)
                copy_row(i < count ? key(keys.row(first + i)) : nullptr, Form::of(args_),
                         depth_ * Words::per_word, reinterpret_cast<Plain<Words>*>(block + i * depth_));
            product<Words>({block, padded, depth_, depth_, 1}, {queries, panels_, kPanel * depth_},
                           {scores, kBlockRows * kPanel, nullptr});
            for (int64_t i = 0; i < count; i += 16) put(out + first + i, sums(scores + i * kPanel, weights), count - i);
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

}  // namespace

void index_logits(const IndexLogitsArgs& args, Pool& pool) {
    with_words(args.type, args.row_type, [&](auto words) { Indexer<decltype(words)>(args, pool).run(); });
}

}  // namespace sgl::SGL_ISA
