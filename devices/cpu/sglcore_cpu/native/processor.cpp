#include "processor.h"

#include <cstdint>

#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#if defined(__linux__) && defined(__aarch64__)
#include <sys/auxv.h>
#endif

namespace sgl {

#if defined(__x86_64__)

namespace {

struct Registers {
    uint32_t a = 0, b = 0, c = 0, d = 0;
};

Registers cpuid(uint32_t leaf, uint32_t part) {
    Registers r;
    __cpuid_count(leaf, part, r.a, r.b, r.c, r.d);
    return r;
}

bool has(uint32_t word, int bit) { return (word >> bit) & 1; }

uint64_t enabled_states() {
    uint32_t low, high;
    asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return (static_cast<uint64_t>(high) << 32) | low;
}

// Linux gives a process the tile registers only when it asks.
bool ask_for_tiles() {
#if defined(__linux__)
    constexpr long request = 0x1023, tile_data = 18;
    return syscall(SYS_arch_prctl, request, tile_data) == 0;
#else
    return false;
#endif
}

}  // namespace

int processor_level() {
    if (cpuid(0, 0).a < 7) return 0;
    Registers basic = cpuid(1, 0), wide = cpuid(7, 0), more = cpuid(7, 1);
    if (!has(basic.c, 27)) return 0;
    uint64_t states = enabled_states();
    bool is_avx2 = (states & 0x6) == 0x6 && has(wide.b, 5) && has(basic.c, 12) && has(basic.c, 29);
    if (!is_avx2) return 0;
    bool is_avx512 = (states & 0xe6) == 0xe6 && has(wide.b, 16) && has(wide.b, 17) && has(wide.b, 30) && has(wide.b, 31);
    if (!is_avx512) return 2;
    if (!has(wide.c, 11)) return 3;
    if (!has(more.a, 5)) return 4;
    bool is_amx = has(wide.d, 22) && has(wide.d, 24) && has(wide.d, 25) && (states & 0x60000) == 0x60000;
    return is_amx && ask_for_tiles() ? 6 : 5;
}

#elif defined(__aarch64__)

int processor_level() {
#if defined(__linux__)
    constexpr unsigned long bf16 = 1ul << 14, i8mm = 1ul << 13, dot = 1ul << 20;
    return (getauxval(AT_HWCAP2) & bf16) && (getauxval(AT_HWCAP2) & i8mm) && (getauxval(AT_HWCAP) & dot) ? 1 : 0;
#else
    return 0;
#endif
}

#else

int processor_level() { return 0; }

#endif

}  // namespace sgl
