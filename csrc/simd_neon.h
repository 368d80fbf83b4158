// simd.h for NEON with dot products of bytes: ARM's servers since 2019, Apple's processors.
#pragma once

#include <arm_neon.h>

#include "half.h"

#define CHAIRLIFT_BYTE_PRODUCTS  // dot()
#define CHAIRLIFT_SIGNED_BYTES   // whose weights are signed

namespace chairlift::CHAIRLIFT_ISA {

struct f32x8 {
    float32x4_t lo, hi;
};

CHAIRLIFT_INLINE f32x8 broadcast(float x) { return {vdupq_n_f32(x), vdupq_n_f32(x)}; }
CHAIRLIFT_INLINE f32x8 zero8() { return broadcast(0.0f); }
CHAIRLIFT_INLINE f32x8 load(const float* p) { return {vld1q_f32(p), vld1q_f32(p + 4)}; }
CHAIRLIFT_INLINE void store(float* p, f32x8 a) {
    vst1q_f32(p, a.lo);
    vst1q_f32(p + 4, a.hi);
}

CHAIRLIFT_INLINE f32x8 load_f16(const std::uint16_t* p) {
    const float16x8_t half = vreinterpretq_f16_u16(vld1q_u16(p));
    return {vcvt_f32_f16(vget_low_f16(half)), vcvt_high_f32_f16(half)};
}
CHAIRLIFT_INLINE void store_f16(std::uint16_t* p, f32x8 a) {
    vst1q_u16(p, vreinterpretq_u16_f16(vcvt_high_f16_f32(vcvt_f16_f32(a.lo), a.hi)));
}
CHAIRLIFT_INLINE f32x8 load_bf16(const std::uint16_t* p) {
    const uint16x8_t bits = vld1q_u16(p);
    return {vreinterpretq_f32_u32(vshll_n_u16(vget_low_u16(bits), 16)),
            vreinterpretq_f32_u32(vshll_high_n_u16(bits, 16))};
}
CHAIRLIFT_INLINE f32x8 load_i8(const std::int8_t* p) {
    const int16x8_t wide = vmovl_s8(vld1_s8(p));
    return {vcvtq_f32_s32(vmovl_s16(vget_low_s16(wide))), vcvtq_f32_s32(vmovl_high_s16(wide))};
}
CHAIRLIFT_INLINE int16x8_t rounded(f32x8 a) {
    return vqmovn_high_s32(vqmovn_s32(vcvtnq_s32_f32(a.lo)), vcvtnq_s32_f32(a.hi));
}
CHAIRLIFT_INLINE void store_i8(std::int8_t* p, f32x8 a) { vst1_s8(p, vqmovn_s16(rounded(a))); }

CHAIRLIFT_INLINE f32x8 operator+(f32x8 a, f32x8 b) { return {vaddq_f32(a.lo, b.lo), vaddq_f32(a.hi, b.hi)}; }
CHAIRLIFT_INLINE f32x8 operator-(f32x8 a, f32x8 b) { return {vsubq_f32(a.lo, b.lo), vsubq_f32(a.hi, b.hi)}; }
CHAIRLIFT_INLINE f32x8 operator*(f32x8 a, f32x8 b) { return {vmulq_f32(a.lo, b.lo), vmulq_f32(a.hi, b.hi)}; }
CHAIRLIFT_INLINE f32x8 operator/(f32x8 a, f32x8 b) { return {vdivq_f32(a.lo, b.lo), vdivq_f32(a.hi, b.hi)}; }
CHAIRLIFT_INLINE f32x8 fma(f32x8 a, f32x8 b, f32x8 c) {
    return {vfmaq_f32(c.lo, a.lo, b.lo), vfmaq_f32(c.hi, a.hi, b.hi)};
}
CHAIRLIFT_INLINE float32x4_t below4(float32x4_t a, float32x4_t b, float32x4_t then, float32x4_t otherwise) {
    return vbslq_f32(vcltq_f32(a, b), then, otherwise);
}
CHAIRLIFT_INLINE f32x8 below(f32x8 a, f32x8 b, f32x8 then, f32x8 otherwise) {
    return {below4(a.lo, b.lo, then.lo, otherwise.lo), below4(a.hi, b.hi, then.hi, otherwise.hi)};
}
CHAIRLIFT_INLINE f32x8 min(f32x8 a, f32x8 b) { return below(a, b, a, b); }
CHAIRLIFT_INLINE f32x8 max(f32x8 a, f32x8 b) { return below(b, a, a, b); }
CHAIRLIFT_INLINE f32x8 abs(f32x8 a) { return {vabsq_f32(a.lo), vabsq_f32(a.hi)}; }
CHAIRLIFT_INLINE f32x8 round_even(f32x8 a) { return {vrndnq_f32(a.lo), vrndnq_f32(a.hi)}; }
CHAIRLIFT_INLINE float32x4_t power_of_two(float32x4_t n) {
    return vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(vcvtnq_s32_f32(n), vdupq_n_s32(127)), 23));
}
CHAIRLIFT_INLINE f32x8 scale(f32x8 a, f32x8 n) {
    return {vmulq_f32(a.lo, power_of_two(n.lo)), vmulq_f32(a.hi, power_of_two(n.hi))};
}
CHAIRLIFT_INLINE float sum(f32x8 a) {
    const float32x4_t four = vaddq_f32(a.lo, a.hi);
    const float32x2_t two = vadd_f32(vget_low_f32(four), vget_high_f32(four));
    return vget_lane_f32(two, 0) + vget_lane_f32(two, 1);
}
CHAIRLIFT_INLINE float maximum(f32x8 a) {
    const float32x4_t four = below4(a.hi, a.lo, a.lo, a.hi);
    const float even = four[0] > four[2] ? four[0] : four[2];
    const float odd = four[1] > four[3] ? four[1] : four[3];
    return even > odd ? even : odd;
}
CHAIRLIFT_INLINE float32x4_t greater_bits(float32x4_t a, float32x4_t b) {
    return vreinterpretq_f32_s32(vmaxq_s32(vreinterpretq_s32_f32(a), vreinterpretq_s32_f32(b)));
}
CHAIRLIFT_INLINE f32x8 greater_magnitude(f32x8 a, f32x8 b) {
    return {greater_bits(vabsq_f32(a.lo), b.lo), greater_bits(vabsq_f32(a.hi), b.hi)};
}
CHAIRLIFT_INLINE float magnitude(f32x8 a) {
    return float_from_bits(static_cast<std::uint32_t>(vmaxvq_s32(vreinterpretq_s32_f32(greater_bits(a.lo, a.hi)))));
}
CHAIRLIFT_INLINE void prefetch_l2(const void* p) { __builtin_prefetch(p, 0, 2); }

