// simd.h for AVX-512 with AMX: the same vectors, and one instruction for the products of whole tiles of bytes or bf16.
#pragma once

#include "simd_avx512.h"

#define CHAIRLIFT_TILE_PRODUCTS  // TileRegisters, and bf16x32 for them

namespace chairlift::CHAIRLIFT_ISA {

CHAIRLIFT_INLINE void store(std::uint8_t* p, i8x64 a) { _mm512_storeu_si512(p, a.v); }
CHAIRLIFT_INLINE i32x16 load_sums(const std::int32_t* p) { return {_mm512_loadu_si512(p)}; }

// The eight tile registers, held while it lives. Afterwards the processor has no tiles to save when it changes to another
// thread. Functions name registers by number; two products wait for each other only where one needs the other's.
class TileRegisters {
public:
    // A register has `rows` rows of `row_bytes`.
    struct Size {
        std::uint8_t rows;
        std::uint16_t row_bytes;
    };

    explicit TileRegisters(const Size (&sizes)[8]) {
        struct alignas(64) {
            std::uint8_t palette = 1, start_row = 0, reserved[14] = {};
            std::uint16_t row_bytes[16] = {};
            std::uint8_t rows[16] = {};
        } setup;
        for (int i = 0; i < 8; i++) {
            setup.rows[i] = sizes[i].rows;
            setup.row_bytes[i] = sizes[i].row_bytes;
        }
        asm volatile("ldtilecfg %0" ::"m"(setup));  // GCC 12's intrinsic claims to read but a part of it
    }
    ~TileRegisters() { asm volatile("tilerelease"); }
    TileRegisters(const TileRegisters&) = delete;

    template <int tile>
    CHAIRLIFT_INLINE void clear() const {
        asm volatile("tilezero %%tmm%c0" ::"i"(tile));
    }
    template <int tile>
    CHAIRLIFT_INLINE void load(const void* rows, std::size_t stride) const {
        asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(rows), "r"(stride), "i"(tile) : "memory");
    }
    template <int tile>
    CHAIRLIFT_INLINE void store(void* rows, std::size_t stride) const {
        asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(rows), "r"(stride), "i"(tile) : "memory");
    }
    // sums[i][j] += the sums over k and four neighbours of a[i][k], signed bytes, times b[k][j], unsigned bytes.
    template <int sums, int a, int b>
    CHAIRLIFT_INLINE void multiply_bytes() const {
        asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(sums), "i"(a), "i"(b));
    }
    // The same for pairs of bf16, in an order that is the same for each of the sums.
    template <int sums, int a, int b>
    CHAIRLIFT_INLINE void multiply_halves() const {
        asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(sums), "i"(a), "i"(b));
    }
};

// Thirty-two bf16: of a row, or sixteen pairs of two rows.
struct bf16x32 {
    __m512i v;
};

CHAIRLIFT_INLINE void store(std::uint32_t* p, bf16x32 a) { _mm512_storeu_si512(p, a.v); }

CHAIRLIFT_INLINE bf16x32 load_pairs(const std::uint32_t* p) { return {_mm512_loadu_si512(p)}; }
// Pairs of a number of `first` and one of `second`, sixteen of each.
CHAIRLIFT_INLINE bf16x32 load_pairs(const std::int8_t* first, const std::int8_t* second) {
    const auto bits = [](const std::int8_t* p) CHAIRLIFT_ALWAYS { return _mm512_castps_si512(load16_i8(p).v); };
    // The lower halves of such floats are zeros.
    return {_mm512_or_si512(_mm512_srli_epi32(bits(first), 16), bits(second))};
}
CHAIRLIFT_INLINE bf16x32 no_pairs() { return {_mm512_setzero_si512()}; }
// Zeros instead of the first or the second of each pair, unless it is wanted.
CHAIRLIFT_INLINE bf16x32 keep(bf16x32 a, bool first, bool second) {
    return {_mm512_and_si512(a.v, _mm512_set1_epi32(static_cast<int>((first ? 0xffffu : 0u) | (second ? 0xffff0000u : 0u))))};
}

CHAIRLIFT_INLINE bool any_differs(f32x16 a, f32x16 b) { return _mm512_cmp_ps_mask(a.v, b.v, _CMP_NEQ_UQ) != 0; }

