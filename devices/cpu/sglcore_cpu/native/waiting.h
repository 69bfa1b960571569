// Waiting for a word that another thread or process writes: by spinning for some microseconds, then asleep in the system.
#pragma once

#include <atomic>
#include <chrono>
#include <climits>
#include <cstdint>
#include <thread>

#ifdef __linux__
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace sgl {

constexpr int kPauses = 32;
constexpr std::chrono::microseconds kSpin{60};  // longer than the gap between two kernels of a step

inline void pause_core() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("isb" ::: "memory");
#endif
}

// Whether `done` comes true within kSpin. By the clock, so that who lost its core meanwhile does not go on spinning.
template <class Done>
bool spin_until(Done done) {
    if (done()) return true;
    auto end = std::chrono::steady_clock::now() + kSpin;
    do {
        for (int i = 0; i < kPauses; ++i) {
            pause_core();
            if (done()) return true;
        }
    } while (std::chrono::steady_clock::now() < end);
    return false;
}

// Who writes the word: a thread of this process, or whoever shares the memory.
enum class Among { kThreads, kProcesses };

// Until somebody wakes those who sleep on the word, unless it has another value already; also for no reason at all.
template <Among among>
void sleep_while(std::atomic<uint32_t>& word, uint32_t value) {
#ifdef __linux__
    constexpr int wait = among == Among::kThreads ? FUTEX_WAIT_PRIVATE : FUTEX_WAIT;
    syscall(SYS_futex, &word, wait, value, nullptr, nullptr, 0);
#else
    if (word.load() == value) std::this_thread::sleep_for(std::chrono::microseconds(100));
#endif
}

template <Among among>
void wake_all(std::atomic<uint32_t>& word) {
#ifdef __linux__
    constexpr int wake = among == Among::kThreads ? FUTEX_WAKE_PRIVATE : FUTEX_WAKE;
    syscall(SYS_futex, &word, wake, INT_MAX, nullptr, nullptr, 0);
#else
    (void)word;
#endif
}

}  // namespace sgl
