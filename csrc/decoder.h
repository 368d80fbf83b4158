// A decoder-only transformer: one whole step in one call, over a paged KV cache.
//
// Each row is computed by a fixed sequence of floating-point operations, whatever else is in the step and however the
// work is divided: matrix products, attention and every row operation keep this rule, and nothing here adds up across
// rows. Threads share out the work of a phase by claiming pieces; a barrier ends the phase.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "attention.h"
#include "formats.h"
#include "kv_cache.h"
#include "matmul.h"
#include "rows.h"
#include "sampler.h"
#include "spec.h"
#include "step.h"
#include "threads.h"
#include "weights.h"

namespace chairlift {

struct StepOutput {
    std::vector<DrawResult>* results = nullptr;  // one a draw
    float* logits = nullptr;                     // [S, vocab], may be null
};

// Whether a step is running or has just ended, for a thread that would disturb it.
class StepTimes {
public:
    static constexpr std::chrono::milliseconds kRecent{20};

    void begin() { until_.store(Time::max(), std::memory_order_relaxed); }
    void end() { until_.store(std::chrono::steady_clock::now() + kRecent, std::memory_order_relaxed); }
    bool recent() const { return std::chrono::steady_clock::now() < until_.load(std::memory_order_relaxed); }

private:
    using Time = std::chrono::steady_clock::time_point;
    std::atomic<Time> until_{Time::min()};
};

// Seconds by part, as the first thread sees them.
struct Profile {
    double matmul = 0, attention = 0, sampling = 0, other = 0, total = 0;
    std::int64_t steps = 0;
};

class Decoder {
public:
    // Throws std::invalid_argument for a spec that cannot be.
    Decoder(DecoderSpec spec, int threads, Isa isa);

    const DecoderSpec& spec() const { return spec_; }
    void set_tensor(const std::string& name, Type type, std::span<const std::int64_t> shape,
                    std::span<const std::uint8_t> stored, Type packed);
    void lay_out(std::span<const NamedType> tensors);
    bool read_packed(int file, std::uint64_t offset, std::uint64_t checksum);
    void finalize();
    std::size_t weight_bytes() const { return weights_.bytes(); }
    const WeightImage& packed() const { return weights_.image(); }
    std::uint64_t packed_checksum() { return weights_.image().checksum(pool_); }
    std::size_t workspace_bytes(int max_rows, int max_samples, KvType kv) const;

    // Allocates everything that a step needs. The pages of the cache are mapped in the background. Throws std::bad_alloc.
    void reserve(const CacheShape& cache, int max_rows, int max_samples);

    // `input` has passed check_step() with these limits(). Throws std::logic_error before reserve().
    void step(const StepInput& input, const StepOutput& output);

    const StepLimits& limits() const { return limits_; }
    const CacheShape& cache() const { return cache_; }
    std::shared_ptr<AlignedBuffer> cache_memory() const { return cache_memory_; }
    Profile profile;

private:
    // Consecutive rows of one item, and consecutive KV heads: what one unit of attention takes.
    struct RowUnit {
        int row, rows, item, head, heads;
        int out;  // the row of its results
        std::int64_t cost;
    };
    struct Rope {
        std::vector<float> inv_freq;  // one a pair
        float* cosines = nullptr;     // [max_rows, pairs], filled anew by each step
        float* sines = nullptr;
    };
    // Where the buffers of a step lie in one piece of memory; also used, without memory, to measure them.
    struct Layout;
    struct Pass;  // one step in progress

    int logit_rows(int max_rows) const;
    AttentionShape attention_shape(const KvHead& head) const;  // but for what depends on the blocks
    void plan_rows(const StepInput& input);
    void plan_units(const StepInput& input, std::span<const int> rows, std::vector<RowUnit>& units) const;
    void plan_draws(const StepInput& input);

    DecoderSpec spec_;
    Isa isa_;
    const MatmulKernels& matmul_;
    const RowKernels& rows_;
    const AttentionKernels& attention_;
    ThreadPool pool_;
    Weights weights_;
    bool finalized_ = false;

    CacheShape cache_;
    StepLimits limits_;
    AttentionShape attention_shape_;
    std::shared_ptr<AlignedBuffer> cache_memory_;
    AlignedBuffer workspace_;
    StepTimes step_times_;
    std::jthread page_mapper_;  // works on cache_memory_ and step_times_, so it goes first
    ActBuffer activations_;
    Rope rope_, rope_local_;
    float *x_ = nullptr, *y_ = nullptr, *qkv_ = nullptr, *attended_ = nullptr, *gate_ = nullptr, *up_ = nullptr;
    float *logits_ = nullptr, *scratch_ = nullptr;
    std::size_t scratch_stride_ = 0;  // floats of scratch_ per thread
    int logit_rows_ = 0;              // rows of logits_: the head works in pieces of so many

    std::vector<std::unique_ptr<Sampler>> samplers_;  // one a thread
    std::vector<RowUnit> units_, head_units_;  // of all rows, and of head_rows_ where they are fewer; costliest first
    std::vector<int> all_rows_, item_of_row_;
    std::vector<int> draw_order_;     // draws by row
    std::vector<int> head_rows_;      // rows that some draw needs, ascending, each once
    std::vector<int> first_draw_;     // of each head row, in draw_order_; one more at the end
};

}  // namespace chairlift
