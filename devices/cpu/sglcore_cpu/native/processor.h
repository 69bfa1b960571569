// What this processor and its operating system offer.
#pragma once

namespace sgl {

// The highest level of isa.h whose instructions may be used here: 1 NEON with bf16, 2 AVX2, ... 6 AMX; 0 for none.
int processor_level();

}  // namespace sgl
