// Measures the matrix products and the limits of the machine they run against. benchmarks/kernels.py builds and runs
// this and prints the table.
//
//   kernel_bench ISA THREADS OUT IN SECONDS
//
// Each line of output is "NAME KEY VALUE": multiply-adds (limits: also bytes) per second, the best of several rounds.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <functional>
#include <random>
#include <vector>

#include "half.h"
#include "matmul.h"

#ifdef CHAIRLIFT_HAVE_AVX2
#include <immintrin.h>
#endif

using namespace chairlift;

namespace {

constexpr int kRounds = 7;
constexpr std::size_t kBeyondCaches = 192 << 20;  // bytes
constexpr int kMaxRows = 128;

double now() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Units per second, the best of the rounds. `work(thread, times)` does `units` a time, on all threads together.
double rate(ThreadPool& pool, double units, double seconds, const std::function<void(int, int)>& work) {
    int times = 1;
    double best = 0.0;
    for (int round = 0; round < kRounds;) {
        const double start = now();
        pool.run([&](int thread) { work(thread, times); });
        const double took = now() - start;
        if (took < seconds / kRounds / 2 && times < (1 << 28)) {
            times *= 2;  // still finding out how often a round should do it
            continue;
        }
        best = std::max(best, units * times / took);
        round++;
    }
    return best;
}

// A valid tensor: random bytes, and f16 scales of 1/16 where the type has them.
std::vector<std::uint8_t> random_tensor(Type type, int rows, int cols) {
    std::mt19937 random(1);
    std::vector<std::uint8_t> data(stored_bytes(type, rows, cols));
    if (!is_quantized(type)) {
        const std::size_t element = stored_bytes(type, 1, 1);
        for (std::size_t i = 0; i < data.size(); i += element) {
            const float value = static_cast<float>(random() % 2001) / 1000.0f - 1.0f;
            const std::uint16_t f16 = f16_from_float(value), bf16 = static_cast<std::uint16_t>(bits_from_float(value) >> 16);
            std::memcpy(&data[i], type == Type::f32 ? static_cast<const void*>(&value) : type == Type::f16 ? &f16 : &bf16,
                        element);
        }
        return data;
    }
    for (std::uint8_t& byte : data) byte = static_cast<std::uint8_t>(random());
    const bool super_blocks = type >= Type::q4_k;
    const std::size_t block = stored_bytes(type, 1, super_blocks ? 256 : 32);
    const std::uint16_t scale = f16_from_float(1.0f / 16);
    for (std::size_t i = 0; i < data.size(); i += block) {
        const std::size_t at = type == Type::q6_k ? block - 2 : 0;
        std::memcpy(&data[i + at], &scale, 2);
        if (type == Type::q4_1 || type == Type::q5_1 || type == Type::q4_k || type == Type::q5_k)
            std::memcpy(&data[i + 2], &scale, 2);
    }
    return data;
}

void measure_type(const char* name, const MatmulKernels& kernels, ThreadPool& pool, int rows, int cols, double seconds) {
    const Type type = parse_type(name);
    const PackedMatrix packed = pack(type, rows, cols, random_tensor(type, rows, cols), type, pool);
    std::printf("%s bytes %zu\n%s weights %d\n", name, packed.bytes(), name, rows * cols);

    // One row reads weights that no cache holds, as a model larger than the caches does: many copies in turn.
    const int copies = static_cast<int>(std::max<std::size_t>(1, kBeyondCaches / packed.bytes()));
    AlignedBuffer memory(copies * packed.bytes());
    std::vector<MatrixView> views(copies, packed.view);
    for (int i = 0; i < copies; i++) {
        std::uint8_t* data = memory.data() + i * packed.bytes();
        std::memcpy(data, packed.storage.data(), packed.bytes());
        views[i].data = data;
    }

    std::vector<float> x(static_cast<std::size_t>(kMaxRows) * cols), out(static_cast<std::size_t>(kMaxRows) * rows);
    std::mt19937 random(2);
    std::normal_distribution<float> normal;
    for (float& value : x) value = normal(random);
    const ActBuffer buffer(kMaxRows, cols);
    for (const int m : {1, 4, 8, 32, kMaxRows}) {
        const ActRows activations = buffer.rows(x.data(), cols, m, cols);
        if (is_quantized(type)) pool.run([&](int) { quantize_rows(kernels, activations, pool); });
        const double best = rate(pool, static_cast<double>(m) * rows * cols, seconds, [&](int, int times) {
            for (int i = 0; i < times; i++) {
                const MatmulJob job = {m == 1 ? &views[i % copies] : &packed.view, out.data(),
                                       static_cast<std::size_t>(rows)};
                matmul(kernels, {&job, 1}, activations, pool);
                pool.barrier();
            }
        });
        std::printf("%s %d %g\n", name, m, best);
        std::fflush(stdout);
    }
}

#ifdef CHAIRLIFT_HAVE_AVX2
// Twelve independent chains, more than latency needs; inline assembly, so that nothing is folded away.
#define TWELVE(op, r) \
    op(r, "0") op(r, "1") op(r, "2") op(r, "3") op(r, "4") op(r, "5") op(r, "6") op(r, "7") op(r, "8") op(r, "9") \
    op(r, "10") op(r, "11")
#define INT8_STEP(r, n) "vpmaddubsw %%" r "14, %%" r "15, %%" r "13\n\tvpaddw %%" r "13, %%" r n ", %%" r n "\n\t"
// Of two signed bytes: the sign goes to the other side, and each sum of two products, which fills 16 bits, into 32.
#define SIGNED_STEP(r, n)                                                                                    \
    "vpsignb %%" r "14, %%" r "15, %%" r "13\n\tvpmaddubsw %%" r "13, %%" r "14, %%" r "13\n\tvpmaddwd %%" r \
    "13, %%" r "15, %%" r "13\n\tvpaddd %%" r "13, %%" r n ", %%" r n "\n\t"
#define VNNI_STEP(r, n) "vpdpbusd %%" r "14, %%" r "15, %%" r n "\n\t"
#define FLOAT_STEP(r, n) "vfmadd231ps %%" r "14, %%" r "15, %%" r n "\n\t"
#define ZERO "vpxor %%xmm14, %%xmm14, %%xmm14\n\tvpxor %%xmm15, %%xmm15, %%xmm15"
#define CLOBBERS \
    "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", "xmm10", "xmm11", "xmm13", "xmm14", \
        "xmm15"
#define LIMIT_LOOP(name, step, r)                                              \
    void name(int, int times) {                                                \
        asm volatile(ZERO ::: CLOBBERS);                                       \
        for (int i = 0; i < times; i++) asm volatile(TWELVE(step, r)::: CLOBBERS); \
    }

LIMIT_LOOP(int8_loop, INT8_STEP, "ymm")
LIMIT_LOOP(signed_loop, SIGNED_STEP, "ymm")
LIMIT_LOOP(float_loop, FLOAT_STEP, "ymm")
LIMIT_LOOP(vnni_loop, VNNI_STEP, "zmm")
LIMIT_LOOP(wide_float_loop, FLOAT_STEP, "zmm")
#endif

void measure_limits([[maybe_unused]] Isa isa, ThreadPool& pool, double seconds) {
#ifdef CHAIRLIFT_HAVE_AVX2
    const bool wide = isa == Isa::avx512 || isa == Isa::amx;
    const double chains = 12.0 * pool.size();
    if (isa != Isa::portable) {
        std::printf("limit int8 %g\n", rate(pool, chains * 32, seconds, int8_loop));
        std::printf("limit signed %g\n", rate(pool, chains * 32, seconds, signed_loop));
        if (wide) std::printf("limit vnni %g\n", rate(pool, chains * 64, seconds, vnni_loop));
        std::printf("limit float %g\n", rate(pool, chains * (wide ? 16 : 8), seconds, wide ? wide_float_loop : float_loop));
    }
#endif
    const AlignedBuffer memory(kBeyondCaches);
    std::memset(memory.data(), 1, memory.size());
    const std::size_t share = memory.size() / pool.size() / 64 * 64;
    std::vector<std::uint64_t> sums(pool.size() * 8);
    const double bytes = rate(pool, static_cast<double>(share) * pool.size(), seconds, [&](int thread, int times) {
        const std::uint64_t* words = reinterpret_cast<const std::uint64_t*>(memory.data() + thread * share);
        std::uint64_t sum[8] = {};
        for (int i = 0; i < times; i++)
            for (std::size_t at = 0; at < share / 8; at += 8)
                for (int lane = 0; lane < 8; lane++) sum[lane] += words[at + lane];
        for (int lane = 0; lane < 8; lane++) sums[thread * 8 + lane] = sum[lane];
    });
    std::printf("limit stream %g\n", sums[0] ? bytes : 0.0);
}

}  // namespace

