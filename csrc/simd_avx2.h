// simd.h for AVX2 with FMA and F16C.
#pragma once

#include <immintrin.h>

namespace chairlift::CHAIRLIFT_ISA {

struct f32x8 {
    __m256 v;
};

CHAIRLIFT_INLINE f32x8 zero8() { return {_mm256_setzero_ps()}; }
CHAIRLIFT_INLINE f32x8 broadcast(float x) { return {_mm256_set1_ps(x)}; }
CHAIRLIFT_INLINE f32x8 load(const float* p) { return {_mm256_loadu_ps(p)}; }
CHAIRLIFT_INLINE void store(float* p, f32x8 a) { _mm256_storeu_ps(p, a.v); }

CHAIRLIFT_INLINE f32x8 load_f16(const std::uint16_t* p) {
    return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))};
}
CHAIRLIFT_INLINE void store_f16(std::uint16_t* p, f32x8 a) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p),
                     _mm256_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
CHAIRLIFT_INLINE f32x8 load_bf16(const std::uint16_t* p) {
    const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    return {_mm256_castsi256_ps(_mm256_slli_epi32(wide, 16))};
}

CHAIRLIFT_INLINE f32x8 load_i8(const std::int8_t* p) {
    return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))))};
}
CHAIRLIFT_INLINE void store_i8(std::int8_t* p, f32x8 a) {
    const __m256i wide = _mm256_cvtps_epi32(a.v);
    const __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(wide), _mm256_extracti128_si256(wide, 1));
    _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm_packs_epi16(words, words));
}

CHAIRLIFT_INLINE f32x8 operator+(f32x8 a, f32x8 b) { return {_mm256_add_ps(a.v, b.v)}; }
CHAIRLIFT_INLINE f32x8 operator-(f32x8 a, f32x8 b) { return {_mm256_sub_ps(a.v, b.v)}; }
CHAIRLIFT_INLINE f32x8 operator*(f32x8 a, f32x8 b) { return {_mm256_mul_ps(a.v, b.v)}; }
CHAIRLIFT_INLINE f32x8 operator/(f32x8 a, f32x8 b) { return {_mm256_div_ps(a.v, b.v)}; }
CHAIRLIFT_INLINE f32x8 fma(f32x8 a, f32x8 b, f32x8 c) { return {_mm256_fmadd_ps(a.v, b.v, c.v)}; }
CHAIRLIFT_INLINE f32x8 min(f32x8 a, f32x8 b) { return {_mm256_min_ps(a.v, b.v)}; }
CHAIRLIFT_INLINE f32x8 max(f32x8 a, f32x8 b) { return {_mm256_max_ps(a.v, b.v)}; }
CHAIRLIFT_INLINE f32x8 abs(f32x8 a) { return {_mm256_andnot_ps(_mm256_set1_ps(-0.0f), a.v)}; }
CHAIRLIFT_INLINE f32x8 below(f32x8 a, f32x8 b, f32x8 then, f32x8 otherwise) {
    return {_mm256_blendv_ps(otherwise.v, then.v, _mm256_cmp_ps(a.v, b.v, _CMP_LT_OQ))};
}
CHAIRLIFT_INLINE f32x8 round_even(f32x8 a) {
    return {_mm256_round_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
CHAIRLIFT_INLINE f32x8 scale(f32x8 a, f32x8 n) {
    const __m256i biased = _mm256_add_epi32(_mm256_cvtps_epi32(n.v), _mm256_set1_epi32(127));
    return {_mm256_mul_ps(a.v, _mm256_castsi256_ps(_mm256_slli_epi32(biased, 23)))};
}
CHAIRLIFT_INLINE float sum(f32x8 a) {
    __m128 s = _mm_add_ps(_mm256_castps256_ps128(a.v), _mm256_extractf128_ps(a.v, 1));
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}
CHAIRLIFT_INLINE float maximum(f32x8 a) {
    __m128 s = _mm_max_ps(_mm256_castps256_ps128(a.v), _mm256_extractf128_ps(a.v, 1));
    s = _mm_max_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_max_ss(s, _mm_movehdup_ps(s)));
}
CHAIRLIFT_INLINE f32x8 greater_magnitude(f32x8 a, f32x8 b) {
    return {_mm256_castsi256_ps(_mm256_max_epi32(_mm256_castps_si256(abs(a).v), _mm256_castps_si256(b.v)))};
}
CHAIRLIFT_INLINE float magnitude(f32x8 a) {
    const __m256i bits = _mm256_castps_si256(a.v);
    __m128i s = _mm_max_epi32(_mm256_castsi256_si128(bits), _mm256_extracti128_si256(bits, 1));
    s = _mm_max_epi32(s, _mm_shuffle_epi32(s, 0x4e));
    return _mm_cvtss_f32(_mm_castsi128_ps(_mm_max_epi32(s, _mm_shuffle_epi32(s, 0xb1))));
}
CHAIRLIFT_INLINE void prefetch_l2(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T1); }