// Integers: 32 bytes, 16 16-bit and 8 32-bit lanes. A 32-bit lane is one output column, its bytes four inputs.
struct i8x32 {
    int8x16_t lo, hi;
};
struct i16x16 {
    int16x8_t lo, hi;
};
struct i32x8 {
    int32x4_t lo, hi;
};

CHAIRLIFT_INLINE int8x16_t quad_at(const std::int8_t* p) {
    std::int32_t quad;
    std::memcpy(&quad, p, 4);
    return vreinterpretq_s8_s32(vdupq_n_s32(quad));
}
CHAIRLIFT_INLINE i8x32 load_bytes(const void* p) {
    const std::int8_t* bytes = static_cast<const std::int8_t*>(p);
    return {vld1q_s8(bytes), vld1q_s8(bytes + 16)};
}
CHAIRLIFT_INLINE i8x32 broadcast_quad(const std::int8_t* p) { return {quad_at(p), quad_at(p)}; }
// 32 floats within -127.5..127.5, in order, rounded to nearest even.
CHAIRLIFT_INLINE void store_rounded(std::int8_t* p, const f32x8 (&x)[4]) {
    for (int i = 0; i < 4; i++) store_i8(p + 8 * i, x[i]);
}
// Weights below 128 times signed activations, the sums of neighbours.
CHAIRLIFT_INLINE int16x8_t multiply_pairs(int8x16_t weight, int8x16_t x) {
    return vpaddq_s16(vmull_s8(vget_low_s8(weight), vget_low_s8(x)), vmull_high_s8(weight, x));
}
CHAIRLIFT_INLINE i16x16 multiply_pairs(i8x32 weight, i8x32 x) {
    return {multiply_pairs(weight.lo, x.lo), multiply_pairs(weight.hi, x.hi)};
}
// The sums of neighbours.
template <int factor>
CHAIRLIFT_INLINE i32x8 widen_pairs(i16x16 a) {
    static_assert(factor == 1);
    return {vpaddlq_s16(a.lo), vpaddlq_s16(a.hi)};
}
CHAIRLIFT_INLINE i32x8 operator+(i32x8 a, i32x8 b) { return {vaddq_s32(a.lo, b.lo), vaddq_s32(a.hi, b.hi)}; }
CHAIRLIFT_INLINE f32x8 to_float(i32x8 a) { return {vcvtq_f32_s32(a.lo), vcvtq_f32_s32(a.hi)}; }

}  // namespace chairlift::CHAIRLIFT_ISA

#include "simd_pair.h"

namespace chairlift::CHAIRLIFT_ISA {

struct i8x64 {
    int8x16_t v[4];  // four columns each
};

CHAIRLIFT_INLINE i32x16 zero_sums() {
    const i32x8 zeros = {vdupq_n_s32(0), vdupq_n_s32(0)};
    return {zeros, zeros};
}
template <class Body>
CHAIRLIFT_INLINE i8x64 each_of(const i8x64& a, Body&& body) {
    return {{body(a.v[0]), body(a.v[1]), body(a.v[2]), body(a.v[3])}};
}
CHAIRLIFT_INLINE i8x64 load_quads(const void* p) {
    const std::int8_t* bytes = static_cast<const std::int8_t*>(p);
    return {{vld1q_s8(bytes), vld1q_s8(bytes + 16), vld1q_s8(bytes + 32), vld1q_s8(bytes + 48)}};
}
CHAIRLIFT_INLINE i8x64 low_nibbles(const i8x64& a) {
    return each_of(a, [](int8x16_t v) { return vandq_s8(v, vdupq_n_s8(15)); });
}
CHAIRLIFT_INLINE i8x64 high_nibbles(const i8x64& a) {
    return each_of(a, [](int8x16_t v) { return vreinterpretq_s8_u8(vshrq_n_u8(vreinterpretq_u8_s8(v), 4)); });
}
// Unsigned bytes less 128, as signed ones.
CHAIRLIFT_INLINE i8x64 less_128(const i8x64& a) {
    return each_of(a, [](int8x16_t v) { return veorq_s8(v, vdupq_n_s8(-128)); });
}
// sums + signed weights times the four signed activations at `x`, four neighbours at a time.
CHAIRLIFT_INLINE i32x16 dot(i32x16 sums, const i8x64& weights, const std::int8_t* x) {
    const int8x16_t quad = quad_at(x);
    return {{vdotq_s32(sums.left.lo, weights.v[0], quad), vdotq_s32(sums.left.hi, weights.v[1], quad)},
            {vdotq_s32(sums.right.lo, weights.v[2], quad), vdotq_s32(sums.right.hi, weights.v[3], quad)}};
}

}  // namespace chairlift::CHAIRLIFT_ISA
