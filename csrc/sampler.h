// Drawing tokens from a row of logits.
//
// A draw is a function of its row's logits and of its own parameters alone; its noise is a function of (seed, index,
// position). So neither the batch nor the order of draws nor the thread changes a token.
//
//   1. From the raw logits: are all finite, and if asked for the log-probability of the token, its rank, the best tokens.
//   2. On a copy, where something changes: repetition penalty (all of the history), presence and frequency penalty (its
//      generated part), bias, bans.
//   3. Greedy, or: temperature, top-k, top-p, min-p, and the inverse of the cumulative distribution at one uniform number.
//
// Equal logits rank by token id, the lower one first.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "isa.h"
#include "rows.h"

namespace chairlift {

struct Draw {
    int row = 0;
    std::int32_t forced = -1;  // >= 0: only score this token
    std::uint64_t seed = 0;
    std::int32_t index = 0;
    std::int32_t position = 0;  // of the token to be drawn
    float temperature = 1.0f;
    std::int32_t top_k = 0;  // 0: all
    float top_p = 1.0f;
    float min_p = 0.0f;
    float repetition = 1.0f;
    float presence = 0.0f;
    float frequency = 0.0f;
    std::int32_t num_logprobs = -1;  // -1: none, not even the token's own
    std::span<const std::int32_t> history;
    std::int32_t history_prompt = 0;  // how many of history are prompt
    std::span<const std::int32_t> bias_ids;
    std::span<const float> bias_values;
    std::span<const std::int32_t> banned;
};

struct DrawResult {
    std::int32_t token = -1;  // -1: the logits were not finite, or every token was banned
    float logprob = 0.0f;
    std::int32_t rank = 0;
    std::int32_t* top_ids = nullptr;  // num_logprobs entries; stay as they are where the vocabulary is smaller
    float* top_logprobs = nullptr;
};

// Uniform in [0, 1) with 53 random bits.
double uniform(std::uint64_t seed, std::uint32_t index, std::uint32_t position);

// Draws for one thread; owns the memory that this takes.
class Sampler {
public:
    Sampler(Isa isa, int vocab_size);
    static std::size_t bytes(int vocab_size);

    // `logits` [vocab_size] is not changed. All token ids of `draw` lie in the vocabulary.
    void sample(const float* logits, const Draw& draw, DrawResult& result);

private:
    struct Candidate {
        float logit;
        std::int32_t id;
    };
    static bool better(const Candidate& a, const Candidate& b) {
        return a.logit > b.logit || (a.logit == b.logit && a.id < b.id);
    }

    const float* adjust(const float* logits, const Draw& draw);
    void penalize(const Draw& draw);
    std::int32_t draw_from(const float* logits, float greatest, const Draw& draw);
    std::int32_t draw_from_all(const float* logits, float greatest, const Draw& draw);
    std::int32_t draw_from_best(const float* logits, float greatest, const Draw& draw);
    int keep_mass(const float* logits, float greatest, const Draw& draw);
    void score(const float* logits, float greatest, const Draw& draw, DrawResult& result);
    void select_best(const float* logits, int count);
    float weight(float logit, float greatest, float temperature) const;

    const RowKernels& kernels_;
    int vocab_size_;
    std::vector<float> adjusted_;
    std::vector<float> weights_;
    std::vector<float> sums_;            // of weights_, by pieces of kSumPiece
    std::vector<std::int32_t> counts_;   // by token; all 0 between calls
    std::vector<Candidate> best_;        // filled by select_best
};

}  // namespace chairlift
