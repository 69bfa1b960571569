// Kernels that only tests call: the sixteen lanes, the pool, and defects that must be seen.
#pragma once

#include "kernels.h"

// One call of each function over vectors of sixteen lanes: x, y, z and out are its operands, `count` its number of lanes.
#define SGL_PROBE_LANES_ARGS(P, I, D) P(x) P(y) P(z) P(out) I(function) I(count)
SGL_ARGS(ProbeLanesArgs, SGL_PROBE_LANES_ARGS)

// hits [count] int32 grows by one for each visit, threads [count] int32 is the thread, all `runs` times. Thread `waits`
// stays in a part until all others are done; with kTogether, each part until as many have begun as there are threads. The
// part that contains `fails` throws in the last run.
#define SGL_PROBE_POOL_ARGS(P, I, D) P(hits) P(threads) I(count) I(grain) I(runs) I(waits) I(fails)
SGL_ARGS(ProbePoolArgs, SGL_PROBE_POOL_ARGS)

// A defect: 0 writes past the end of its own memory, 1 reads past it, 2 adds beyond the greatest int32.
#define SGL_PROBE_DEFECT_ARGS(P, I, D) P(out) I(kind)
SGL_ARGS(ProbeDefectArgs, SGL_PROBE_DEFECT_ARGS)

namespace sgl::SGL_ISA {

constexpr int64_t kTogether = -2;

}  // namespace sgl::SGL_ISA
