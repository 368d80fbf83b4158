// simd.h for AVX-512 with AMX: the same vectors, and one instruction for the byte products of a whole tile.
#pragma once

#include "simd_avx512.h"

#define CHAIRLIFT_TILE_PRODUCTS  // TileProducts

namespace chairlift::CHAIRLIFT_ISA {

CHAIRLIFT_INLINE void store(std::uint8_t* p, i8x64 a) { _mm512_storeu_si512(p, a.v); }
CHAIRLIFT_INLINE i32x16 load_sums(const std::int32_t* p) { return {_mm512_loadu_si512(p)}; }

// The tile registers, held while it lives: sums of 16 rows by 16 columns, over 32 inputs. Afterwards the processor has no
// tiles to save when it changes to another thread.
class TileProducts {
public:
    TileProducts() {
        struct alignas(64) {
            std::uint8_t palette = 1, start_row = 0, reserved[14] = {};
            std::uint16_t row_bytes[16] = {};
            std::uint8_t rows[16] = {};
        } setup;
        const auto set = [&](int tile, std::uint8_t rows, std::uint16_t row_bytes) {
            setup.rows[tile] = rows;
            setup.row_bytes[tile] = row_bytes;
        };
        for (int i = 0; i < 2; i++) {
            set(i, 16, 64);      // sums
            set(2 + i, 16, 32);  // activations, a row each
            set(4 + i, 8, 64);   // weights, a quad each
        }
        asm volatile("ldtilecfg %0" ::"m"(setup));  // GCC 12's intrinsic claims to read but a part of it
    }
    ~TileProducts() { _tile_release(); }
    TileProducts(const TileProducts&) = delete;

    // sums = the rows at x, signed bytes `x_stride` apart, times the unsigned bytes at `weights`. Two such products with
    // different `registers` do not wait for each other.
    template <int registers>
    CHAIRLIFT_INLINE void multiply(const std::int8_t* x, std::size_t x_stride, const std::uint8_t* weights,
                                   std::int32_t (*sums)[16]) const {
        if constexpr (registers == 0) {
            _tile_loadd(2, x, x_stride);
            _tile_loadd(4, weights, 64);
            _tile_zero(0);
            _tile_dpbsud(0, 2, 4);
            _tile_stored(0, sums, 64);
        } else {
            _tile_loadd(3, x, x_stride);
            _tile_loadd(5, weights, 64);
            _tile_zero(1);
            _tile_dpbsud(1, 3, 5);
            _tile_stored(1, sums, 64);
        }
    }
};

}  // namespace chairlift::CHAIRLIFT_ISA