// Integers: 32 bytes, 16 16-bit and 8 32-bit lanes. A 32-bit lane is one output column, its bytes four inputs.
struct i8x32 {
    __m256i v;
};
struct i16x16 {
    __m256i v;
};
struct i32x8 {
    __m256i v;
};

CHAIRLIFT_INLINE i8x32 load_bytes(const void* p) { return {_mm256_loadu_si256(static_cast<const __m256i*>(p))}; }
CHAIRLIFT_INLINE i8x32 broadcast_quad(const std::int8_t* p) {
    std::int32_t quad;
    std::memcpy(&quad, p, 4);
    return {_mm256_set1_epi32(quad)};
}
// 32 floats within -127.5..127.5, in order, rounded to nearest even.
CHAIRLIFT_INLINE void store_rounded(std::int8_t* p, const f32x8 (&x)[4]) {
    const __m256i a = _mm256_packs_epi32(_mm256_cvtps_epi32(x[0].v), _mm256_cvtps_epi32(x[1].v));
    const __m256i b = _mm256_packs_epi32(_mm256_cvtps_epi32(x[2].v), _mm256_cvtps_epi32(x[3].v));
    // Packing works within 128-bit halves; quads come out in the order 0 2 4 6 1 3 5 7.
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                        _mm256_permutevar8x32_epi32(_mm256_packs_epi16(a, b), order));
}
CHAIRLIFT_INLINE i8x32 low_nibbles(i8x32 a) { return {_mm256_and_si256(a.v, _mm256_set1_epi8(15))}; }
CHAIRLIFT_INLINE i8x32 high_nibbles(i8x32 a) { return low_nibbles({_mm256_srli_epi16(a.v, 4)}); }
// Unsigned weight times signed activation, the sums of neighbours: 2 * weight * 127 must stay below 2^15.
CHAIRLIFT_INLINE i16x16 multiply_pairs(i8x32 weight, i8x32 x) { return {_mm256_maddubs_epi16(weight.v, x.v)}; }
CHAIRLIFT_INLINE i16x16 operator+(i16x16 a, i16x16 b) {
    __m256i sum = _mm256_add_epi16(a.v, b.v);
    asm("" : "+x"(sum));  // GCC would turn a chain of sums into a tree, hold all its terms at once and spill them
    return {sum};
}
// The sums of neighbours, times a constant.
template <int factor>
CHAIRLIFT_INLINE i32x8 widen_pairs(i16x16 a) {
    return {_mm256_madd_epi16(a.v, _mm256_set1_epi16(factor))};
}
CHAIRLIFT_INLINE i32x8 operator+(i32x8 a, i32x8 b) {
    __m256i sum = _mm256_add_epi32(a.v, b.v);
    asm("" : "+x"(sum));
    return {sum};
}
CHAIRLIFT_INLINE f32x8 to_float(i32x8 a) { return {_mm256_cvtepi32_ps(a.v)}; }

}  // namespace chairlift::CHAIRLIFT_ISA
