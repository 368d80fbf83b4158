// Four horizontal sums at once, which on AVX2 cost little more than one. For NAME.isa.cpp sources.
#pragma once

#include "simd.h"

namespace chairlift::CHAIRLIFT_ISA {

// out[i] is the sum of v[i], in one fixed order.
CHAIRLIFT_INLINE void store_sums(const f32x8* v, float* out) {
#if defined(CHAIRLIFT_ISA_AVX2) || defined(CHAIRLIFT_ISA_AVX512)
    const __m256 pairs = _mm256_hadd_ps(_mm256_hadd_ps(v[0].v, v[1].v), _mm256_hadd_ps(v[2].v, v[3].v));
    _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(pairs), _mm256_extractf128_ps(pairs, 1)));
#else
    for (int i = 0; i < 4; ++i) out[i] = sum(v[i]);
#endif
}

}  // namespace chairlift::CHAIRLIFT_ISA
