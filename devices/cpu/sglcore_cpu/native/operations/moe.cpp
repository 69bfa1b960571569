// A mixture of experts over plain weights: tokens grouped by expert, and only chosen experts are read.
#include "dots.h"
#include "experts.h"

namespace sgl::SGL_ISA {

namespace {

constexpr int64_t kRows = 16;     // rows of a weight that one part of the work takes
constexpr int64_t kVectors = 64;  // tokens that pass over these rows at a time: the rows then stay in the cache

float as_float(float x) { return x; }
float as_float(bf16 x) { return from_bf16(x); }
void assign(float* out, float x) { *out = x; }
void assign(bf16* out, float x) { *out = to_bf16(x); }
template <class T>
float cast_one(float x) {
    T narrow;
    assign(&narrow, x);
    return as_float(narrow);
}

size_t aligned(size_t bytes) { return (bytes + 63) / 64 * 64; }

template <class T>
class Experts {
  public:
    Experts(const MoeArgs& args, Pool& pool)
        : args_(args), pool_(pool), memory_(static_cast<char*>(pool.shared(bytes(args)))), plan_(args, memory_),
          limit_(cast_one<T>(static_cast<float>(args.limit))) {
        inner_ = reinterpret_cast<T*>(memory_ + aligned(static_cast<size_t>(Plan::words(args)) * 8));
        parts_ = inner_ + args.tokens * args.choices * args.inner;
    }

    void run() {
        each_block(args_.inner, [this](int64_t place, int64_t row) { gate_and_up(place, row); });
        each_block(args_.hidden_size, [this](int64_t place, int64_t row) { down(place, row); });
        each_row(pool_, args_.tokens, args_.hidden_size * args_.choices, [this](int64_t token, int) { add_up(token); });
    }

  private:
    static size_t bytes(const MoeArgs& args) {
        auto entries = static_cast<size_t>(args.tokens * args.choices);
        return aligned(static_cast<size_t>(Plan::words(args)) * 8) +
               entries * static_cast<size_t>(args.inner + args.hidden_size) * sizeof(T) + 64;
    }

    // body(place of an active expert, first of up to kRows rows).
    template <class Body>
    void each_block(int64_t rows, Body&& body) {
        int64_t blocks = (rows + kRows - 1) / kRows;
        pool_.run(plan_.num_active * blocks, 1, [&](int64_t first, int64_t last, int) {
            for (int64_t task = first; task < last; ++task) body(task / blocks, task % blocks * kRows);
        });
    }

    // inner[entry, row] = silu(gate) * up, within the limit, for up to kRows rows.
    void gate_and_up(int64_t place, int64_t first_row) {
        int64_t last_row = std::min(first_row + kRows, args_.inner);
        const T* weight = row_of<T>(args_.w13, plan_.active[place], 2 * args_.inner * args_.hidden_size);
        for (int64_t entry = plan_.begin(place); entry < plan_.end(place); entry += kVectors) {
            const T* tokens[kVectors];
            int64_t count = std::min(kVectors, plan_.end(place) - entry);
            for (int64_t i = 0; i < count; ++i)
                tokens[i] = row_of<T>(args_.hidden, plan_.entry_choices[entry + i] / args_.choices, args_.hidden_stride);
            for (int64_t row = first_row; row < last_row; row += 2) {
                int64_t next = std::min(row + 1, last_row - 1);
                auto at = [&](int64_t r) { return weight + r * args_.hidden_size; };
                const T* const rows[4] = {at(row), at(next), at(args_.inner + row), at(args_.inner + next)};
                dot_all(rows, tokens, count, args_.hidden_size, [&](int64_t v, const float* sums) {
                    T* out = inner_ + (entry + v) * args_.inner;
                    assign(out + row, gated(sums[0], sums[2]));
                    assign(out + next, gated(sums[1], sums[3]));
                });
            }
        }
    }

    float gated(float gate, float up) const {
        gate = std::min(cast_one<T>(gate), limit_), up = std::max(std::min(cast_one<T>(up), limit_), -limit_);
        return cast_one<T>(gate / (1.0f + std::exp(-gate))) * up;
    }

    // parts[entry, row] = weight of the choice * (inner[entry] . row of w2).
    void down(int64_t place, int64_t first_row) {
        int64_t last_row = std::min(first_row + kRows, args_.hidden_size);
        const T* weight = row_of<T>(args_.w2, plan_.active[place], args_.inner * args_.hidden_size);
        for (int64_t entry = plan_.begin(place); entry < plan_.end(place); entry += kVectors) {
            const T* vectors[kVectors];
            int64_t count = std::min(kVectors, plan_.end(place) - entry);
            for (int64_t i = 0; i < count; ++i) vectors[i] = inner_ + (entry + i) * args_.inner;
            for (int64_t row = first_row; row < last_row; row += 4) {
                const T* rows[4];
                for (int64_t r = 0; r < 4; ++r) rows[r] = weight + std::min(row + r, last_row - 1) * args_.inner;
                const T* const(&fixed)[4] = rows;
                dot_all(fixed, vectors, count, args_.inner, [&](int64_t v, const float* sums) {
                    float share = as_float(static_cast<const T*>(args_.weights)[plan_.entry_choices[entry + v]]);
                    T* out = parts_ + (entry + v) * args_.hidden_size + row;
                    for (int64_t r = 0; r < std::min<int64_t>(4, last_row - row); ++r)
                        assign(out + r, cast_one<T>(sums[r]) * share);
                });
            }
        }
    }

    // By ascending expert, in T.
    void add_up(int64_t token) {
        T* out = row_of<T>(args_.out, token, args_.hidden_size);
        const int64_t* entries = plan_.token_entries + token * args_.choices;
        for (int64_t i = 0; i < args_.hidden_size; i += 16) {
            int64_t left = args_.hidden_size - i;
            f32x16 total = zero();
            for (int64_t n = 0; n < plan_.token_counts[token]; ++n)
                total = cast<T>(add(total, get(parts_ + entries[n] * args_.hidden_size + i, left)));
            put(out + i, total, left);
        }
    }

    const MoeArgs& args_;
    Pool& pool_;
    char* memory_;
    Plan plan_;
    float limit_;
    T* inner_;
    T* parts_;
};

}  // namespace

void moe(const MoeArgs& args, Pool& pool) {
    with_type(args.type, [&](auto element) { Experts<decltype(element)>(args, pool).run(); });
}

}  // namespace sgl::SGL_ISA
