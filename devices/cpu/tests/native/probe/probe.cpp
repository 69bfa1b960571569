#include "probe.h"

#include <atomic>
#include <climits>
#include <cstdlib>
#include <new>
#include <thread>

namespace sgl::SGL_ISA {

namespace {

struct Parts {
    std::atomic<int64_t> begun{0}, done{0};
    int64_t threads, chunks, waits;

    void begin(int thread) {
        ++begun;
        while (waits == kTogether && begun < threads) std::this_thread::yield();
        while (waits == thread && done + 1 < chunks) std::this_thread::yield();
    }
};

void probe_pool(const ProbePoolArgs& args, Pool& pool) {
    auto* hits = static_cast<int32_t*>(args.hits);
    auto* threads = static_cast<int32_t*>(args.threads);
    for (int64_t run = 0; run < args.runs; ++run) {
        Parts parts{{0}, {0}, pool.threads(), (args.count + args.grain - 1) / args.grain, args.waits};
        pool.run(args.count, args.grain, [&](int64_t first, int64_t last, int thread) {
            parts.begin(thread);
            if (first <= args.fails && args.fails < last && run + 1 == args.runs) throw std::bad_alloc();
            auto* own = static_cast<int64_t*>(pool.scratch(thread, static_cast<size_t>(last - first) * 8));
            for (int64_t i = first; i < last; ++i) own[i - first] = i;
            for (int64_t i = first; i < last; ++i) hits[own[i - first]] += 1, threads[i] = thread;
            ++parts.done;
        });
    }
}

void probe_defect(const ProbeDefectArgs& args, Pool&) {
    int32_t* volatile hidden = static_cast<int32_t*>(std::malloc(64));
    int32_t* own = hidden;
    volatile int64_t past = 16, most = INT_MAX;
    for (int i = 0; i < 16; ++i) own[i] = i;
    if (args.kind == 0) own[past] = 1;
    *static_cast<int32_t*>(args.out) = args.kind == 1 ? own[past] : own[3];
    if (args.kind == 2) *static_cast<int32_t*>(args.out) = static_cast<int32_t>(most) + own[3];
    std::free(own);
}

}  // namespace

SGL_KERNELS(probe_pool,
    SGL_KERNEL("probe_pool", probe_pool, ProbePoolArgs),
    SGL_KERNEL("probe_defect", probe_defect, ProbeDefectArgs))

}  // namespace sgl::SGL_ISA
