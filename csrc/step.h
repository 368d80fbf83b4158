// The input of a step, as flat arrays from Python, and its checking: nothing of it is trusted.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "sampler.h"

namespace chairlift {

struct StepInput {
    std::span<const std::int32_t> tokens, positions;             // [T], item after item
    std::span<const std::int32_t> item_rows;                     // [I + 1] row range of each item
    std::span<const std::int32_t> block_tables, table_offsets;   // [...], [I + 1] range of each item's table; -1: no block
    std::span<const Draw> draws;                                 // [S]

    int rows() const { return static_cast<int>(tokens.size()); }
    int items() const { return static_cast<int>(item_rows.size()) - 1; }
};

constexpr int kMostLogprobs = 1024;  // best tokens listed with a draw

struct StepLimits {
    int vocab_size = 0;
    int max_positions = 0;
    int num_blocks = 0;
    int block_size = 0;
    std::vector<int> windows;  // of each group of layers; 0: all of the context
    int max_rows = 0;
    int max_samples = 0;
};

// Throws std::invalid_argument for anything that does not add up; afterwards every index may be used as it is. That
// offsets of the draws' own lists lie within their arrays is checked where the draws are put together.
void check_step(const StepInput& input, const StepLimits& limits);

// Throws std::invalid_argument unless `offsets` is count + 1 numbers from 0 to `total` that never fall.
void check_offsets(const char* name, std::span<const std::int32_t> offsets, std::size_t count, std::size_t total);

}  // namespace chairlift
