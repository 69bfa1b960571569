// The library's C interface: an engine is an instruction set and a pool of threads; kernels are called by number.
#include <atomic>
#include <cstring>
#include <memory>
#include <vector>

#include "library.h"
#include "processor.h"

using namespace sgl;

namespace {

struct Engine {
    std::vector<Kernel> kernels;
    Pool pool;
    std::atomic<bool> busy{false};

    Engine(const InstructionSet& set, int threads, const int* cores, int num_cores) : pool(threads, cores, num_cores) {
        for (int i = 0; i < set.num_lists; ++i) {
            const KernelList& list = *set.lists[i];
            kernels.insert(kernels.end(), list.kernels, list.kernels + list.count);
        }
    }
};

enum Outcome : int { kDone = 0, kNoMemory = 1, kBusy = 2 };

// Runs work on an engine that no other thread is in.
template <class Work>
int alone(Engine* engine, Work&& work) {
    if (engine->busy.exchange(true, std::memory_order_acquire)) return kBusy;
    int outcome = kDone;
    try {
        work();
    } catch (...) {
        outcome = kNoMemory;
    }
    engine->busy.store(false, std::memory_order_release);
    return outcome;
}

// Kernel calls in order, with their arguments as they were.
struct Program {
    struct Call {
        void (*run)(const void*, Pool&);
        size_t place;
    };
    Engine* engine;
    std::vector<Call> calls;
    std::vector<uint64_t> words;
};

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

const char* sgl_source_digest() { return kSourceDigest; }
int sgl_processor_level() { return processor_level(); }
int sgl_emulates() { return kEmulates; }
int sgl_num_instruction_sets() { return kNumInstructionSets; }
const char* sgl_instruction_set_name(int set) { return kInstructionSets[set].name; }
int sgl_instruction_set_level(int set) { return kInstructionSets[set].level; }

// `threads` >= 1 counts the caller. Null where threads can not be made.
void* sgl_engine_new(int set, int threads, const int* cores, int num_cores) try {
    return new Engine(kInstructionSets[set], threads, cores, num_cores);
} catch (...) {
    return nullptr;
}
void sgl_engine_free(void* engine) { delete static_cast<Engine*>(engine); }
int sgl_num_kernels(void* engine) { return static_cast<int>(static_cast<Engine*>(engine)->kernels.size()); }
const char* sgl_kernel_name(void* engine, int kernel) { return static_cast<Engine*>(engine)->kernels[kernel].name; }
const char* sgl_kernel_layout(void* engine, int kernel) { return static_cast<Engine*>(engine)->kernels[kernel].layout; }

// An Outcome: no memory for the kernel's own use, or another thread is in this engine.
int sgl_call(void* engine, int kernel, const void* args) {
    auto* owner = static_cast<Engine*>(engine);
    return alone(owner, [&] { owner->kernels[kernel].run(args, owner->pool); });
}

void* sgl_program_new(void* engine) { return new Program{static_cast<Engine*>(engine), {}, {}}; }
void sgl_program_free(void* program) { delete static_cast<Program*>(program); }
void sgl_program_add(void* program, int kernel, const void* args) {
    auto* target = static_cast<Program*>(program);
    const Kernel& entry = target->engine->kernels[kernel];
    size_t place = target->words.size();
    target->words.resize(place + entry.args_size / 8);
    std::memcpy(target->words.data() + place, args, entry.args_size);
    target->calls.push_back({entry.run, place});
}
int sgl_program_size(void* program) { return static_cast<int>(static_cast<Program*>(program)->calls.size()); }

// The calls [first, last), in order. An Outcome.
int sgl_program_run(void* program, int first, int last) {
    auto* source = static_cast<Program*>(program);
    return alone(source->engine, [&] {
        for (int i = first; i < last; ++i)
            source->calls[i].run(source->words.data() + source->calls[i].place, source->engine->pool);
    });
}

}  // extern "C"
#pragma GCC visibility pop
