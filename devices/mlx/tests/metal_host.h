// A threadgroup of a Metal kernel on one processor: each thread is a fibre (ucontext), and what threads wait for in
// Metal (a simdgroup's sum, a threadgroup's barrier) is where fibres change. Which fibre runs next is drawn from a seed,
// so that a missing barrier shows; a barrier or a sum that some of its threads do not reach ends the program (status 3).
// Built with -fsanitize=thread, each fibre is a thread to the sanitizer and only barriers order what they do.
#pragma once
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#if defined(__SANITIZE_THREAD__)
#include <sanitizer/tsan_interface.h>
#define UNSEEN __attribute__((no_sanitize("thread"), noinline))
#else
#define UNSEEN __attribute__((noinline))
#endif

#define device
#define constant
// Of all threads of a threadgroup; threadgroups run one after the other, and find what the last one left, as on a GPU.
#define threadgroup static

typedef unsigned int uint;
struct uint3 {
    uint x, y, z;
};

struct bfloat16_t {
    uint16_t bits;
    bfloat16_t() = default;
    explicit bfloat16_t(float value) {
        uint32_t whole;
        memcpy(&whole, &value, 4);
        bits = value != value ? 0x7fc0 : uint16_t((whole + 0x7fff + ((whole >> 16) & 1)) >> 16);
    }
    operator float() const {
        const uint32_t whole = uint32_t(bits) << 16;
        float value;
        memcpy(&value, &whole, 4);
        return value;
    }
};

struct float16_t {
    uint16_t bits;
    float16_t() = default;
    explicit float16_t(float value) {
        const uint16_t sign = std::signbit(value) ? 0x8000 : 0;
        const float size = std::fabs(value);
        if (!(size <= 65504.0f)) {
            bits = sign | (value != value ? 0x7e00 : size < 65520.0f ? 0x7bff : 0x7c00);
            return;
        }
        // The last place of a half of this size: 2^-24 below the normal numbers.
        int exponent = -14;
        if (size >= 6.103515625e-05f) exponent = std::ilogb(size);
        const int units = int(std::nearbyint(std::ldexp(size, 10 - exponent)));
        bits = sign | (exponent == -14 && units < 1024 ? units : ((exponent + 14) << 10) + units);
    }
    operator float() const {
        const int exponent = (bits >> 10) & 31, fraction = bits & 1023;
        float value = exponent ? std::ldexp(float(fraction + 1024), exponent - 25) : std::ldexp(float(fraction), -24);
        if (exponent == 31) value = fraction ? NAN : INFINITY;
        return bits & 0x8000 ? -value : value;
    }
};

