#include "step.h"

#include <cmath>
#include <stdexcept>
#include <string>

#include "attention.h"

namespace chairlift {

namespace {

[[noreturn]] void fail(const std::string& message) { throw std::invalid_argument("bad step: " + message); }

void check_range(const char* name, std::int64_t value, std::int64_t end) {
    if (value < 0 || value >= end)
        fail(std::string(name) + " " + std::to_string(value) + " is not in 0.." + std::to_string(end - 1));
}

void check_all(const char* name, std::span<const std::int32_t> values, std::int64_t end) {
    for (std::int32_t value : values) check_range(name, value, end);
}

// Where a row of the item reads or writes, there is a block.
void check_blocks(const StepInput& input, const StepLimits& limits, int item, int group) {
    const int first = input.positions[input.item_rows[item]], last = input.positions[input.item_rows[item + 1] - 1];
    const std::int32_t* table = input.block_tables.data() + input.table_offsets[item];
    const int from = first_in_view(first, limits.windows[group]) / limits.block_size;
    for (std::int64_t i = from; i <= last / limits.block_size; ++i)
        check_range("block", table[i * limits.windows.size() + group], limits.num_blocks);
}

void check_item(const StepInput& input, const StepLimits& limits, int item) {
    const int first = input.item_rows[item], last = input.item_rows[item + 1] - 1;
    if (last < first) fail("item " + std::to_string(item) + " has no rows");
    check_range("position", input.positions[first], limits.max_positions);
    for (int row = first + 1; row <= last; ++row)
        if (input.positions[row] != input.positions[row - 1] + 1)
            fail("the positions of item " + std::to_string(item) + " are not consecutive");
    check_range("position", input.positions[last], limits.max_positions);
    const auto groups = static_cast<std::int64_t>(limits.windows.size());
    const std::int64_t entries = input.table_offsets[item + 1] - input.table_offsets[item];
    if (entries % groups != 0)
        fail("the block table of item " + std::to_string(item) + " has " + std::to_string(entries) +
             " entries, which is no multiple of the " + std::to_string(groups) + " groups");
    const std::int64_t room = entries / groups * limits.block_size;
    if (input.positions[last] >= room)
        fail("the block table of item " + std::to_string(item) + " holds " + std::to_string(room) +
             " positions, and position " + std::to_string(input.positions[last]) + " is computed");
    for (int group = 0; group < groups; ++group) check_blocks(input, limits, item, group);
}

void check_draw(const Draw& draw, const StepInput& input, const StepLimits& limits) {
    check_range("draw's row", draw.row, input.rows());
    if (draw.forced < -1) fail("forced token " + std::to_string(draw.forced));
    if (draw.forced >= 0) check_range("forced token", draw.forced, limits.vocab_size);
    if (draw.num_logprobs < -1 || draw.num_logprobs > kMostLogprobs)
        fail("num_logprobs " + std::to_string(draw.num_logprobs) + " is not in -1.." + std::to_string(kMostLogprobs));
    if (!(draw.temperature >= 0.0f) || !std::isfinite(draw.temperature)) fail("temperature below 0 or not finite");
    if (!(draw.repetition > 0.0f) || !std::isfinite(draw.repetition)) fail("repetition penalty not above 0");
    if (!std::isfinite(draw.presence) || !std::isfinite(draw.frequency)) fail("penalty not finite");
    if (!(draw.top_p >= 0.0f) || !(draw.min_p >= 0.0f && draw.min_p <= 1.0f)) fail("top_p or min_p out of range");
    if (draw.history_prompt < 0 || static_cast<std::size_t>(draw.history_prompt) > draw.history.size())
        fail("history_prompt is longer than the history");
    check_all("history token", draw.history, limits.vocab_size);
    check_all("bias token", draw.bias_ids, limits.vocab_size);
    check_all("banned token", draw.banned, limits.vocab_size);
    for (float value : draw.bias_values)
        if (!std::isfinite(value)) fail("bias value not finite");
}

}  // namespace

void check_offsets(const char* name, std::span<const std::int32_t> offsets, std::size_t count, std::size_t total) {
    if (offsets.size() != count + 1)
        fail(std::string(name) + " must hold " + std::to_string(count + 1) + " numbers, got " +
             std::to_string(offsets.size()));
    if (offsets[0] != 0 || static_cast<std::size_t>(offsets[count]) != total)
        fail(std::string(name) + " must go from 0 to " + std::to_string(total));
    for (std::size_t i = 0; i < count; ++i)
        if (offsets[i] > offsets[i + 1]) fail(std::string(name) + " must not fall");
}

void check_step(const StepInput& input, const StepLimits& limits) {
    const std::size_t rows = input.tokens.size();
    if (rows > static_cast<std::size_t>(limits.max_rows))
        fail(std::to_string(rows) + " tokens, and room for " + std::to_string(limits.max_rows) + " was reserved");
    if (input.draws.size() > static_cast<std::size_t>(limits.max_samples))
        fail(std::to_string(input.draws.size()) + " draws, and room for " + std::to_string(limits.max_samples) +
             " was reserved");
    if (input.positions.size() != rows) fail("tokens and positions differ in length");
    if (input.item_rows.empty()) fail("item_rows is empty");
    const std::size_t items = input.item_rows.size() - 1;
    check_offsets("item_rows", input.item_rows, items, rows);
    check_offsets("table_offsets", input.table_offsets, items, input.block_tables.size());
    check_all("token", input.tokens, limits.vocab_size);
    for (int item = 0; item < input.items(); ++item) check_item(input, limits, item);
    for (const Draw& draw : input.draws) check_draw(draw, input, limits);
}

}  // namespace chairlift
