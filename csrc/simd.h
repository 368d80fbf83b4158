// Vectors of eight floats, and the integer vectors of the quantised products, for the instruction set being compiled.
//
// Only for NAME.isa.cpp sources (isa.h). Each operation is a fixed sequence of roundings, so a result depends on the
// operands alone. The portable vectors use the compilers' generic vector types: SSE2 or NEON code without naming them.
//
// `fma` is one rounding on AVX2 and NEON and two (product, then sum) on portable, where a fused one may be a library call.
#pragma once

#ifndef CHAIRLIFT_ISA
#error "simd.h is for sources compiled once per instruction set (NAME.isa.cpp)"
#endif

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "inline.h"

#if defined(CHAIRLIFT_ISA_AVX2)
#include "simd_avx2.h"
#include "simd_pair.h"
#elif defined(CHAIRLIFT_ISA_AVX512)
#include "simd_avx512.h"
#elif defined(CHAIRLIFT_ISA_AMX)
#include "simd_amx.h"
#elif defined(CHAIRLIFT_ISA_NEON)
#include "simd_neon.h"
#else
#include "simd_portable.h"
#include "simd_pair.h"
#endif

namespace chairlift::CHAIRLIFT_ISA {

// f32x8 (from the header above):
//   zero8() broadcast(x) load(p) store(p, v) load_f16(p) store_f16(p, v) load_bf16(p) load_i8(p)
//   store_i8(p, v): values within -127.5..127.5, rounded to nearest even
//   v + w, v - w, v * w, v / w, fma(a, b, c) = a * b + c, min(a, b), max(a, b): b if either is NaN; abs(v)
//   below(a, b, then, otherwise): then where a < b, else (and for NaN) otherwise
//   greater_magnitude(a, b): |a| or b, which is not negative, NaN above all; magnitude(v): the greatest of such
//   round_even(v), scale(v, n): v * 2^n for integral n in -126..127, sum(v), maximum(v) (in one fixed order)
// f16 values are passed as std::uint16_t bits.
//
// f32x16, i32x16: sixteen columns of a panel, or sixteen positions, in one register or two (simd_pair.h), of which there
// are kRegisters16:
//   zero16() broadcast16(x) load16(p) load16_f16(p) load16_bf16(p) load16_i8(p) store(p, v) to_float(i)
//   + - * / fma min max below round_even scale sum maximum, as above
// Products of bytes: where CHAIRLIFT_BYTE_PRODUCTS is defined, i8x64 with zero_sums() load_quads(p) low_nibbles(v)
// high_nibbles(v) dot(sums, weights, x), and if its weights are signed (CHAIRLIFT_SIGNED_BYTES) less_128(v); else i8x32
// and i16x16, whose sums matmul.isa.cpp keeps from overflowing. Where CHAIRLIFT_TILE_PRODUCTS is defined, also
// TileRegisters, for sixteen rows and columns at a time, store(p, i8x64) and load_sums(p); and for attention bf16x32.

// The first n < 8 floats; the rest is `fill`.
CHAIRLIFT_INLINE f32x8 load_first(const float* p, int n, float fill = 0.0f) {
    alignas(32) float lanes[8];
    for (int i = 0; i < 8; i++) lanes[i] = i < n ? p[i] : fill;
    return load(lanes);
}

CHAIRLIFT_INLINE void store_first(float* p, f32x8 v, int n) {
    alignas(32) float lanes[8];
    store(lanes, v);
    for (int i = 0; i < n; i++) p[i] = lanes[i];
}

CHAIRLIFT_INLINE float sum(f32x16 v) { return sum(left_of(v) + right_of(v)); }
CHAIRLIFT_INLINE float maximum(f32x16 v) { return maximum(max(left_of(v), right_of(v))); }

// x in each lane of a vector of the kind V.
template <class V>
V all(float x);
template <>
CHAIRLIFT_INLINE f32x8 all(float x) { return broadcast(x); }
template <>
CHAIRLIFT_INLINE f32x16 all(float x) { return broadcast16(x); }

// e^x within 2 units in the last place. 0 below -87.3 (and for -infinity), e^88 above 88, NaN for NaN.
template <class V>
CHAIRLIFT_INLINE V exp(V x) {
    const V lowest = all<V>(-87.3f);
    const V clamped = max(lowest, min(all<V>(88.0f), x));
    const V n = round_even(clamped * all<V>(1.44269504f));  // x = n ln 2 + r with |r| <= ln 2 / 2
    V r = fma(n, all<V>(-0.693359375f), clamped);           // ln 2 in two parts, the first with few bits
    r = fma(n, all<V>(2.12194440e-4f), r);
    V p = all<V>(1.0f / 5040);  // the exponential series to r^7, whose rest is below 1e-8
    p = fma(p, r, all<V>(1.0f / 720));
    p = fma(p, r, all<V>(1.0f / 120));
    p = fma(p, r, all<V>(1.0f / 24));
    p = fma(p, r, all<V>(1.0f / 6));
    p = fma(p, r, all<V>(0.5f));
    p = fma(p, r, all<V>(1.0f));
    p = fma(p, r, all<V>(1.0f));
    return below(x, lowest, all<V>(0.0f), scale(p, n));
}

// tanh(x) = 1 - 2 / (e^2x + 1): absolute error within 2e-7.
template <class V>
CHAIRLIFT_INLINE V tanh(V x) {
    const V one = all<V>(1.0f);
    return one - all<V>(2.0f) / (exp(x + x) + one);
}

}  // namespace chairlift::CHAIRLIFT_ISA
