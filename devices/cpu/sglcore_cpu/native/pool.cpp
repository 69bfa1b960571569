#include "pool.h"

#include <cstdlib>
#include <new>

#ifdef __linux__
#include <pthread.h>
#include <sched.h>
#endif

#include "waiting.h"

namespace sgl {

namespace {

constexpr int kMostCores = 8192;
uint64_t packed(uint32_t generation, uint32_t chunk) { return (static_cast<uint64_t>(generation) << 32) | chunk; }

void run_on(const std::vector<int>& cores) {
#ifdef __linux__
    if (cores.empty()) return;
    cpu_set_t* set = CPU_ALLOC(static_cast<size_t>(kMostCores));
    size_t size = CPU_ALLOC_SIZE(static_cast<size_t>(kMostCores));
    CPU_ZERO_S(size, set);
    for (int core : cores)
        if (core < kMostCores) CPU_SET_S(static_cast<size_t>(core), size, set);
    pthread_setaffinity_np(pthread_self(), size, set);  // some containers refuse; then the thread runs anywhere
    CPU_FREE(set);
#else
    (void)cores;
#endif
}

std::vector<std::vector<int>> split(const int* cores, int num_cores) {
    std::vector<std::vector<int>> lists;
    bool ended = true;
    for (int i = 0; i < num_cores; ++i) {
        if (ended) lists.emplace_back();
        ended = cores[i] < 0;
        if (!ended) lists.back().push_back(cores[i]);
    }
    return lists;
}

}  // namespace

Pool::Pool(int threads, const int* cores, int num_cores)
    : shares_(new Share[static_cast<size_t>(threads)]),
      memory_(static_cast<size_t>(threads) + 1),
      cores_(split(cores, num_cores)) {
    try {
        workers_.reserve(static_cast<size_t>(threads) - 1);
        for (int thread = 1; thread < threads; ++thread) workers_.emplace_back([this, thread] { serve(thread); });
    } catch (...) {
        close();
        throw;
    }
}

Pool::~Pool() {
    close();
    for (auto& memory : memory_) std::free(memory.data);
}

void Pool::close() {
    closing_.store(true);
    generation_.fetch_add(1);
    wake_all<Among::kThreads>(generation_);
    for (auto& worker : workers_) worker.join();
}

void* Pool::scratch(int thread, size_t bytes) {
    Memory& memory = memory_[static_cast<size_t>(thread)];
    if (memory.size < bytes) {
        std::free(memory.data);
        memory = {};
        size_t size = ((bytes + bytes / 4) / 4096 + 1) * 4096;
        memory.data = std::aligned_alloc(4096, size);
        if (memory.data == nullptr) throw std::bad_alloc();
        memory.size = size;
    }
    return memory.data;
}

void Pool::start(Job job) {
    uint32_t generation = generation_.load(std::memory_order_relaxed) + 1;
    job_ = job;
    open(generation);
    generation_.store(generation);
    if (sleeping_.load() != 0) wake_all<Among::kThreads>(generation_);
    work(generation, 0);
    wait_until_done();
    if (failed_.load(std::memory_order_relaxed)) {
        failed_.store(false, std::memory_order_relaxed);
        throw std::bad_alloc();
    }
}

// A worker may still look for chunks of the generation before. Each `last` is therefore published after its share's
// number has changed, and read with acquire: who sees the new one fails to claim by the old number.
void Pool::open(uint32_t generation) {
    int64_t parts = threads(), chunks = (job_.count + job_.grain - 1) / job_.grain;
    left_.store(chunks, std::memory_order_relaxed);
    for (int64_t part = 0; part < parts; ++part) {
        Share& share = shares_[static_cast<size_t>(part)];
        auto begin = static_cast<uint32_t>(chunks * part / parts);
        auto end = static_cast<uint32_t>(chunks * (part + 1) / parts);
        share.next.store(packed(generation, UINT32_MAX), std::memory_order_relaxed);
        share.last.store(end, std::memory_order_release);
        share.next.store(packed(generation, begin), std::memory_order_release);
    }
}

bool Pool::claim(Share& share, uint32_t generation, int64_t* chunk) {
    uint64_t word = share.next.load(std::memory_order_acquire);
    while (true) {
        auto next = static_cast<uint32_t>(word);
        if ((word >> 32) != generation || next >= share.last.load(std::memory_order_acquire)) return false;
        if (share.next.compare_exchange_weak(word, word + 1, std::memory_order_acq_rel, std::memory_order_acquire)) {
            *chunk = next;
            return true;
        }
    }
}

void Pool::run_chunk(int64_t chunk, int thread) {
    int64_t first = chunk * job_.grain, last = first + job_.grain;
    try {
        job_.task(job_.context, first, last < job_.count ? last : job_.count, thread);
    } catch (...) {
        failed_.store(true, std::memory_order_relaxed);
    }
}

void Pool::work(uint32_t generation, int thread) {
    int64_t finished = 0, chunk = 0;
    for (int step = 0; step < threads(); ++step) {
        Share& share = shares_[static_cast<size_t>((thread + step) % threads())];
        while (claim(share, generation, &chunk)) {
            run_chunk(chunk, thread);
            ++finished;
        }
    }
    if (finished && left_.fetch_sub(finished) == finished && thread != 0) {
        done_.fetch_add(1);
        if (waiting_.load() != 0) wake_all<Among::kThreads>(done_);
    }
}

void Pool::wait_until_done() {
    while (!spin_until([this] { return left_.load(std::memory_order_acquire) == 0; })) {
        uint32_t done = done_.load();
        waiting_.store(1);
        if (left_.load() != 0) sleep_while<Among::kThreads>(done_, done);
        waiting_.store(0);
    }
}

void Pool::serve(int thread) {
    if (static_cast<size_t>(thread) < cores_.size()) run_on(cores_[static_cast<size_t>(thread)]);
    uint32_t seen = 0;
    while (true) {
        uint32_t current = seen;
        bool is_called = spin_until([&] {
            current = generation_.load(std::memory_order_acquire);
            return current != seen;
        });
        if (!is_called) {
            sleeping_.fetch_add(1);
            sleep_while<Among::kThreads>(generation_, seen);
            sleeping_.fetch_sub(1);
            continue;
        }
        if (closing_.load()) return;
        work(current, thread);
        seen = current;
    }
}

}  // namespace sgl
