// Instruction sets, chosen at run time.
//
// A source named NAME.isa.cpp is compiled once per instruction set, with CHAIRLIFT_ISA defined as its name, and puts
// everything it defines into namespace chairlift::CHAIRLIFT_ISA. It exports one constant table of function pointers:
//
//     // things.h                                                 // things.isa.cpp
//     struct ThingKernels { void (*thing)(float*, int); };        #include "simd.h"
//     CHAIRLIFT_PER_ISA(ThingKernels, thing_kernels)              #include "things.h"
//                                                                 namespace chairlift::CHAIRLIFT_ISA {
//     // a caller                                                 static void thing(float* x, int n) { ... }
//     thing_kernels(isa).thing(x, n);                             extern const ThingKernels thing_kernels = {thing};
//                                                                 }
//
// Such a source must not call inline functions or templates of other namespaces that the compiler may leave out of
// line (std::vector, std::max, ...): the linker keeps one copy of those, and it could be the one for a processor that
// this machine is not. Plain structs, pointers and simd.h are all it needs.
#pragma once

#include <string>
#include <vector>

namespace chairlift {

enum class Isa { portable, neon, avx2, avx512, amx };

// The sets that this build contains and this processor runs, best first. Never empty.
std::vector<Isa> available_isas();

// "portable"; "neon" with dot products of bytes: ARM's servers since 2019; "avx2" with FMA; "avx512" F, BW, DQ, VL and
// VNNI: servers since 2019, Zen 4 and later; "amx" is that with tiles of bytes and bf16: Intel's servers since
// 2023. Matrix products have the same bits with the last three.
const char* isa_name(Isa isa);

// "auto" is the best available; throws std::invalid_argument for a name that is unknown or not available here.
Isa parse_isa(const std::string& name);

}  // namespace chairlift

#ifdef CHAIRLIFT_HAVE_AVX2
#define CHAIRLIFT_SELECT_AVX2(table) \
    if (isa == Isa::avx2) return avx2::table;
#else
#define CHAIRLIFT_SELECT_AVX2(table)
#endif
#ifdef CHAIRLIFT_HAVE_AVX512
#define CHAIRLIFT_SELECT_AVX512(table) \
    if (isa == Isa::avx512) return avx512::table;
#else
#define CHAIRLIFT_SELECT_AVX512(table)
#endif
#ifdef CHAIRLIFT_HAVE_AMX
#define CHAIRLIFT_SELECT_AMX(table) \
    if (isa == Isa::amx) return amx::table;
#else
#define CHAIRLIFT_SELECT_AMX(table)
#endif
#ifdef CHAIRLIFT_HAVE_NEON
#define CHAIRLIFT_SELECT_NEON(table) \
    if (isa == Isa::neon) return neon::table;
#else
#define CHAIRLIFT_SELECT_NEON(table)
#endif

// Declares the table that each instruction set exports, and the function that picks one of them.
// Stands at the end of a header, outside any namespace.
#ifdef CHAIRLIFT_ISA
#define CHAIRLIFT_PER_ISA(Table, table)      \
    namespace chairlift::CHAIRLIFT_ISA {     \
    extern const Table table;                \
    }
#else
#define CHAIRLIFT_PER_ISA(Table, table)      \
    namespace chairlift::portable {          \
    extern const Table table;                \
    }                                        \
    namespace chairlift::avx2 {              \
    extern const Table table;                \
    }                                        \
    namespace chairlift::avx512 {            \
    extern const Table table;                \
    }                                        \
    namespace chairlift::amx {               \
    extern const Table table;                \
    }                                        \
    namespace chairlift::neon {              \
    extern const Table table;                \
    }                                        \
    namespace chairlift {                    \
    inline const Table& table([[maybe_unused]] Isa isa) { \
        CHAIRLIFT_SELECT_NEON(table)         \
        CHAIRLIFT_SELECT_AMX(table)          \
        CHAIRLIFT_SELECT_AVX512(table)       \
        CHAIRLIFT_SELECT_AVX2(table)         \
        return portable::table;              \
    }                                        \
    }
#endif
