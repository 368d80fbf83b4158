// simd.h for AVX-512 with VNNI. What is not of sixteen lanes is AVX2's, so both give the same bits.
#pragma once

#include "simd_avx2.h"

#define CHAIRLIFT_BYTE_PRODUCTS  // dot(): products of bytes summed in 32 bits by one instruction

namespace chairlift::CHAIRLIFT_ISA {

constexpr int kRegisters16 = 32;

struct f32x16 {
    __m512 v;
};
struct i32x16 {
    __m512i v;
};
struct i8x64 {
    __m512i v;
};

CHAIRLIFT_INLINE f32x16 zero16() { return {_mm512_setzero_ps()}; }
CHAIRLIFT_INLINE f32x16 broadcast16(float x) { return {_mm512_set1_ps(x)}; }
CHAIRLIFT_INLINE f32x16 load16(const float* p) { return {_mm512_loadu_ps(p)}; }
CHAIRLIFT_INLINE f32x16 load16_f16(const std::uint16_t* p) {
    return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
CHAIRLIFT_INLINE f32x16 load16_bf16(const std::uint16_t* p) {
    const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
    return {_mm512_castsi512_ps(_mm512_slli_epi32(wide, 16))};
}
CHAIRLIFT_INLINE f32x16 load16_i8(const std::int8_t* p) {
    return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))))};
}
CHAIRLIFT_INLINE void store(float* p, f32x16 a) { _mm512_storeu_ps(p, a.v); }
CHAIRLIFT_INLINE f32x16 operator+(f32x16 a, f32x16 b) { return {_mm512_add_ps(a.v, b.v)}; }
CHAIRLIFT_INLINE f32x16 operator-(f32x16 a, f32x16 b) { return {_mm512_sub_ps(a.v, b.v)}; }
CHAIRLIFT_INLINE f32x16 operator*(f32x16 a, f32x16 b) { return {_mm512_mul_ps(a.v, b.v)}; }
CHAIRLIFT_INLINE f32x16 operator/(f32x16 a, f32x16 b) { return {_mm512_div_ps(a.v, b.v)}; }
CHAIRLIFT_INLINE f32x16 fma(f32x16 a, f32x16 b, f32x16 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
CHAIRLIFT_INLINE f32x16 min(f32x16 a, f32x16 b) { return {_mm512_min_ps(a.v, b.v)}; }
CHAIRLIFT_INLINE f32x16 max(f32x16 a, f32x16 b) { return {_mm512_max_ps(a.v, b.v)}; }
CHAIRLIFT_INLINE f32x16 below(f32x16 a, f32x16 b, f32x16 then, f32x16 otherwise) {
    return {_mm512_mask_blend_ps(_mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ), otherwise.v, then.v)};
}
CHAIRLIFT_INLINE f32x16 round_even(f32x16 a) {
    return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
CHAIRLIFT_INLINE f32x16 scale(f32x16 a, f32x16 n) { return {_mm512_scalef_ps(a.v, n.v)}; }
CHAIRLIFT_INLINE f32x8 left_of(f32x16 a) { return {_mm512_castps512_ps256(a.v)}; }
CHAIRLIFT_INLINE f32x8 right_of(f32x16 a) { return {_mm512_extractf32x8_ps(a.v, 1)}; }
CHAIRLIFT_INLINE f32x16 to_float(i32x16 a) { return {_mm512_cvtepi32_ps(a.v)}; }

CHAIRLIFT_INLINE i32x16 zero_sums() { return {_mm512_setzero_si512()}; }
CHAIRLIFT_INLINE i8x64 load_quads(const void* p) { return {_mm512_loadu_si512(p)}; }
CHAIRLIFT_INLINE i8x64 low_nibbles(i8x64 a) { return {_mm512_and_si512(a.v, _mm512_set1_epi8(15))}; }
CHAIRLIFT_INLINE i8x64 high_nibbles(i8x64 a) { return low_nibbles({_mm512_srli_epi16(a.v, 4)}); }
// sums + unsigned weights times the four signed activations at `x`, four neighbours at a time.
CHAIRLIFT_INLINE i32x16 dot(i32x16 sums, i8x64 weights, const std::int8_t* x) {
    std::int32_t quad;
    std::memcpy(&quad, x, 4);
    return {_mm512_dpbusd_epi32(sums.v, weights.v, _mm512_set1_epi32(quad))};
}

}  // namespace chairlift::CHAIRLIFT_ISA
