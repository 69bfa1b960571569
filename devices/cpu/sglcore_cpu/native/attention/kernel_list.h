// The kernels of this topic.
#pragma once

#include "attention.h"
#include "isa.h"

namespace sgl::SGL_ISA {

void paged_decode(const DecodeArgs& args, Pool& pool);
void paged_prefill(const PrefillArgs& args, Pool& pool);
void store_kv_int8(const StoreInt8Args& args, Pool& pool);

}  // namespace sgl::SGL_ISA
