#include "isa.h"

#include <stdexcept>

#if defined(CHAIRLIFT_HAVE_NEON) && defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

#ifdef CHAIRLIFT_HAVE_AMX
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace chairlift {

#ifdef CHAIRLIFT_HAVE_AMX
namespace {

// Whether the processor has tiles of bytes and bf16, and the system lets this process use them: it must be asked, since
// it saves their 8 KiB for each thread that has touched them.
bool may_use_tiles() {
    constexpr int kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    constexpr unsigned kTiles = 1u << 22 | 1u << 24 | 1u << 25;  // bf16, tiles, bytes
    unsigned a, b, c, d;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & kTiles) != kTiles) return false;
    return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

}  // namespace
#endif

std::vector<Isa> available_isas() {
    std::vector<Isa> found;
#ifdef CHAIRLIFT_HAVE_AVX2  // and so also where AVX-512 is built
    __builtin_cpu_init();
#endif
#ifdef CHAIRLIFT_HAVE_AVX512
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vnni")) {
#ifdef CHAIRLIFT_HAVE_AMX
        static const bool tiles = may_use_tiles();
        if (tiles) found.push_back(Isa::amx);
#endif
        found.push_back(Isa::avx512);
    }
#endif
#ifdef CHAIRLIFT_HAVE_AVX2
    // Every processor with AVX2 also converts f16 (F16C is older, and not a name all compilers know here).
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) found.push_back(Isa::avx2);
#endif
#ifdef CHAIRLIFT_HAVE_NEON
#ifdef __linux__
    if (getauxval(AT_HWCAP) & HWCAP_ASIMDDP) found.push_back(Isa::neon);
#else
    found.push_back(Isa::neon);  // Apple's processors all have it
#endif
#endif
    found.push_back(Isa::portable);
    return found;
}

const char* isa_name(Isa isa) {
    switch (isa) {
        case Isa::amx: return "amx";
        case Isa::avx512: return "avx512";
        case Isa::avx2: return "avx2";
        case Isa::neon: return "neon";
        default: return "portable";
    }
}

Isa parse_isa(const std::string& name) {
    const std::vector<Isa> available = available_isas();
    if (name == "auto") return available.front();
    std::string names;
    for (const Isa isa : available) {
        if (name == isa_name(isa)) return isa;
        names += std::string(", ") + isa_name(isa);
    }
    throw std::invalid_argument("instruction set '" + name + "' is not available here; choose one of: auto" + names);
}

}  // namespace chairlift
