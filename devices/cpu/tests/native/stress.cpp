// Many short runs of pools of several sizes, with late threads; what the parts write is read without locks afterwards, so
// that the thread sanitizer sees whether the pool orders it.
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

#include "pool.h"

namespace {

void stress(int threads, int runs) {
    sgl::Pool pool(threads, nullptr, 0);
    std::vector<int64_t> hits(300, 0), sums(static_cast<size_t>(threads) * 8, 0);
    int64_t expected = 0;
    for (int run = 0; run < runs; ++run) {
        int64_t count = 1 + run * 37 % 300, grain = 1 + run % 7;
        expected += count;
        pool.run(count, grain, [&](int64_t first, int64_t last, int thread) {
            if (run % 100 == 99 && thread == run / 100 % threads)
                std::this_thread::sleep_for(std::chrono::microseconds(300));
            auto* own = static_cast<int64_t*>(pool.scratch(thread, static_cast<size_t>(1 + run % 2000) * 8));
            own[0] = last - first;
#ifdef PLANTED_RACE
            sums[0] += own[0];
#else
            sums[static_cast<size_t>(thread) * 8] += own[0];
#endif
            for (int64_t i = first; i < last; ++i) hits[static_cast<size_t>(i)] += 1;
        });
        if (run % 50 == 49) std::this_thread::sleep_for(std::chrono::microseconds(200));
    }
    int64_t visits = 0, parts = 0;
    for (int64_t hit : hits) visits += hit;
    for (int64_t sum : sums) parts += sum;
    if (visits != expected || parts != expected) {
        std::fprintf(stderr, "%d threads: found %ld visits in parts of %ld, wanted %ld\n", threads, static_cast<long>(visits),
                     static_cast<long>(parts), static_cast<long>(expected));
        std::exit(1);
    }
}

}  // namespace

int main() {
    for (int threads : {1, 2, 3, 5, 9}) stress(threads, 2000);
}
