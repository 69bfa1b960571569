// What a kernel is to the library: a name, a function over one record of arguments, and the layout of that record.
//
// A record's fields are words of eight bytes, declared once:
//
//     #define SGL_SCALE_ARGS(P, I, D) P(x) I(count) D(factor)     // a pointer, an integer, a double
//     SGL_ARGS(ScaleArgs, SGL_SCALE_ARGS)
//
// Python packs the same words by the layout's text, so nothing is written twice.
#pragma once

#include <cstddef>
#include <cstdint>

#include "pool.h"

namespace sgl {

struct Kernel {
    const char* name;
    void (*run)(const void* args, Pool& pool);
    size_t args_size;
    const char* layout;  // "P:x I:count D:factor "
};

// The kernels of one source file for one instruction set.
struct KernelList {
    const Kernel* kernels;
    int count;
};

// Element types as arguments name them.
enum Type : int64_t { kF32 = 0, kBF16 = 1, kI8 = 2, kF16 = 3, kCodes = 4 };

}  // namespace sgl

#define SGL_FIELD_P(name) void* name;
#define SGL_FIELD_I(name) int64_t name;
#define SGL_FIELD_D(name) double name;
#define SGL_TEXT_P(name) "P:" #name " "
#define SGL_TEXT_I(name) "I:" #name " "
#define SGL_TEXT_D(name) "D:" #name " "

#define SGL_ARGS(Record, FIELDS)                                                        \
    namespace sgl {                                                                     \
    struct Record {                                                                     \
        FIELDS(SGL_FIELD_P, SGL_FIELD_I, SGL_FIELD_D)                                   \
        static constexpr const char* layout = FIELDS(SGL_TEXT_P, SGL_TEXT_I, SGL_TEXT_D); \
    };                                                                                  \
    }

// An entry of a list: void function(const Record&, Pool&) under the name that Python calls.
#define SGL_KERNEL(name, function, Record)                                                       \
    ::sgl::Kernel {                                                                              \
        name, [](const void* args, ::sgl::Pool& pool) { function(*static_cast<const Record*>(args), pool); }, \
            sizeof(Record), Record::layout                                                       \
    }

// The kernels that a source file offers, at the end of the file and within its namespace:
//
//     SGL_KERNELS(scale, SGL_KERNEL("scale", scale, ScaleArgs))
//
// The build finds lists by this macro; their names differ from each other.
#define SGL_KERNELS(list, ...)                            \
    extern const ::sgl::KernelList list##_kernels;        \
    static const ::sgl::Kernel list##_rows[] = {__VA_ARGS__}; \
    const ::sgl::KernelList list##_kernels = {list##_rows, sizeof(list##_rows) / sizeof(list##_rows[0])};
