#include "sampler.h"

#include <algorithm>
#include <cfloat>
#include <cmath>

namespace chairlift {

namespace {

constexpr int kHeapMost = 512;  // above this many, selecting by partition is faster than by a heap

// Philox-4x32 with ten rounds (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011): a keyed bijection
// of a 128-bit counter, whose outputs pass the usual batteries of tests for random numbers.
void philox(std::uint32_t counter[4], std::uint64_t key) {
    std::uint32_t k0 = static_cast<std::uint32_t>(key), k1 = static_cast<std::uint32_t>(key >> 32);
    for (int round = 0; round < 10; ++round) {
        const std::uint64_t a = std::uint64_t{0xD2511F53} * counter[0];
        const std::uint64_t b = std::uint64_t{0xCD9E8D57} * counter[2];
        const std::uint32_t c1 = counter[1], c3 = counter[3];
        counter[0] = static_cast<std::uint32_t>(b >> 32) ^ c1 ^ k0;
        counter[1] = static_cast<std::uint32_t>(b);
        counter[2] = static_cast<std::uint32_t>(a >> 32) ^ c3 ^ k1;
        counter[3] = static_cast<std::uint32_t>(a);
        k0 += 0x9E3779B9;
        k1 += 0xBB67AE85;
    }
}

}  // namespace

double uniform(std::uint64_t seed, std::uint32_t index, std::uint32_t position) {
    std::uint32_t counter[4] = {position, index, 0, 0};
    philox(counter, seed);
    const std::uint64_t bits = (std::uint64_t{counter[0]} << 32) | counter[1];
    return static_cast<double>(bits >> 11) * 0x1p-53;
}

Sampler::Sampler(Isa isa, int vocab_size)
    : kernels_(row_kernels(isa)),
      vocab_size_(vocab_size),
      adjusted_(vocab_size),
      weights_(vocab_size),
      sums_(vocab_size / kSumPiece + 1),
      counts_(vocab_size) {
    best_.reserve(vocab_size);
}

std::size_t Sampler::bytes(int vocab_size) {
    return static_cast<std::size_t>(vocab_size) * (2 * sizeof(float) + sizeof(std::int32_t) + sizeof(Candidate)) +
           (vocab_size / kSumPiece + 1) * sizeof(float);
}

void Sampler::sample(const float* logits, const Draw& draw, DrawResult& result) {
    RowScan raw;
    kernels_.scan(logits, vocab_size_, &raw);
    if (!raw.finite) return;
    result.token = draw.forced;
    if (draw.forced < 0) {
        const float* adjusted = adjust(logits, draw);
        RowScan scan = raw;
        if (adjusted != logits) kernels_.scan(adjusted, vocab_size_, &scan);
        if (scan.greatest == -INFINITY) return;
        result.token = draw.temperature > 0.0f ? draw_from(adjusted, scan.greatest, draw) : scan.greatest_at;
    }
    if (draw.num_logprobs >= 0) score(logits, raw.greatest, draw, result);
}

// The logits to draw from: the given ones, or a copy with penalties, bias and bans.
const float* Sampler::adjust(const float* logits, const Draw& draw) {
    const bool penalties =
        !draw.history.empty() && (draw.repetition != 1.0f || draw.presence != 0.0f || draw.frequency != 0.0f);
    if (!penalties && draw.bias_ids.empty() && draw.banned.empty()) return logits;
    std::copy(logits, logits + vocab_size_, adjusted_.begin());
    if (penalties) penalize(draw);
    for (std::size_t i = 0; i < draw.bias_ids.size(); ++i) adjusted_[draw.bias_ids[i]] += draw.bias_values[i];
    for (std::int32_t id : draw.banned) adjusted_[id] = -INFINITY;
    return adjusted_.data();
}

void Sampler::penalize(const Draw& draw) {
    const auto generated = draw.history.subspan(draw.history_prompt);
    for (std::int32_t id : generated) ++counts_[id];
    for (std::int32_t id : draw.history) {
        const std::int32_t count = counts_[id];
        if (count < 0) continue;  // a token that was seen to already
        float& logit = adjusted_[id];
        logit = logit > 0.0f ? logit / draw.repetition : logit * draw.repetition;
        if (count > 0) logit -= draw.presence + draw.frequency * static_cast<float>(count);
        logit = std::clamp(logit, -FLT_MAX, FLT_MAX);
        counts_[id] = -1;
    }
    for (std::int32_t id : draw.history) counts_[id] = 0;
}

std::int32_t Sampler::draw_from(const float* logits, float greatest, const Draw& draw) {
    const bool all = (draw.top_k <= 0 || draw.top_k >= vocab_size_) && draw.top_p >= 1.0f;
    return all ? draw_from_all(logits, greatest, draw) : draw_from_best(logits, greatest, draw);
}

std::int32_t Sampler::draw_from_all(const float* logits, float greatest, const Draw& draw) {
    const double total = kernels_.weigh(logits, vocab_size_, greatest, draw.temperature, draw.min_p, weights_.data(),
                                        sums_.data());
    const double target = total * uniform(draw.seed, draw.index, draw.position);
    double passed = 0.0;
    int piece = 0;
    const int pieces = (vocab_size_ + kSumPiece - 1) / kSumPiece;
    while (piece < pieces - 1 && passed + sums_[piece] <= target) passed += sums_[piece++];
    const int end = std::min(vocab_size_, (piece + 1) * kSumPiece);
    for (int id = piece * kSumPiece; id < end; ++id) {
        passed += weights_[id];
        if (passed > target) return id;
    }
    // Rounding of the sums can leave the target just past the end of its piece: the last possible token then.
    for (int id = end - 1; id >= 0; --id)
        if (weights_[id] > 0.0f) return id;
    return -1;
}

std::int32_t Sampler::draw_from_best(const float* logits, float greatest, const Draw& draw) {
    const int kept = keep_mass(logits, greatest, draw);
    double total = 0.0;
    int last = 0;  // weights fall along best_, so min-p and weights of 0 cut off its end
    while (last < kept && weights_[last] > 0.0f && weights_[last] >= draw.min_p) total += weights_[last++];
    const double target = total * uniform(draw.seed, draw.index, draw.position);
    double passed = 0.0;
    for (int i = 0; i < last; ++i) {
        passed += weights_[i];
        if (passed > target) return best_[i].id;
    }
    return best_[last - 1].id;
}

// Fills best_ and weights_ with the best top_k tokens, and returns how many of them make up the mass top_p.
int Sampler::keep_mass(const float* logits, float greatest, const Draw& draw) {
    const bool limited = draw.top_k > 0 && draw.top_k < vocab_size_;
    const int most = limited ? draw.top_k : vocab_size_;
    double total = 0.0;
    if (!limited)
        total = kernels_.weigh(logits, vocab_size_, greatest, draw.temperature, 0.0f, weights_.data(), sums_.data());
    // The mass is nearly always found in few tokens, so the selection starts small and grows.
    for (int count = limited ? most : std::min(most, 64);; count = std::min(most, count * 16)) {
        select_best(logits, count);
        for (int i = 0; i < count; ++i) weights_[i] = weight(best_[i].logit, greatest, draw.temperature);
        if (limited) {
            total = 0.0;
            for (int i = 0; i < count; ++i) total += weights_[i];
        }
        const double mass = draw.top_p >= 1.0f ? INFINITY : total * static_cast<double>(draw.top_p);
        double passed = 0.0;
        for (int i = 0; i < count; ++i) {
            passed += weights_[i];
            if (passed >= mass) return i + 1;
        }
        if (count == most) return most;
    }
}

float Sampler::weight(float logit, float greatest, float temperature) const {
    return static_cast<float>(std::exp(static_cast<double>((logit - greatest) / temperature)));
}

void Sampler::score(const float* logits, float greatest, const Draw& draw, DrawResult& result) {
    const double total = kernels_.weigh(logits, vocab_size_, greatest, 1.0f, 0.0f, weights_.data(), sums_.data());
    const double offset = static_cast<double>(greatest) + std::log(total);
    const float own = logits[result.token];
    result.logprob = static_cast<float>(own - offset);
    result.rank = 1 + kernels_.count_better(logits, vocab_size_, own, result.token);
    const int count = std::min(draw.num_logprobs, vocab_size_);
    if (count == 0) return;
    select_best(logits, count);
    for (int i = 0; i < count; ++i) {
        result.top_ids[i] = best_[i].id;
        result.top_logprobs[i] = static_cast<float>(best_[i].logit - offset);
    }
}

// Fills best_ with the `count` best tokens, best first.
void Sampler::select_best(const float* logits, int count) {
    best_.clear();
    if (count > kHeapMost) {
        for (int id = 0; id < vocab_size_; ++id) best_.push_back({logits[id], id});
        if (count < vocab_size_) std::nth_element(best_.begin(), best_.begin() + count - 1, best_.end(), better);
        best_.resize(count);
    } else {
        for (int id = 0; id < count; ++id) best_.push_back({logits[id], id});
        std::make_heap(best_.begin(), best_.end(), better);  // the worst of them in front
        for (int id = kernels_.find_above(logits, count, vocab_size_, best_.front().logit); id < vocab_size_;
             id = kernels_.find_above(logits, id + 1, vocab_size_, best_.front().logit)) {
            std::pop_heap(best_.begin(), best_.end(), better);
            best_.back() = {logits[id], id};
            std::push_heap(best_.begin(), best_.end(), better);
        }
    }
    std::sort(best_.begin(), best_.end(), better);
}

}  // namespace chairlift