namespace host {

constexpr uint LANES = 32;
constexpr size_t STACK = 256 * 1024;
enum class Wait { Nothing, Sum, Barrier, End };

struct Fibre {
    ucontext_t context;
    char *stack = nullptr;
    void *sanitizer = nullptr;
    Wait wait = Wait::Nothing;
    float given = 0, taken = 0;
    uint index = 0, barriers = 0;
};

// One thread's run of the kernel, in one threadgroup.
typedef void (*Body)(uint thread, uint3 place);

struct Group {
    std::vector<Fibre> fibres;
    ucontext_t scheduler;
    void *sanitizer = nullptr;
    Fibre *running = nullptr;
    Body body = nullptr;
    uint3 place;
    uint64_t random;
    // What barriers release and acquire, two in turn, and the end: a fibre that is late at one must not acquire what
    // others did after it.
    char order[2], end;
};
inline Group group;

inline UNSEEN void fail(const char *why) {
    fprintf(stderr, "%s\n", why);
    _Exit(3);
}

// 0 to count - 1 in an order drawn from the seed (Fisher and Yates; numbers of a linear congruential generator).
inline UNSEEN std::vector<uint> drawn_order(uint count) {
    std::vector<uint> order(count);
    for (uint i = 0; i < count; ++i) order[i] = i;
    for (uint left = count; left > 1; --left) {
        group.random = group.random * 6364136223846793005u + 1442695040888963407u;
        std::swap(order[left - 1], order[(group.random >> 33) % left]);
    }
    return order;
}

inline UNSEEN void enter(void *fibre) {
#if defined(__SANITIZE_THREAD__)
    __tsan_switch_to_fiber(fibre, __tsan_switch_to_fiber_no_sync);
#endif
}

inline UNSEEN void arrive(char *at) {
#if defined(__SANITIZE_THREAD__)
    __tsan_release(at);
#endif
}

inline UNSEEN void leave(char *at) {
#if defined(__SANITIZE_THREAD__)
    __tsan_acquire(at);
#endif
}

inline UNSEEN void yield(Wait wait) {
    Fibre *self = group.running;
    self->wait = wait;
    enter(group.sanitizer);
    swapcontext(&self->context, &group.scheduler);
}

inline UNSEEN void start() {
    Fibre *self = group.running;
    leave(group.order);
    group.body(self->index, group.place);
    arrive(&group.end);
    self->wait = Wait::End;
    enter(group.sanitizer);
    setcontext(&group.scheduler);
}

inline UNSEEN float simd_sum(float value) {
    group.running->given = value;
    yield(Wait::Sum);
    return group.running->taken;
}

// Gives the sum of `count` lanes from `first` to each, added by halves.
inline UNSEEN void add_up(uint first, uint count) {
    std::vector<float> sums(count);
    for (uint i = 0; i < count; ++i) {
        if (group.fibres[first + i].wait != Wait::Sum) fail("simd_sum that some lanes do not reach");
        sums[i] = group.fibres[first + i].given;
    }
    for (uint half = count / 2; half; half /= 2)
        for (uint i = 0; i < half; ++i) sums[i] += sums[i + half];
    for (uint i = 0; i < count; ++i) group.fibres[first + i].taken = sums[0], group.fibres[first + i].wait = Wait::Nothing;
}

// Lets fibres go on, once each has run into something to wait for. False: all have ended.
inline UNSEEN bool release() {
    const uint count = group.fibres.size();
    bool released = false;
    uint ended = 0;
    for (uint first = 0; first < count; first += LANES)
        for (uint i = first; i < first + LANES; ++i)
            if (group.fibres[i].wait == Wait::Sum) {
                add_up(first, LANES), released = true;
                break;
            }
    if (released) return true;
    for (auto &fibre : group.fibres) ended += fibre.wait == Wait::End;
    if (ended == count) return false;
    if (ended) fail("threadgroup_barrier that some threads do not reach");
    for (auto &fibre : group.fibres) fibre.wait = Wait::Nothing;
    return true;
}

inline UNSEEN void run_group(uint threads) {
    arrive(group.order);
    for (auto &fibre : group.fibres) {
        getcontext(&fibre.context);
        fibre.context.uc_stack = {fibre.stack, 0, STACK};
        fibre.wait = Wait::Nothing, fibre.barriers = 0;
        makecontext(&fibre.context, start, 0);
    }
    do {
        for (uint turn : drawn_order(threads)) {
            group.running = &group.fibres[turn];
            if (group.running->wait != Wait::Nothing) continue;
            enter(group.running->sanitizer);
            swapcontext(&group.scheduler, &group.running->context);
        }
    } while (release());
    leave(&group.end);
}

// Runs `body` for each thread of each threadgroup of a grid, the threadgroups in a drawn order.
inline UNSEEN void run_grid(uint3 groups, uint threads, uint seed, Body body) {
    if (threads % LANES) fail("a threadgroup that is not made of whole simdgroups");
    group.random = seed;
    group.body = body;
    group.fibres.resize(threads);
#if defined(__SANITIZE_THREAD__)
    group.sanitizer = __tsan_get_current_fiber();
#endif
    for (uint i = 0; i < threads; ++i) {
        group.fibres[i].index = i, group.fibres[i].stack = static_cast<char *>(malloc(STACK));
#if defined(__SANITIZE_THREAD__)
        group.fibres[i].sanitizer = __tsan_create_fiber(0);
#endif
    }
    for (uint at : drawn_order(groups.x * groups.y * groups.z)) {
        group.place = {at % groups.x, at / groups.x % groups.y, at / groups.x / groups.y};
        run_group(threads);
    }
}

// The next array of the case: its size in bytes, then its bytes; in memory of exactly that size.
inline UNSEEN char *next_array(FILE *file, int64_t *size) {
    if (fread(size, 8, 1, file) != 1) fail("the case ends before its arrays do");
    char *data = static_cast<char *>(malloc(*size));
    if (fread(data, 1, *size, file) != size_t(*size)) fail("the case ends inside an array");
    return data;
}

}  // namespace host

namespace metal {
using std::clamp;
using std::exp2;
using std::max;
using std::min;
namespace precise {
using std::tanh;
}
enum class mem_flags { mem_none, mem_device, mem_threadgroup };

inline float simd_sum(float value) { return host::simd_sum(value); }

inline UNSEEN void threadgroup_barrier(mem_flags flags) {
    const bool orders = flags == mem_flags::mem_threadgroup;
    char *barrier = host::group.order + ++host::group.running->barriers % 2;
    if (orders) host::arrive(barrier);
    host::yield(host::Wait::Barrier);
    if (orders) host::leave(barrier);
}
}  // namespace metal
