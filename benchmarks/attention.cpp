// Measures attention of one KV head with three query heads of 64 numbers. benchmarks/attention.py builds and runs this.
//
//   attention_bench ISA THREADS POSITIONS SECONDS
//
// Each line of output is "KV_TYPE CASE MICROSECONDS", for one head (of three that decodes take together) on each of the
// threads at once, the best of several rounds: a decode whose keys and values are in the caches, one whose keys and values
// come from memory, and the rows of a prompt that make a unit.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <numeric>
#include <random>
#include <vector>

#include "attention.h"
#include "formats.h"
#include "threads.h"

using namespace chairlift;

namespace {

constexpr int kRounds = 7;
constexpr int kHeadDim = 64, kGroup = 3, kHeads = 3, kLayers = 8, kBlock = 16;
constexpr std::size_t kBeyondCaches = std::size_t{512} << 20;  // bytes that are read, of all sequences

double now() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// The caches of as many sequences as are given, with blocks of a layer far apart as they are in an engine.
struct Sequences {
    AttentionShape shape;
    const AttentionKernels& kernels;
    int positions, count, blocks;
    std::vector<std::int32_t> table;
    AlignedBuffer memory;

    Sequences(const AttentionKernels& given, KvType kv, int positions, int count)
        : kernels(given), positions(positions), count(count), blocks((positions + kBlock - 1) / kBlock) {
        shape.head = {kHeadDim, kBlock, kv};
        shape.padded_dim = kHeadDim;
        shape.group = kGroup;
        shape.kv_heads = kHeads;
        shape.tile = kernels.tile(shape.head);
        shape.block_bytes = kHeads * kLayers * shape.head.next_head();
        shape.q_stride = shape.out_stride = kHeads * kGroup * kHeadDim;
        shape.scale = 0.125f;
        table.resize(std::size_t(blocks) * count);
        std::iota(table.begin(), table.end(), 0);
        std::shuffle(table.begin(), table.end(), std::mt19937(1));
        memory = AlignedBuffer(table.size() * shape.block_bytes);
        ask_for_huge_pages(memory);
        std::mt19937 random(2);
        std::normal_distribution<float> normal;
        std::vector<float> numbers(1 << 16);
        for (float& x : numbers) x = normal(random);
        for (std::size_t block = 0, at = 0; block < table.size(); block++)
            for (int head = 0; head < kHeads; head++)
                for (int slot = 0; slot < kBlock; slot++, at = (at + 2 * kHeadDim) % (numbers.size() - 2 * kHeadDim)) {
                    std::uint8_t* const keys = memory.data() + block * shape.block_bytes + head * shape.head.next_head();
                    kernels.store_key(shape.head, numbers.data() + at, slot, keys);
                    kernels.store_value(shape.head, numbers.data() + at + kHeadDim, slot, keys + shape.head.values());
                }
    }

    AttentionUnit unit(int sequence, int head, int heads, int rows, const float* q, float* out) const {
        AttentionUnit unit;
        unit.q = q;
        unit.out = out;
        unit.kv_heads = heads;
        unit.rows = rows;
        unit.first_position = positions - rows;
        unit.table = table.data() + std::size_t(sequence) * blocks;
        unit.keys = memory.data() + head * shape.head.next_head();
        return unit;
    }
};

// Microseconds a head, when each thread has its own sequences.
double measure(const Sequences& sequences, ThreadPool& pool, int rows, double seconds) {
    const std::size_t floats = std::size_t(rows) * kHeads * kGroup * kHeadDim;
    const std::vector<float> q(floats, 0.5f);
    const std::size_t scratch_bytes = sequences.kernels.scratch_floats(sequences.shape) * sizeof(float);
    std::vector<AlignedBuffer> scratch(pool.size());
    for (AlignedBuffer& buffer : scratch) buffer = AlignedBuffer(scratch_bytes);
    double best = 1e9;
    const double end = now() + seconds;
    for (int round = 0; round < kRounds || now() < end; round++) {
        const double start = now();
        pool.run([&](int thread) {
            std::vector<float> out(floats);
            const int heads = rows == 1 ? kHeads : 1;
            for (int sequence = thread; sequence < sequences.count; sequence += pool.size())
                for (int head = 0; head < kHeads; head += heads) {
                    AttentionUnit unit = sequences.unit(sequence, head, heads, rows, q.data(), out.data());
                    AttentionUnit next;
                    if (const int following = sequence + pool.size(); following < sequences.count) {
                        next = sequences.unit(following, head, heads, rows, q.data(), out.data());
                        unit.next = &next;
                    }
                    sequences.kernels.attend(sequences.shape, unit, reinterpret_cast<float*>(scratch[thread].data()));
                }
        });
        best = std::min(best, (now() - start) / (double(sequences.count) / pool.size() * kHeads));
    }
    return best * 1e6;
}

}  // namespace

int main(int argc, char** argv) try {
    if (argc != 5) return 2;
    const Isa isa = parse_isa(argv[1]);
    const AttentionKernels& kernels = attention_kernels(isa);
    ThreadPool pool(std::atoi(argv[2]));
    const int positions = std::atoi(argv[3]);
    const double seconds = std::atof(argv[4]);
    std::printf("run isa %s\n", isa_name(isa));
    const struct {
        const char* name;
        KvType kv;
    } types[] = {{"f32", KvType::f32}, {"f16", KvType::f16}, {"bf16", KvType::bf16}, {"int8", KvType::int8}};
    for (const auto& type : types) {
        const Sequences few(kernels, type.kv, positions, pool.size());
        const std::size_t bytes = kHeads * few.shape.head.next_head() * few.blocks;
        std::printf("%s cached %g\n", type.name, measure(few, pool, 1, seconds));
        std::printf("%s prompt %g\n", type.name, measure(few, pool, kRowTile, seconds));
        const int many = static_cast<int>(kBeyondCaches / bytes / pool.size() + 1) * pool.size();
        std::printf("%s memory %g\n", type.name, measure(Sequences(kernels, type.kv, positions, many), pool, 1, seconds));
    }
} catch (const std::exception& error) {
    std::fprintf(stderr, "attention_bench: %s\n", error.what());
    return 1;
}
