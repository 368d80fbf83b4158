// Quantises floats into rows as files of the block formats hold them.
#pragma once

#include <cstdint>

#include "formats.h"

namespace chairlift {

constexpr bool can_quantize_to(Type type) { return type == Type::q8_0 || type == Type::q4_1; }

// One row of `cols` floats, a multiple of 32, to a stored row of `type`. Each value becomes the nearest of those that
// its group of 32 can have:
//   q8_0  scale * -127..127. The largest is in reach, so that no value is off by more than half of the scale.
//   q4_1  minimum + scale * 0..15, with the scale and the minimum of the least squared error among those tried. The
//         full range is one of them; where leaving out the ends of it is better for the rest, these become the ends.
// False, with the row undefined, if a value is not finite, or so large that the scale or the minimum is no f16.
bool quantize_row(Type type, const float* x, int cols, std::uint8_t* stored);

}  // namespace chairlift
