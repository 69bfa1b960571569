// Kernels of another kind of processor, called from a process of this one through an emulator: calls come in on standard
// input, answers go out on standard output, as words of eight bytes.
//
// The kernels' memory is the caller's. A page of it comes over when it is first touched; when a call is done, the bytes
// that it changed go back and the pages are forgotten.
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <vector>

extern "C" {
int sgl_processor_level();
void* sgl_engine_new(int set, int threads, const int* cores, int num_cores);
void sgl_engine_free(void* engine);
int sgl_num_kernels(void* engine);
const char* sgl_kernel_name(void* engine, int kernel);
const char* sgl_kernel_layout(void* engine, int kernel);
int sgl_call(void* engine, int kernel, const void* args);
}

namespace {

constexpr uintptr_t kPage = 4096;
enum Word : uint64_t { kNew = 1, kFree = 2, kDescribe = 3, kCall = 4, kLevel = 5, kNeedPage = 6, kDone = 7 };

std::map<uintptr_t, std::vector<char>> pages;  // as they came
std::atomic_flag held = ATOMIC_FLAG_INIT;

void receive(void* data, size_t size) {
    for (size_t at = 0; at < size;) {
        ssize_t got = read(0, static_cast<char*>(data) + at, size - at);
        if (got <= 0) std::_Exit(0);  // the caller is gone
        at += static_cast<size_t>(got);
    }
}
void send(const void* data, size_t size) {
    for (size_t at = 0; at < size;) {
        ssize_t put = write(1, static_cast<const char*>(data) + at, size - at);
        if (put <= 0) std::_Exit(0);
        at += static_cast<size_t>(put);
    }
}
uint64_t word() {
    uint64_t value;
    receive(&value, 8);
    return value;
}
void send_word(uint64_t value) { send(&value, 8); }
void send_text(const char* text) {
    send_word(std::strlen(text));
    send(text, std::strlen(text));
}

// The page appears at its place with its content in it, for other threads run on meanwhile.
void fetch(uintptr_t page) {
    send_word(kNeedPage);
    send_word(page);
    std::vector<char> content(kPage);
    receive(content.data(), kPage);
    void* fresh = mmap(nullptr, kPage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    std::memcpy(fresh, content.data(), kPage);
    pages[page] = std::move(content);
    void* place = reinterpret_cast<void*>(page);
    if (mremap(fresh, kPage, kPage, MREMAP_MAYMOVE | MREMAP_FIXED, place) != place) std::_Exit(3);
}

void on_fault(int, siginfo_t* fault, void*) {
    uintptr_t page = reinterpret_cast<uintptr_t>(fault->si_addr) & ~(kPage - 1);
    while (held.test_and_set()) sched_yield();
    if (pages.count(page) == 0) fetch(page);
    held.clear();
}

void send_changes(uintptr_t page, const std::vector<char>& before) {
    const char* now = reinterpret_cast<const char*>(page);
    for (uintptr_t at = 0; at < kPage; ++at) {
        uintptr_t first = at;
        while (at < kPage && now[at] != before[at]) ++at;
        if (at == first) continue;
        send_word(page + first);
        send_word(at - first);
        send(now + first, at - first);
    }
}

void call() {
    void* engine = reinterpret_cast<void*>(word());
    int kernel = static_cast<int>(word());
    std::vector<uint64_t> args(word() / 8);
    receive(args.data(), args.size() * 8);
    int failed = 0;
    // Again, from the same memory, until no page was missing: not every emulated instruction that faults half-way is
    // repeated exactly.
    for (size_t before = 1; before != pages.size();) {
        before = pages.size();
        for (const auto& [page, content] : pages) std::memcpy(reinterpret_cast<void*>(page), content.data(), kPage);
        failed = sgl_call(engine, kernel, args.data());
    }
    send_word(kDone);
    send_word(static_cast<uint64_t>(failed));
    for (const auto& [page, before] : pages) {
        send_changes(page, before);
        munmap(reinterpret_cast<void*>(page), kPage);
    }
    send_word(0);
    pages.clear();
}

void create() {
    int threads = static_cast<int>(word());
    send_word(reinterpret_cast<uint64_t>(sgl_engine_new(0, threads, nullptr, 0)));
}

void describe() {
    void* engine = reinterpret_cast<void*>(word());
    int count = sgl_num_kernels(engine);
    send_word(static_cast<uint64_t>(count));
    for (int kernel = 0; kernel < count; ++kernel) {
        send_text(sgl_kernel_name(engine, kernel));
        send_text(sgl_kernel_layout(engine, kernel));
    }
}

}  // namespace

int main() {
    struct sigaction action = {};
    action.sa_sigaction = on_fault;
    action.sa_flags = SA_SIGINFO;
    sigaction(SIGSEGV, &action, nullptr);
    while (true) {
        switch (word()) {
            case kLevel: send_word(static_cast<uint64_t>(sgl_processor_level())); break;
            case kNew: create(); break;
            case kFree: sgl_engine_free(reinterpret_cast<void*>(word())); break;
            case kDescribe: describe(); break;
            case kCall: call(); break;
            default: return 2;
        }
    }
}
