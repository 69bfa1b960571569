// Threads that share out one kernel's work. Who waits spins for some microseconds, so that kernels follow each other
// without a system call, and then sleeps until it is woken, so that a core that others want is not spun away.
//
// Work is claimed in small chunks, each thread's own share first, so that a thread whose core is busy with something
// else delays the others by one chunk at most. Which share is whose depends on the count of chunks alone: who touched a
// part of memory first, as it was packed, reads that part, unless late, ever after.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <thread>
#include <type_traits>
#include <vector>

namespace sgl {

constexpr int64_t kLine = 64;

class Pool {
  public:
    // `threads` >= 1 counts the caller. `cores` are lists, each ended by -1, of where each thread may run; the caller's
    // is not heeded, and a thread that has none or an empty one may run anywhere. Throws where threads can not be made.
    Pool(int threads, const int* cores, int num_cores);
    ~Pool();
    Pool(const Pool&) = delete;
    Pool& operator=(const Pool&) = delete;

    int threads() const { return static_cast<int>(memory_.size()) - 1; }

    // body(first, last, thread) for disjoint parts of [0, count), none longer than `grain` >= 1, fewer than 2^32 of them;
    // returns when all are done. A part of thread t's share goes to t unless t is late. One call at a time, never from
    // within a body. What a body throws is std::bad_alloc by the time it leaves here.
    template <class Body>
    void run(int64_t count, int64_t grain, Body&& body) {
        if (count <= 0) return;
        if (threads() == 1 || count <= grain) {
            for (int64_t i = 0; i < count; i += grain) body(i, i + grain < count ? i + grain : count, 0);
            return;
        }
        using Plain = std::remove_reference_t<Body>;
        start({count, grain, [](void* context, int64_t first, int64_t last, int thread) {
            (*static_cast<Plain*>(context))(first, last, thread);
        }, const_cast<void*>(static_cast<const void*>(&body))});
    }

    // At least `bytes` of memory of `thread`'s own, aligned to 64; contents undefined, valid until its next request.
    // Throws std::bad_alloc.
    void* scratch(int thread, size_t bytes);
    // The same for what all threads of one kernel share; to be taken by the calling thread before `run`.
    void* shared(size_t bytes) { return scratch(threads(), bytes); }

  private:
    struct Job {
        int64_t count = 0, grain = 1;
        void (*task)(void* context, int64_t first, int64_t last, int thread) = nullptr;
        void* context = nullptr;
    };
    // Chunks [next, last) of one generation are still to be claimed. `next` carries the generation's number above the
    // chunk's, so that who is late for a generation claims nothing of the next one.
    struct alignas(kLine) Share {
        std::atomic<uint64_t> next{0};
        std::atomic<uint32_t> last{0};
    };
    struct alignas(kLine) Memory {
        void* data = nullptr;
        size_t size = 0;
    };

    void start(Job job);
    void open(uint32_t generation);
    void work(uint32_t generation, int thread);
    bool claim(Share& share, uint32_t generation, int64_t* chunk);
    void run_chunk(int64_t chunk, int thread);
    void serve(int thread);
    void wait_until_done();
    void close();

    std::vector<std::thread> workers_;
    std::unique_ptr<Share[]> shares_;
    std::vector<Memory> memory_;
    std::vector<std::vector<int>> cores_;

    Job job_;  // written by the caller while no chunk is open, read by who has claimed one
    alignas(kLine) std::atomic<uint32_t> generation_{0};
    std::atomic<uint32_t> sleeping_{0};
    std::atomic<bool> closing_{false};
    alignas(kLine) std::atomic<int64_t> left_{0};  // chunks
    std::atomic<uint32_t> done_{0};
    std::atomic<uint32_t> waiting_{0};
    std::atomic<bool> failed_{false};
};

}  // namespace sgl
