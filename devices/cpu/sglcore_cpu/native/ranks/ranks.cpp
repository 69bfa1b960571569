// Ranks that share memory: each writes its part, says so, and waits for the others' word.
//
// The memory begins with a word for each rank, a line apart, and goes on with two places of `most` bytes for each. Rounds
// use the places in turn: who writes to one again has heard that everybody has read it.
#include <atomic>
#include <cstdint>
#include <cstring>

#include "kernels.h"
#include "waiting.h"

#define SGL_EXCHANGE_RANKS_ARGS(P, I, D) P(memory) I(rank) I(ranks) I(most) P(x) I(bytes)
#define SGL_SUM_RANKS_ARGS(P, I, D) P(memory) I(rank) I(ranks) I(most) P(x) I(count) I(type)
SGL_ARGS(ExchangeRanksArgs, SGL_EXCHANGE_RANKS_ARGS)
SGL_ARGS(SumRanksArgs, SGL_SUM_RANKS_ARGS)

namespace sgl::SGL_ISA {

namespace {

struct alignas(kLine) Word {
    std::atomic<uint32_t> round;     // that this rank has written for
    std::atomic<uint32_t> sleepers;  // others that wait for it in the system
};
static_assert(sizeof(Word) == kLine && std::atomic<uint32_t>::is_always_lock_free);

bool has_come(const Word& word, uint32_t round) {
    return static_cast<int32_t>(word.round.load(std::memory_order_acquire) - round) >= 0;
}

void wait_for(Word& word, uint32_t round) {
    if (spin_until([&] { return has_come(word, round); })) return;
    word.sleepers.fetch_add(1);
    for (uint32_t seen = word.round.load(); !has_come(word, round); seen = word.round.load())
        sleep_while<Among::kProcesses>(word.round, seen);
    word.sleepers.fetch_sub(1);
}

// This rank's view of the memory.
struct Meeting {
    char* memory;
    int64_t rank, ranks, most;

    Word& word(int64_t of) const { return reinterpret_cast<Word*>(memory)[of]; }
    char* place(int64_t of, uint32_t round) const { return memory + ranks * kLine + (of * 2 + round % 2) * most; }

    // Bring up to `most` bytes; everybody's of the round that is returned are readable until the next call of this rank.
    uint32_t exchange(const void* x, int64_t bytes) const {
        Word& own = word(rank);
        uint32_t round = own.round.load(std::memory_order_relaxed) + 1;
        std::memcpy(place(rank, round), x, static_cast<size_t>(bytes));
        own.round.store(round);
        if (own.sleepers.load() != 0) wake_all<Among::kProcesses>(own.round);
        for (int64_t other = 0; other < ranks; ++other) wait_for(word(other), round);
        return round;
    }
};

float as_float(float x) { return x; }
float as_float(uint16_t x) {
    uint32_t bits = static_cast<uint32_t>(x) << 16;
    float found;
    std::memcpy(&found, &bits, 4);
    return found;
}

void assign(float* out, float x) { *out = x; }
// To the nearest, of two to the even one.
void assign(uint16_t* out, float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    *out = static_cast<uint16_t>(x != x ? 0x7FC0u : (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16);
}

// In float32 and in the order of the ranks, so that each has the same sum to the bit, by whichever instructions.
template <class T>
void add_up(const Meeting& meeting, uint32_t round, T* x, int64_t count) {
    constexpr int64_t kBlock = 256;
    float total[kBlock];
    for (int64_t first = 0; first < count; first += kBlock) {
        int64_t n = count - first < kBlock ? count - first : kBlock;
        for (int64_t rank = 0; rank < meeting.ranks; ++rank) {
            const T* part = reinterpret_cast<const T*>(meeting.place(rank, round)) + first;
            if (rank == 0)
                for (int64_t i = 0; i < n; ++i) total[i] = as_float(part[i]);
            else
                for (int64_t i = 0; i < n; ++i) total[i] += as_float(part[i]);
        }
        for (int64_t i = 0; i < n; ++i) assign(x + first + i, total[i]);
    }
}

template <class T>
void sum(const Meeting& meeting, T* x, int64_t count) {
    int64_t most = meeting.most / static_cast<int64_t>(sizeof(T));
    for (int64_t first = 0; first < count; first += most) {
        int64_t n = count - first < most ? count - first : most;
        add_up(meeting, meeting.exchange(x + first, n * static_cast<int64_t>(sizeof(T))), x + first, n);
    }
}

// Brings bytes <= most. The round is in this rank's word.
void exchange_ranks(const ExchangeRanksArgs& args, Pool&) {
    Meeting{static_cast<char*>(args.memory), args.rank, args.ranks, args.most}.exchange(args.x, args.bytes);
}

// The sum over all ranks of `count` elements of `type`, kF32 or kBF16, in x.
void sum_ranks(const SumRanksArgs& args, Pool&) {
    Meeting meeting{static_cast<char*>(args.memory), args.rank, args.ranks, args.most};
    if (args.type == kBF16) return sum(meeting, static_cast<uint16_t*>(args.x), args.count);
    sum(meeting, static_cast<float*>(args.x), args.count);
}

}  // namespace

SGL_KERNELS(ranks,
    SGL_KERNEL("exchange_ranks", exchange_ranks, ExchangeRanksArgs),
    SGL_KERNEL("sum_ranks", sum_ranks, SumRanksArgs))

}  // namespace sgl::SGL_ISA
