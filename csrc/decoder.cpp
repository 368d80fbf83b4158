#include "decoder.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <new>
#include <numeric>
#include <stdexcept>
#include <thread>

#ifdef __linux__
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace chairlift {

namespace {

constexpr std::size_t kLogitBytes = std::size_t{16} << 20;  // about the size of the buffer for logits
constexpr int kLogitRowsLeast = 16;                         // but room for so many rows

int round_up(int value, int multiple) { return (value + multiple - 1) / multiple * multiple; }

// The inverse frequencies, rounded as in the reference implementations: powers and quotients in f32.
std::vector<float> inverse_frequencies(const RopeSpec& rope) {
    std::vector<float> result(rope.dims / 2);
    for (std::size_t i = 0; i < result.size(); ++i) {
        const float exponent = static_cast<float>(2 * i) / static_cast<float>(rope.dims);
        result[i] = 1.0f / static_cast<float>(std::pow(rope.theta, static_cast<double>(exponent)));
        if (!rope.inv_freq_scale.empty()) result[i] = static_cast<float>(result[i] / rope.inv_freq_scale[i]);
    }
    return result;
}

// The system maps memory page by page on first use, about a second a GiB. A thread of the least priority does it for the
// cache, from its first block on, while the engine starts: it changes no content, so a step may use the cache meanwhile.
// A page that is being mapped keeps its processor whatever the priority, so the thread rests for three times as long as
// it worked, and as long as there are steps. Where the system cannot map pages ahead, they come as they are used.
void map_pages([[maybe_unused]] std::stop_token stop, [[maybe_unused]] std::uint8_t* data,
               [[maybe_unused]] std::size_t size, [[maybe_unused]] const StepTimes& steps) {
#ifdef MADV_POPULATE_WRITE
    setpriority(PRIO_PROCESS, static_cast<id_t>(syscall(SYS_gettid)), 19);
    const std::uintptr_t page = sysconf(_SC_PAGESIZE), piece = std::uintptr_t{4} << 20;
    const std::uintptr_t end = reinterpret_cast<std::uintptr_t>(data) + size;
    std::uintptr_t at = (reinterpret_cast<std::uintptr_t>(data) + page - 1) / page * page;
    while (at + page <= end && !stop.stop_requested()) {
        if (steps.recent()) {
            std::this_thread::sleep_for(StepTimes::kRecent);
            continue;
        }
        const std::size_t bytes = std::min(piece, (end - at) / page * page);
        const auto begin = std::chrono::steady_clock::now();
        if (madvise(reinterpret_cast<void*>(at), bytes, MADV_POPULATE_WRITE) != 0) return;
        at += bytes;
        std::this_thread::sleep_for(3 * (std::chrono::steady_clock::now() - begin));
    }
#endif
}

}  // namespace

struct Decoder::Layout {
    std::size_t size = 0;  // bytes so far

    // `count` floats, on their own cache lines.
    std::size_t floats(std::size_t count) {
        const std::size_t at = size;
        size += (count * sizeof(float) + 63) / 64 * 64;
        return at;
    }

    std::size_t x, y, qkv, attended, gate, up, cosines[2], sines[2], logits, scratch, scratch_stride;
    int most_cols;

    Layout(const Decoder& decoder, const AttentionShape& attention, std::size_t rows) {
        const DecoderSpec& spec = decoder.spec_;
        const std::size_t q = spec.q_size(), kv = spec.kv_size();
        x = floats(rows * spec.hidden_size);
        y = floats(rows * spec.hidden_size);
        qkv = floats(rows * (q + 2 * kv));
        attended = floats(rows * q);
        gate = floats(rows * spec.ffn_size);
        up = floats(rows * spec.ffn_size);
        const int pairs[2] = {spec.rope.dims / 2, spec.rope_local.dims / 2};
        for (int i = 0; i < 2; ++i) {
            cosines[i] = floats(rows * pairs[i]);
            sines[i] = floats(rows * pairs[i]);
        }
        logits = floats(std::size_t(decoder.logit_rows(static_cast<int>(rows))) * spec.vocab_size);
        scratch_stride = (decoder.attention_.scratch_floats(attention) + 15) / 16 * 16;
        scratch = floats(scratch_stride * decoder.pool_.size());
        most_cols = std::max({spec.hidden_size, static_cast<int>(q), spec.ffn_size});
    }
};

Decoder::Decoder(DecoderSpec spec, int threads, Isa isa)
    : spec_((spec.check(), std::move(spec))),
      isa_(isa),
      matmul_(matmul_kernels(isa)),
      rows_(row_kernels(isa)),
      attention_(attention_kernels(isa)),
      pool_(threads),
      weights_(spec_) {
    rope_.inv_freq = inverse_frequencies(spec_.rope);
    rope_local_.inv_freq = inverse_frequencies(spec_.rope_local);
}

void Decoder::set_tensor(const std::string& name, Type type, std::span<const std::int64_t> shape,
                         std::span<const std::uint8_t> stored, Type packed) {
    if (finalized_) throw std::logic_error("set_tensor() after finalize()");
    weights_.set(name, type, shape, stored, packed, pool_);
}

void Decoder::lay_out(std::span<const NamedType> tensors) {
    if (finalized_) throw std::logic_error("lay_out() after finalize()");
    weights_.lay_out(tensors);
}

bool Decoder::read_packed(int file, std::uint64_t offset, std::uint64_t checksum) {
    if (finalized_) throw std::logic_error("read_packed() after finalize()");
    return weights_.read(file, offset, checksum, pool_);
}

void Decoder::finalize() {
    weights_.check_complete();
    finalized_ = true;
}

int Decoder::logit_rows(int max_rows) const {
    const std::size_t rows = kLogitBytes / (spec_.vocab_size * sizeof(float));
    return std::min(max_rows, static_cast<int>(std::clamp<std::size_t>(rows, kLogitRowsLeast, 1 << 16)));
}

AttentionShape Decoder::attention_shape(const KvHead& head) const {
    AttentionShape shape;
    shape.head = head;
    shape.padded_dim = round_up(spec_.head_dim, 16);
    shape.group = spec_.group();
    shape.kv_heads = spec_.num_kv_heads;
    shape.tile = attention_.tile(head);
    shape.scale = spec_.attn_scale;
    shape.softcap = spec_.attn_softcap;
    shape.q_stride = spec_.q_size() + 2 * spec_.kv_size();
    shape.out_stride = spec_.q_size();
    return shape;
}

std::size_t Decoder::workspace_bytes(int max_rows, int max_samples, KvType kv) const {
    if (max_rows < 1 || max_samples < 0) throw std::invalid_argument("max_rows must be at least 1, max_samples 0");
    const Layout layout(*this, attention_shape({spec_.head_dim, 1, kv}), max_rows);
    const std::size_t plans = std::size_t(max_rows) * (2 * spec_.num_kv_heads * sizeof(RowUnit) + 4 * sizeof(int)) +
                              std::size_t(max_samples) * (sizeof(int) + sizeof(Draw) + sizeof(DrawResult));
    return layout.size + ActBuffer::bytes(max_rows, layout.most_cols) + plans +
           pool_.size() * (Sampler::bytes(spec_.vocab_size) + matmul_.thread_bytes);
}

void Decoder::reserve(const CacheShape& cache, int max_rows, int max_samples) {
    if (!finalized_) throw std::logic_error("reserve() before finalize()");
    if (max_rows < 1 || max_samples < 0) throw std::invalid_argument("max_rows must be at least 1, max_samples 0");
    if (cache.block_bytes > PTRDIFF_MAX / static_cast<std::size_t>(cache.num_blocks)) throw std::bad_alloc();
    limits_ = {};  // no step until all of it is there
    page_mapper_ = {};
    cache_memory_ = {};
    workspace_ = {};
    attention_shape_ = attention_shape(cache.head);
    attention_shape_.block_bytes = cache.block_bytes;
    attention_shape_.table_stride = static_cast<int>(cache.windows.size());
    const Layout layout(*this, attention_shape_, max_rows);
    cache_memory_ = std::make_shared<AlignedBuffer>(cache.block_bytes * cache.num_blocks);
    workspace_ = AlignedBuffer(layout.size);
    activations_ = ActBuffer(max_rows, layout.most_cols);
    ask_for_huge_pages(*cache_memory_);
    ask_for_huge_pages(workspace_);
    std::memset(workspace_.data(), 0, workspace_.size());
    pool_.run([&](int) { matmul_.prepare_thread(); });
    page_mapper_ = std::jthread(map_pages, cache_memory_->data(), cache_memory_->size(), std::cref(step_times_));
    auto at = [&](std::size_t offset) { return reinterpret_cast<float*>(workspace_.data() + offset); };
    x_ = at(layout.x);
    y_ = at(layout.y);
    qkv_ = at(layout.qkv);
    attended_ = at(layout.attended);
    gate_ = at(layout.gate);
    up_ = at(layout.up);
    rope_.cosines = at(layout.cosines[0]);
    rope_.sines = at(layout.sines[0]);
    rope_local_.cosines = at(layout.cosines[1]);
    rope_local_.sines = at(layout.sines[1]);
    logits_ = at(layout.logits);
    scratch_ = at(layout.scratch);
    scratch_stride_ = layout.scratch_stride;
    logit_rows_ = logit_rows(max_rows);

    samplers_.clear();
    for (int i = 0; i < pool_.size(); ++i) samplers_.push_back(std::make_unique<Sampler>(isa_, spec_.vocab_size));
    for (std::vector<RowUnit>* units : {&units_, &head_units_})
        units->reserve(std::size_t(max_rows) * spec_.num_kv_heads);
    item_of_row_.reserve(max_rows);
    all_rows_.resize(max_rows);
    std::iota(all_rows_.begin(), all_rows_.end(), 0);
    head_rows_.reserve(max_rows);
    first_draw_.reserve(max_rows + 1);
    draw_order_.reserve(max_samples);

    cache_ = cache;
    limits_ = {spec_.vocab_size, spec_.max_positions, cache.num_blocks, cache.head.block_size,
               cache.windows,    max_rows,            max_samples};
}

void Decoder::plan_rows(const StepInput& input) {
    item_of_row_.clear();
    for (int item = 0; item < input.items(); ++item) item_of_row_.resize(input.item_rows[item + 1], item);
    plan_units(input, std::span<const int>(all_rows_).first(input.rows()), units_);
    if (static_cast<int>(head_rows_.size()) < input.rows()) plan_units(input, head_rows_, head_units_);
}

// Divides the rows, which ascend, and the heads into units of attention. How finely does not change any bit, only how well
// the threads are used.
void Decoder::plan_units(const StepInput& input, std::span<const int> rows, std::vector<RowUnit>& units) const {
    const int enough = 4 * pool_.size();  // units, so that the threads end together
    const int heads = spec_.num_kv_heads, size = static_cast<int>(rows.size());
    const auto most = static_cast<int>(
        std::clamp(std::int64_t{size} * heads / enough, std::int64_t{1}, std::int64_t{kRowTile}));
    std::int64_t positions = 0;
    for (const int row : rows) positions += input.positions[row] + 1;
    units.clear();
    for (int i = 0, count; i < size; i += count) {
        const int row = rows[i], item = item_of_row_[row];
        const auto follows = [&](int n) { return rows[i + n] == row + n && item_of_row_[row + n] == item; };
        for (count = 1; count < most && i + count < size && follows(count);) ++count;
        const std::int64_t last = input.positions[row] + count;
        // All heads of a row are read from memory sooner than each by itself.
        const int some = count == 1 && last * enough <= positions ? heads : 1;
        for (int head = 0; head < heads; head += some) units.push_back({row, count, item, head, some, i, count * some * last});
    }
    std::sort(units.begin(), units.end(), [](const RowUnit& a, const RowUnit& b) { return a.cost > b.cost; });
}

// Orders the draws by row, and lists the rows whose logits they need.
void Decoder::plan_draws(const StepInput& input) {
    draw_order_.resize(input.draws.size());
    std::iota(draw_order_.begin(), draw_order_.end(), 0);
    std::sort(draw_order_.begin(), draw_order_.end(), [&](int a, int b) {
        return std::pair(input.draws[a].row, a) < std::pair(input.draws[b].row, b);
    });
    head_rows_.clear();
    first_draw_.clear();
    for (std::size_t i = 0; i < draw_order_.size(); ++i) {
        const int row = input.draws[draw_order_[i]].row;
        if (!head_rows_.empty() && head_rows_.back() == row) continue;
        head_rows_.push_back(row);
        first_draw_.push_back(static_cast<int>(i));
    }
    first_draw_.push_back(static_cast<int>(draw_order_.size()));
}

}  // namespace chairlift
