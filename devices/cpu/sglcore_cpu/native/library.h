// The instruction sets this library was built for, and the kernels of each; the list itself is written by the build.
#pragma once

#include "kernels.h"

namespace sgl {

struct InstructionSet {
    const char* name;
    int level;
    const KernelList* const* lists;
    int num_lists;
};

extern const InstructionSet kInstructionSets[];  // ascending
extern const int kNumInstructionSets;
extern const char* const kSourceDigest;
extern const bool kEmulates;

}  // namespace sgl
