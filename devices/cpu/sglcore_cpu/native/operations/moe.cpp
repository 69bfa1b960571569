// A mixture of experts over plain weights: tokens grouped by expert, and only chosen experts are read.
#include "dots.h"
#include "experts.h"

namespace sgl::SGL_ISA {

namespace {

// silu(gate) * up within a limit; gpt-oss' gates, which lie beside what they open; max(x, 0)^2 without a gate.
enum Form : int64_t { kGated = 0, kClamped = 1, kSquared = 2 };

constexpr int64_t kVectors = 32;  // tokens that pass over a block of rows at a time: the rows then stay in the cache

size_t aligned(size_t bytes) { return (bytes + 63) / 64 * 64; }

// Rows of an expert's weight: those of what a gate opens begin `to_up` behind those of the gate.
template <class T>
struct Parts {
    Rows<T> gate;
    int64_t count, to_up;
};

template <class T>
class Experts {
  public:
    Experts(const MoeArgs& args, Pool& pool)
        : args_(args), pool_(pool), memory_(static_cast<char*>(pool.shared(bytes(args)))), plan_(args, memory_),
          limit_(cast<T>(set1(static_cast<float>(args.limit)))) {
        inner_ = reinterpret_cast<T*>(memory_ + aligned(static_cast<size_t>(Plan::words(args)) * 8));
        parts_ = inner_ + args.tokens * args.choices * args.inner;
    }

    void run() {
        each_block(args_.inner, [this](int64_t place, int64_t row) { activate(place, row); });
        each_block(args_.hidden_size, [this](int64_t place, int64_t row) { down(place, row); });
        each_row(pool_, args_.tokens, args_.hidden_size * args_.choices, [this](int64_t token, int) { add_up(token); });
    }

  private:
    static size_t bytes(const MoeArgs& args) {
        auto entries = static_cast<size_t>(args.tokens * args.choices);
        return aligned(static_cast<size_t>(Plan::words(args)) * 8) +
               entries * static_cast<size_t>(args.inner + args.hidden_size) * sizeof(T) + 64;
    }

    // body(place of an active expert, first of up to kBlock rows).
    template <class Body>
    void each_block(int64_t rows, Body&& body) {
        int64_t blocks = (rows + kBlock - 1) / kBlock;
        pool_.run(plan_.num_active * blocks, 1, [&](int64_t first, int64_t last, int) {
            for (int64_t task = first; task < last; ++task) body(task / blocks, task % blocks * kBlock);
        });
    }

    // take(entry, sums) for every token of an expert, whose vector is vector(entry): kBlock sums for each of the parts.
    template <class Vector, class Take>
    void each_token(int64_t place, const Parts<T>& parts, Vector&& vector, Take&& take) {
        for (int64_t entry = plan_.begin(place); entry < plan_.end(place); entry += kVectors) {
            const T* vectors[kVectors];
            alignas(64) float sums[kVectors][2 * kBlock];
            int64_t count = std::min(kVectors, plan_.end(place) - entry);
            for (int64_t v = 0; v < count; ++v) vectors[v] = vector(entry + v);
            Rows<T> rows = parts.gate;
            for (int64_t part = 0; part < parts.count; ++part, rows.first += parts.to_up)
                dot_all(rows, vectors, count, sums[0] + part * kBlock, 2 * kBlock);
            for (int64_t v = 0; v < count; ++v) take(entry + v, sums[v]);
        }
    }

    // inner[entry, row] = what becomes of the products with gate and up, or with the one row.
    void activate(int64_t place, int64_t first) {
        bool by_turns = args_.form == kClamped;
        int64_t expert = plan_.active[place], parts = args_.form == kSquared ? 1 : 2, apart = by_turns ? 2 : 1;
        int64_t all = parts * args_.inner, rows = std::min(kBlock, args_.inner - first), size = args_.hidden_size;
        const T* weight = row_of<T>(args_.w13, expert * all + first * apart, size);
        alignas(64) float bias[2 * kBlock] = {};
        for (int64_t i = 0; args_.b13 != nullptr && i < 2 * rows; ++i)
            bias[i % 2 * kBlock + i / 2] = as_float(row_of<T>(args_.b13, expert, all)[2 * first + i]);
        each_token(
            place, {{weight, size, apart * size, rows}, parts, (by_turns ? 1 : args_.inner) * size},
            [&](int64_t entry) {
                return row_of<T>(args_.hidden, plan_.entry_choices[entry] / args_.choices, args_.hidden_stride);
            },
            [&](int64_t entry, const float* sums) {
                f32x16 gate = cast<T>(add(load(sums), load(bias)));
                f32x16 up = cast<T>(add(load(sums + kBlock), load(bias + kBlock)));
                put(inner_ + entry * args_.inner + first, activated(gate, up), rows);
            });
    }

    f32x16 activated(f32x16 gate, f32x16 up) const {
        if (args_.form == kSquared) return mul(at_least(gate, zero()), at_least(gate, zero()));
        gate = at_most(gate, limit_), up = at_least(at_most(up, limit_), sub(zero(), limit_));
        if (args_.form == kGated) return mul(cast<T>(silu(gate)), up);
        f32x16 bent = cast<T>(mul(gate, set1(static_cast<float>(args_.alpha))));
        f32x16 open = cast<T>(div(set1(1.0f), add(set1(1.0f), exp(sub(zero(), bent)))));
        return mul(cast<T>(add(up, set1(1.0f))), cast<T>(mul(gate, open)));
    }

    // parts[entry, row] = weight of the choice * (inner[entry] . row of w2, plus its bias).
    void down(int64_t place, int64_t first) {
        int64_t expert = plan_.active[place], rows = std::min(kBlock, args_.hidden_size - first), size = args_.inner;
        const T* weight = row_of<T>(args_.w2, expert * args_.hidden_size + first, size);
        f32x16 bias = zero();
        if (args_.b2 != nullptr) bias = get(row_of<T>(args_.b2, expert, args_.hidden_size) + first, rows);
        each_token(
            place, {{weight, size, size, rows}, 1, 0}, [&](int64_t entry) { return inner_ + entry * size; },
            [&](int64_t entry, const float* sums) {
                f32x16 share = set1(as_float(static_cast<const T*>(args_.weights)[plan_.entry_choices[entry]]));
                put(parts_ + entry * args_.hidden_size + first, mul(cast<T>(add(load(sums), bias)), share), rows);
            });
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
    f32x16 limit_;
    T* inner_;
    T* parts_;
};

void moe(const MoeArgs& args, Pool& pool) {
    with_type(args.type, [&](auto element) { Experts<decltype(element)>(args, pool).run(); });
}

}  // namespace

SGL_KERNELS(operations_moe,
    SGL_KERNEL("moe", moe, MoeArgs))

}  // namespace sgl::SGL_ISA
