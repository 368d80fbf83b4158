// Inlining that is asked for, not left to the compiler: kernels need it for their loops, and what headers share with the
// sources of an instruction set (isa.h) for another reason, too. A copy that is not inlined may be any source's, and so
// use instructions that the processor does not have.
#pragma once

#define CHAIRLIFT_ALWAYS __attribute__((always_inline))  // behind a lambda's parameters
#define CHAIRLIFT_INLINE inline CHAIRLIFT_ALWAYS
