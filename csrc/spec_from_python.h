// A decoder's spec as Python gives it: dataclasses.asdict(DecoderSpec).
#pragma once

#include <nanobind/nanobind.h>

#include "spec.h"

namespace chairlift {

// Throws std::invalid_argument for a field that is missing or of a wrong type; DecoderSpec::check() judges the values.
DecoderSpec spec_from_python(const nanobind::dict& dict);

}  // namespace chairlift