int main(int argc, char** argv) try {
    if (argc != 6) {
        std::fprintf(stderr, "usage: kernel_bench ISA THREADS OUT IN SECONDS\n");
        return 2;
    }
    const Isa isa = parse_isa(argv[1]);
    ThreadPool pool(std::atoi(argv[2]));
    const int rows = std::atoi(argv[3]), cols = std::atoi(argv[4]);
    const double seconds = std::atof(argv[5]);
    std::printf("run isa %s\n", isa_name(isa));
    std::printf("run barrier %g\n", 1.0 / rate(pool, 1.0, seconds, [&](int, int times) {
                                        for (int i = 0; i < times; i++) pool.barrier();
                                    }));
    measure_limits(isa, pool, seconds);
    for (const char* name : {"q4_0", "q4_1", "q4_k", "q5_0", "q5_1", "q5_k", "q6_k", "q8_0", "f16", "bf16", "f32"}) {
        // The K types need rows of whole 256s.
        const bool super_blocks = is_quantized(parse_type(name)) && std::strchr(name, 'k');
        measure_type(name, matmul_kernels(isa), pool, rows, super_blocks ? (cols + 255) / 256 * 256 : cols, seconds);
    }
    measure_limits(isa, pool, seconds);
    return 0;
} catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
}