CHAIRLIFT_INLINE bool all_finite(bf16x32 a) {
    const __m512i exponent = _mm512_set1_epi16(0x7f80);
    return _mm512_cmpeq_epi16_mask(_mm512_and_si512(a.v, exponent), exponent) == 0;
}

// Floats, of `a` and then of `b`, as the bf16 nearest to them, and what is left, cut off to a bf16: nothing is lost of 16
// bits. NaN and infinity leave NaN.
CHAIRLIFT_INLINE void split(f32x16 a, f32x16 b, bf16x32* high, bf16x32* low) {
    const __m512i upper = _mm512_set1_epi32(static_cast<int>(0xffff0000u)), half = _mm512_set1_epi32(0x8000);
    const __m512i odd = _mm512_set_epi16(63, 61, 59, 57, 55, 53, 51, 49, 47, 45, 43, 41, 39, 37, 35, 33,  //
                                         31, 29, 27, 25, 23, 21, 19, 17, 15, 13, 11, 9, 7, 5, 3, 1);
    const auto nearest = [&](f32x16 x) CHAIRLIFT_ALWAYS {
        return _mm512_and_si512(_mm512_add_epi32(_mm512_castps_si512(x.v), half), upper);
    };
    const auto upper_halves = [&](__m512i x, __m512i y) CHAIRLIFT_ALWAYS {
        return bf16x32{_mm512_permutex2var_epi16(x, odd, y)};
    };
    const __m512i a_high = nearest(a), b_high = nearest(b);
    *high = upper_halves(a_high, b_high);
    *low = upper_halves(_mm512_castps_si512(_mm512_sub_ps(a.v, _mm512_castsi512_ps(a_high))),
                        _mm512_castps_si512(_mm512_sub_ps(b.v, _mm512_castsi512_ps(b_high))));
}

// 2^x within 1.5e-7 of it, and 1 for 0; 0 below 2^-126 (and for -infinity), NaN for NaN. The polynomial is the best of its
// degree for 0 <= x < 1.
CHAIRLIFT_INLINE f32x16 power_of_2(f32x16 x) {
    const __m512 fraction = _mm512_reduce_ps(x.v, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
    __m512 p = _mm512_set1_ps(1.86713086e-3f);
    for (const float c : {9.01702885e-3f, 5.57999127e-2f, 2.40164444e-1f, 6.93151295e-1f, 1.0f})
        p = _mm512_fmadd_ps(p, fraction, _mm512_set1_ps(c));
    const __mmask16 counts = _mm512_cmp_ps_mask(x.v, _mm512_set1_ps(-126.0f), _CMP_NLT_UQ);
    return {_mm512_maskz_scalef_ps(counts, p, x.v)};
}

// Of sixteen vectors, sixteen floats apart from `p` on, what `of_two` makes of each one's lanes: in the lane of its place.
template <class OfTwo>
CHAIRLIFT_INLINE f32x16 across(const float* p, OfTwo&& of_two) {
    __m512 twos[8], fours[4], eights[2];
    const auto combine = [&](__m512 a, __m512 b) CHAIRLIFT_ALWAYS { return of_two(f32x16{a}, f32x16{b}).v; };
    for (int i = 0; i < 8; i++) {
        const __m512 a = _mm512_loadu_ps(p + 32 * i), b = _mm512_loadu_ps(p + 32 * i + 16);
        twos[i] = combine(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
    }
    for (int i = 0; i < 4; i++) {
        const __m512d a = _mm512_castps_pd(twos[2 * i]), b = _mm512_castps_pd(twos[2 * i + 1]);
        fours[i] = combine(_mm512_castpd_ps(_mm512_unpacklo_pd(a, b)), _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)));
    }
    const auto even_and_odd_parts = [&](__m512 a, __m512 b) CHAIRLIFT_ALWAYS {
        return combine(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
    };
    for (int i = 0; i < 2; i++) eights[i] = even_and_odd_parts(fours[2 * i], fours[2 * i + 1]);
    return {even_and_odd_parts(eights[0], eights[1])};
}

}  // namespace chairlift::CHAIRLIFT_ISA
