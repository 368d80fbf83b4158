// Conversions of single f16 and bf16 values. Always inlined, so sources of any instruction set may use them.
#pragma once

#include <cstdint>
#include <cstring>

#include "inline.h"

namespace chairlift {

CHAIRLIFT_INLINE float float_from_bits(std::uint32_t bits) {
    float x;
    std::memcpy(&x, &bits, 4);
    return x;
}

CHAIRLIFT_INLINE std::uint32_t bits_from_float(float x) {
    std::uint32_t bits;
    std::memcpy(&bits, &x, 4);
    return bits;
}

CHAIRLIFT_INLINE float float_from_bf16(std::uint16_t h) {
    return float_from_bits(static_cast<std::uint32_t>(h) << 16);
}

CHAIRLIFT_INLINE float float_from_f16(std::uint16_t h) {
    const std::uint32_t sign = (h & 0x8000u) << 16;
    const std::uint32_t magnitude = (h & 0x7fffu) << 13;
    if (magnitude >= (0x7c00u << 13)) return float_from_bits(sign | magnitude | 0x7f800000u);  // infinity, NaN
    // The exponent field is too small by 127 - 15, which the product corrects, subnormals included.
    return float_from_bits(sign | bits_from_float(float_from_bits(magnitude) * 0x1p112f));
}

// To nearest, ties to even, as hardware does.
CHAIRLIFT_INLINE std::uint16_t bf16_from_float(float x) {
    const std::uint32_t bits = bits_from_float(x);
    const std::uint32_t nearest = bits + 0x7fffu + ((bits >> 16) & 1u);  // a carry goes into the exponent, up to infinity
    return static_cast<std::uint16_t>((x == x ? nearest : bits | 0x400000u) >> 16);
}

// The same.
CHAIRLIFT_INLINE std::uint16_t f16_from_float(float x) {
    std::uint32_t bits = bits_from_float(x);
    const std::uint32_t sign = (bits >> 16) & 0x8000u;
    bits &= 0x7fffffffu;
    if (bits > 0x7f800000u) return static_cast<std::uint16_t>(sign | 0x7e00u | ((bits >> 13) & 0x3ffu));  // NaN
    if (bits >= 0x47800000u) return static_cast<std::uint16_t>(sign | 0x7c00u);                           // >= 2^16
    if (bits < 0x38800000u) {  // subnormal: adding 0.5 rounds to a multiple of 2^-24, the smallest f16
        const float shifted = float_from_bits(bits) + 0.5f;
        return static_cast<std::uint16_t>(sign | (bits_from_float(shifted) - 0x3f000000u));
    }
    bits += 0x0fffu + ((bits >> 13) & 1u);  // a carry goes into the exponent, up to infinity
    return static_cast<std::uint16_t>(sign | ((bits - 0x38000000u) >> 13));
}

}  // namespace chairlift
