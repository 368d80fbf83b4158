// simd.h for any processor, in the generic vectors that GCC and Clang lower to what the target has.
#pragma once

#include "half.h"

namespace chairlift::CHAIRLIFT_ISA {

typedef float f32x4_t __attribute__((vector_size(16)));
typedef std::int32_t i32x4_t __attribute__((vector_size(16)));
typedef std::uint32_t u32x4_t __attribute__((vector_size(16)));
typedef std::int16_t i16x8_t __attribute__((vector_size(16)));

struct f32x8 {
    f32x4_t lo, hi;
};

CHAIRLIFT_INLINE f32x4_t broadcast4(float x) { return f32x4_t{x, x, x, x}; }
CHAIRLIFT_INLINE f32x8 broadcast(float x) { return {broadcast4(x), broadcast4(x)}; }
CHAIRLIFT_INLINE f32x8 zero8() { return broadcast(0.0f); }
CHAIRLIFT_INLINE f32x8 load(const float* p) {
    f32x8 a;
    std::memcpy(&a.lo, p, 16);
    std::memcpy(&a.hi, p + 4, 16);
    return a;
}
CHAIRLIFT_INLINE void store(float* p, f32x8 a) {
    std::memcpy(p, &a.lo, 16);
    std::memcpy(p + 4, &a.hi, 16);
}

CHAIRLIFT_INLINE f32x4_t as_float(u32x4_t bits) {
    f32x4_t v;
    std::memcpy(&v, &bits, 16);
    return v;
}
CHAIRLIFT_INLINE u32x4_t as_bits(f32x4_t v) {
    u32x4_t bits;
    std::memcpy(&bits, &v, 16);
    return bits;
}
// `mask` lanes are all ones or all zeros, as vector comparisons give them.
CHAIRLIFT_INLINE u32x4_t choose(i32x4_t mask, u32x4_t then, u32x4_t otherwise) {
    const u32x4_t m = (u32x4_t)mask;
    return (m & then) | (~m & otherwise);
}

CHAIRLIFT_INLINE u32x4_t load_u16x4(const std::uint16_t* p) { return u32x4_t{p[0], p[1], p[2], p[3]}; }

CHAIRLIFT_INLINE f32x4_t from_f16(u32x4_t h) {
    const u32x4_t sign = (h & 0x8000u) << 16;
    const u32x4_t magnitude = (h & 0x7fffu) << 13;  // the exponent is 112 too small, which the product corrects
    const f32x4_t scaled = as_float(magnitude) * broadcast4(0x1p112f);
    const u32x4_t special = magnitude | 0x7f800000u;  // infinity and NaN
    const u32x4_t bits = choose(magnitude >= (0x7c00u << 13), special, as_bits(scaled));
    return as_float(bits | sign);
}
CHAIRLIFT_INLINE f32x8 load_f16(const std::uint16_t* p) { return {from_f16(load_u16x4(p)), from_f16(load_u16x4(p + 4))}; }

CHAIRLIFT_INLINE void store_f16(std::uint16_t* p, f32x8 a) {
    for (int i = 0; i < 4; i++) {
        p[i] = f16_from_float(a.lo[i]);
        p[4 + i] = f16_from_float(a.hi[i]);
    }
}
CHAIRLIFT_INLINE f32x8 load_bf16(const std::uint16_t* p) {
    return {as_float(load_u16x4(p) << 16), as_float(load_u16x4(p + 4) << 16)};
}

CHAIRLIFT_INLINE f32x8 load_i8(const std::int8_t* p) {
    const i32x4_t lo = {p[0], p[1], p[2], p[3]}, hi = {p[4], p[5], p[6], p[7]};
    return {__builtin_convertvector(lo, f32x4_t), __builtin_convertvector(hi, f32x4_t)};
}

CHAIRLIFT_INLINE f32x8 operator+(f32x8 a, f32x8 b) { return {a.lo + b.lo, a.hi + b.hi}; }
CHAIRLIFT_INLINE f32x8 operator-(f32x8 a, f32x8 b) { return {a.lo - b.lo, a.hi - b.hi}; }
CHAIRLIFT_INLINE f32x8 operator*(f32x8 a, f32x8 b) { return {a.lo * b.lo, a.hi * b.hi}; }
CHAIRLIFT_INLINE f32x8 operator/(f32x8 a, f32x8 b) { return {a.lo / b.lo, a.hi / b.hi}; }
CHAIRLIFT_INLINE f32x8 fma(f32x8 a, f32x8 b, f32x8 c) { return a * b + c; }
CHAIRLIFT_INLINE f32x4_t below4(f32x4_t a, f32x4_t b, f32x4_t then, f32x4_t otherwise) {
    return as_float(choose(a < b, as_bits(then), as_bits(otherwise)));
}
CHAIRLIFT_INLINE f32x8 below(f32x8 a, f32x8 b, f32x8 then, f32x8 otherwise) {
    return {below4(a.lo, b.lo, then.lo, otherwise.lo), below4(a.hi, b.hi, then.hi, otherwise.hi)};
}
CHAIRLIFT_INLINE f32x8 min(f32x8 a, f32x8 b) { return below(a, b, a, b); }
CHAIRLIFT_INLINE f32x8 max(f32x8 a, f32x8 b) { return below(b, a, a, b); }
CHAIRLIFT_INLINE f32x8 abs(f32x8 a) {
    return {as_float(as_bits(a.lo) & 0x7fffffffu), as_float(as_bits(a.hi) & 0x7fffffffu)};
}
// Adding and taking away 1.5 * 2^23 rounds to an integer; right for |x| < 2^22.
CHAIRLIFT_INLINE f32x8 round_even(f32x8 a) { return (a + broadcast(12582912.0f)) - broadcast(12582912.0f); }
CHAIRLIFT_INLINE void store_i8(std::int8_t* p, f32x8 a) {
    float lanes[8];
    store(lanes, round_even(a));
    for (int i = 0; i < 8; i++) p[i] = static_cast<std::int8_t>(lanes[i]);
}
CHAIRLIFT_INLINE f32x8 scale(f32x8 a, f32x8 n) {
    // In 1.5 * 2^23 + x the integer x stands in the lowest bits.
    const f32x8 shifted = n + broadcast(12582912.0f + 127.0f);
    return {a.lo * as_float(as_bits(shifted.lo) << 23), a.hi * as_float(as_bits(shifted.hi) << 23)};
}
CHAIRLIFT_INLINE float sum(f32x8 a) {
    const f32x4_t s = a.lo + a.hi;
    return (s[0] + s[2]) + (s[1] + s[3]);
}
CHAIRLIFT_INLINE float maximum(f32x8 a) {
    const f32x4_t s = below4(a.hi, a.lo, a.lo, a.hi);
    const float even = s[0] > s[2] ? s[0] : s[2];
    const float odd = s[1] > s[3] ? s[1] : s[3];
    return even > odd ? even : odd;
}
CHAIRLIFT_INLINE f32x4_t greater_bits(u32x4_t a, u32x4_t b) { return as_float(choose((i32x4_t)a > (i32x4_t)b, a, b)); }
CHAIRLIFT_INLINE f32x8 greater_magnitude(f32x8 a, f32x8 b) {
    return {greater_bits(as_bits(a.lo) & 0x7fffffffu, as_bits(b.lo)), greater_bits(as_bits(a.hi) & 0x7fffffffu, as_bits(b.hi))};
}
CHAIRLIFT_INLINE float magnitude(f32x8 a) {
    const u32x4_t bits = as_bits(greater_bits(as_bits(a.lo), as_bits(a.hi)));
    std::uint32_t greatest = bits[0];
    for (int i = 1; i < 4; i++) greatest = bits[i] > greatest ? bits[i] : greatest;
    return float_from_bits(greatest);
}
CHAIRLIFT_INLINE void prefetch_l2(const void* p) { __builtin_prefetch(p, 0, 2); }

// Integers: 32 bytes, 16 16-bit and 8 32-bit lanes. A 32-bit lane is one output column, its bytes four inputs.
struct i8x32 {
    i16x8_t lo, hi;  // pairs of bytes, taken apart by shifts
};
struct i16x16 {
    i16x8_t lo, hi;
};
struct i32x8 {
    i32x4_t lo, hi;
};

// The first and the second byte of each pair, with sign and without.
CHAIRLIFT_INLINE i16x8_t first_signed(i16x8_t a) { return (a << 8) >> 8; }
CHAIRLIFT_INLINE i16x8_t second_signed(i16x8_t a) { return a >> 8; }
CHAIRLIFT_INLINE i16x8_t first_unsigned(i16x8_t a) { return a & 255; }
CHAIRLIFT_INLINE i16x8_t second_unsigned(i16x8_t a) { return (a >> 8) & 255; }

CHAIRLIFT_INLINE i8x32 load_bytes(const void* p) {
    i8x32 a;
    std::memcpy(&a.lo, p, 16);
    std::memcpy(&a.hi, static_cast<const char*>(p) + 16, 16);
    return a;
}
CHAIRLIFT_INLINE i8x32 broadcast_quad(const std::int8_t* p) {
    std::int32_t quad;
    std::memcpy(&quad, p, 4);
    const i32x4_t lanes = {quad, quad, quad, quad};
    return {(i16x8_t)lanes, (i16x8_t)lanes};
}
// 32 floats within -127.5..127.5, in order, rounded to nearest even.
CHAIRLIFT_INLINE void store_rounded(std::int8_t* p, const f32x8 (&x)[4]) {
    for (int i = 0; i < 4; i++) store_i8(p + 8 * i, x[i]);
}
CHAIRLIFT_INLINE i8x32 low_nibbles(i8x32 a) { return {a.lo & 0x0f0f, a.hi & 0x0f0f}; }
CHAIRLIFT_INLINE i8x32 high_nibbles(i8x32 a) { return low_nibbles({a.lo >> 4, a.hi >> 4}); }
CHAIRLIFT_INLINE i16x8_t pairs(i16x8_t w, i16x8_t x) {
    return first_unsigned(w) * first_signed(x) + second_unsigned(w) * second_signed(x);
}
// Unsigned weight times signed activation, the sums of neighbours: 2 * weight * 127 must stay below 2^15.
CHAIRLIFT_INLINE i16x16 multiply_pairs(i8x32 weight, i8x32 x) { return {pairs(weight.lo, x.lo), pairs(weight.hi, x.hi)}; }
CHAIRLIFT_INLINE i16x16 operator+(i16x16 a, i16x16 b) { return {a.lo + b.lo, a.hi + b.hi}; }
CHAIRLIFT_INLINE i32x4_t widen(i16x8_t a) {
    const i32x4_t wide = (i32x4_t)a;
    return ((wide << 16) >> 16) + (wide >> 16);
}
// The sums of neighbours, times a constant.
template <int factor>
CHAIRLIFT_INLINE i32x8 widen_pairs(i16x16 a) {
    return {widen(a.lo) * factor, widen(a.hi) * factor};
}
CHAIRLIFT_INLINE i32x8 operator+(i32x8 a, i32x8 b) { return {a.lo + b.lo, a.hi + b.hi}; }
CHAIRLIFT_INLINE f32x8 to_float(i32x8 a) {
    return {__builtin_convertvector(a.lo, f32x4_t), __builtin_convertvector(a.hi, f32x4_t)};
}

}  // namespace chairlift::CHAIRLIFT_ISA
