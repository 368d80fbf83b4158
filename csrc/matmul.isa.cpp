#include "matmul.h"

#include "simd.h"

// Everything an inner loop iterates over is known at compile time, so that sums stay in registers.
#define CHAIRLIFT_UNROLL _Pragma("GCC unroll 16")

namespace chairlift::CHAIRLIFT_ISA {
namespace {

constexpr int kQuads = kGroup / 4;
constexpr int kStreamingRows = 2;  // with more, the arithmetic takes longer than the memory
constexpr int kAhead = 4096;  // bytes of weights to ask for beyond those at hand, when they come from memory

struct Rows {  // of the activations, at the first row of a tile
    const float* x;
    std::size_t x_stride;
    const std::int8_t* q;
    std::size_t q_stride;
    const float* groups;
};

enum Number { kScale, kScaledSum, kSum, kFirstSum };  // of a row and group
constexpr int kGroupStep = kRowNumbers * kRowBlock;   // from a group's to the next one's

// Whether the weights of a type come out of multiply_group with their zero taken away.
constexpr bool multiplied_without_zero(Type type) {
#ifdef CHAIRLIFT_SIGNED_BYTES
    return packed_layout(type).zero == 128;
#else
    return packed_layout(type).zero == 0;
#endif
}

#ifdef CHAIRLIFT_BYTE_PRODUCTS

constexpr int kTileRows = kRegisters16 >= 32 ? 8 : 4;

// Integer products of quads [first, first + count) of a group, R rows by 16 columns.
template <Type type, int R>
CHAIRLIFT_INLINE void multiply_group(const std::uint8_t* values, const std::int8_t* q, std::size_t q_stride, int first,
                                     int count, i32x16 (&sums)[R]) {
    constexpr int quads_per_load = packed_layout(type).value_bits == 4 ? 2 : 1;
    CHAIRLIFT_UNROLL
    for (int r = 0; r < R; r++) sums[r] = zero_sums();
    CHAIRLIFT_UNROLL
    for (int quad = first; quad < first + count; quad++) {
        const i8x64 bytes = load_quads(values + quad / quads_per_load * 64);
        i8x64 weights = quads_per_load == 1 ? bytes : quad % 2 ? high_nibbles(bytes) : low_nibbles(bytes);
#ifdef CHAIRLIFT_SIGNED_BYTES
        if constexpr (multiplied_without_zero(type)) weights = less_128(weights);
#endif
        CHAIRLIFT_UNROLL
        for (int r = 0; r < R; r++) sums[r] = dot(sums[r], weights, q + r * q_stride + quad * 4);
    }
}

#else

constexpr int kTileRows = 4;

// How many quads of products a 16-bit lane can sum before 2 * largest value * 127 * quads overflows.
constexpr int quads_per_sum(Type type) {
    switch (type) {
        case Type::q4_0: case Type::q4_1: case Type::q4_k: return 8;
        case Type::q5_0: case Type::q5_1: case Type::q5_k: return 4;
        default: return 2;  // q6_k
    }
}

// Half a quad (8 of its 16 columns) as bytes.
template <Type type>
CHAIRLIFT_INLINE i8x32 load_quad(const std::uint8_t* values, int quad, int half) {
    if constexpr (packed_layout(type).value_bits == 8) {
        return load_bytes(values + quad * 64 + half * 32);
    } else {
        const i8x32 two = load_bytes(values + quad / 2 * 64 + half * 32);
        return quad % 2 ? high_nibbles(two) : low_nibbles(two);
    }
}

// Integer products of quads [first, first + count) of a group, R rows by 16 columns, for values of up to 6 bits.
template <Type type, int R>
CHAIRLIFT_INLINE void multiply_quads(const std::uint8_t* values, const std::int8_t* q, std::size_t q_stride, int first,
                                     int count, i32x16 (&sums)[R]) {
    constexpr int run = quads_per_sum(type);
    CHAIRLIFT_UNROLL
    for (int start = first; start < first + count; start += run) {
        i16x16 short_sums[R][2];
        CHAIRLIFT_UNROLL
        for (int quad = start; quad < start + run; quad++) {
            const i8x32 left = load_quad<type>(values, quad, 0), right = load_quad<type>(values, quad, 1);
            CHAIRLIFT_UNROLL
            for (int r = 0; r < R; r++) {
                const i8x32 x = broadcast_quad(q + r * q_stride + quad * 4);
                const i16x16 a = multiply_pairs(left, x), b = multiply_pairs(right, x);
                short_sums[r][0] = quad == start ? a : short_sums[r][0] + a;
                short_sums[r][1] = quad == start ? b : short_sums[r][1] + b;
            }
        }
        CHAIRLIFT_UNROLL
        for (int r = 0; r < R; r++) {
            const i32x8 a = widen_pairs<1>(short_sums[r][0]), b = widen_pairs<1>(short_sums[r][1]);
            sums[r].left = start == first ? a : sums[r].left + a;
            sums[r].right = start == first ? b : sums[r].right + b;
        }
    }
}

// The same for a whole group of 8-bit values: the nibbles apart, so that their sums stay in 16 bits.
template <int R>
CHAIRLIFT_INLINE void multiply_bytes(const std::uint8_t* values, const std::int8_t* q, std::size_t q_stride,
                                     i32x16 (&sums)[R]) {
    CHAIRLIFT_UNROLL
    for (int half = 0; half < 2; half++) {
        asm volatile("" ::: "memory");  // load x again for the second half; to keep it all would be to spill it
        i16x16 low[R], high[R];
        CHAIRLIFT_UNROLL
        for (int quad = 0; quad < kQuads; quad++) {
            const i8x32 bytes = load_bytes(values + quad * 64 + half * 32);
            const i8x32 lower = low_nibbles(bytes), upper = high_nibbles(bytes);
            CHAIRLIFT_UNROLL
            for (int r = 0; r < R; r++) {
                const i8x32 x = broadcast_quad(q + r * q_stride + quad * 4);
                const i16x16 a = multiply_pairs(lower, x), b = multiply_pairs(upper, x);
                low[r] = quad == 0 ? a : low[r] + a;
                high[r] = quad == 0 ? b : high[r] + b;
            }
        }
        CHAIRLIFT_UNROLL
        for (int r = 0; r < R; r++)
            (half ? sums[r].right : sums[r].left) = widen_pairs<1>(low[r]) + widen_pairs<16>(high[r]);
    }
}

template <Type type, int R>
CHAIRLIFT_INLINE void multiply_group(const std::uint8_t* values, const std::int8_t* q, std::size_t q_stride, int first,
                                     int count, i32x16 (&sums)[R]) {
    if constexpr (type == Type::q8_0) {
        multiply_bytes<R>(values, q, q_stride, sums);
    } else {
        multiply_quads<type, R>(values, q, q_stride, first, count, sums);
    }
}

#endif

template <Type type>
CHAIRLIFT_INLINE f32x16 load_scales(const std::uint8_t* p) {
    if constexpr (packed_layout(type).wide_scales) {
        return load16(reinterpret_cast<const float*>(p));
    } else {
        return load16_f16(reinterpret_cast<const std::uint16_t*>(p));
    }
}

// acc += the integer sums of one part of a group, times the scales of row and column.
template <Type type, int R, class Sums>
CHAIRLIFT_INLINE void add_products(const std::uint8_t* block, int part, const float* x_group, Sums&& sums,
                                   f32x16 (&acc)[R]) {
    constexpr PackedLayout layout = packed_layout(type);
    const f32x16 scales = load_scales<type>(block + layout.value_bytes() + part * layout.scale_row_bytes());
    CHAIRLIFT_UNROLL
    for (int r = 0; r < R; r++) {
        const float* of_row = x_group + r * kRowNumbers;
        f32x16 product = to_float(sums(r));
        if constexpr (layout.zero != 0 && !multiplied_without_zero(type)) {  // still exact: integers below 2^24
            const float sum = layout.scale_rows == 1 ? of_row[kSum]
                : part == 0 ? of_row[kFirstSum] : of_row[kSum] - of_row[kFirstSum];
            product = fma(broadcast16(sum), broadcast16(-static_cast<float>(layout.zero)), product);
        }
        acc[r] = fma(product, broadcast16(of_row[kScale]) * scales, acc[r]);
    }
}

template <Type type, int R>
CHAIRLIFT_INLINE void add_minimums(const std::uint8_t* block, const float* x_group, f32x16 (&acc)[R]) {
    const f32x16 minimums = load_scales<type>(block + packed_layout(type).minimum_offset());
    CHAIRLIFT_UNROLL
    for (int r = 0; r < R; r++) acc[r] = fma(broadcast16(x_group[r * kRowNumbers + kScaledSum]), minimums, acc[r]);
}

// R rows by one panel of quantised weights.
template <Type type, int R>
void quantized_tile(const std::uint8_t* block, int cols, const Rows& rows, float (*out)[kPanel]) {
    constexpr PackedLayout layout = packed_layout(type);
    constexpr int parts = layout.scale_rows;  // scales per group
    f32x16 acc[R];
    CHAIRLIFT_UNROLL
    for (int r = 0; r < R; r++) acc[r] = zero16();

    const std::int8_t* q = rows.q;
    const float* x_group = rows.groups;
    for (int k = 0; k < cols; k += kGroup, block += layout.block_bytes(), q += kGroup, x_group += kGroupStep) {
        if constexpr (R <= kStreamingRows)
            for (int line = 0; line < layout.block_bytes(); line += 64) prefetch_l2(block + kAhead + line);
        CHAIRLIFT_UNROLL
        for (int part = 0; part < parts; part++) {
            i32x16 sums[R];
            multiply_group<type, R>(block, q, rows.q_stride, part * kQuads / parts, kQuads / parts, sums);
            add_products<type, R>(block, part, x_group, [&](int r) { return sums[r]; }, acc);
        }
        if constexpr (layout.has_minimum) add_minimums<type, R>(block, x_group, acc);
    }
    for (int r = 0; r < R; r++) store(out[r], acc[r]);
}

#ifdef CHAIRLIFT_TILE_PRODUCTS

constexpr int kLeastTiledRows = 9;              // a tile takes as long for fewer
constexpr int kMostTiledCols = 512 * kGroup;    // of a panel widened to bytes: 256 KiB for each thread

// Registers, two of each so that one group need not wait for another: activations by rows, weights by quads.
enum Register { kSums = 0, kActivations = 2, kWeights = 4 };
constexpr TileRegisters::Size kTiles[8] = {{16, 64}, {16, 64}, {16, kGroup}, {16, kGroup}, {kQuads, 64}, {kQuads, 64}};

// A panel's values as bytes, quad after quad.
alignas(64) thread_local std::uint8_t widened[kMostTiledCols * kPanel];

// Where a panel's values are as bytes, and how far apart those of two groups. Nibbles are widened for it.
struct Bytes {
    const std::uint8_t* values;
    std::size_t stride;
};

template <Type type>
Bytes bytes_of(const std::uint8_t* panel, int cols) {
    constexpr PackedLayout layout = packed_layout(type);
    if constexpr (layout.value_bits == 4) {
        std::uint8_t *const begin = widened, *out = begin;
        const std::uint8_t* block = panel;
        for (int k = 0; k < cols; k += kGroup, block += layout.block_bytes(), out += kQuads * 64) {
            CHAIRLIFT_UNROLL
            for (int quad = 0; quad < kQuads; quad += 2) {
                const i8x64 two = load_quads(block + quad / 2 * 64);
                store(out + quad * 64, low_nibbles(two));
                store(out + quad * 64 + 64, high_nibbles(two));
            }
        }
        return {begin, kQuads * 64};
    } else {
        return {panel, static_cast<std::size_t>(layout.block_bytes())};
    }
}

// Sixteen rows by one panel of quantised weights, by tiles. (The rows need not all mean something, only be readable.) The
// integer sums go through memory, which takes a while: so each group is multiplied before the one before it is added up.
template <Type type>
void tiled_tile(const TileRegisters& tiles, const std::uint8_t* panel, const Bytes& bytes, int cols, const Rows& rows,
                float (*out)[kPanel]) {
    constexpr PackedLayout layout = packed_layout(type);
    constexpr int R = kRowBlock;
    alignas(64) std::int32_t sums[2][R][16];
    f32x16 acc[R];
    CHAIRLIFT_UNROLL
    for (int r = 0; r < R; r++) acc[r] = zero16();

    const int groups = cols / kGroup;
    const auto multiply = [&]<int registers>(int group) CHAIRLIFT_ALWAYS {
        constexpr int out = kSums + registers, x = kActivations + registers, weights = kWeights + registers;
        tiles.load<x>(rows.q + group * kGroup, rows.q_stride);
        tiles.load<weights>(bytes.values + group * bytes.stride, 64);
        tiles.clear<out>();
        tiles.multiply_bytes<out, x, weights>();
        tiles.store<out>(sums[registers], 64);
    };
    const auto add = [&]<int registers>(int group) CHAIRLIFT_ALWAYS {
        const std::uint8_t* block = panel + group * layout.block_bytes();
        const float* x_group = rows.groups + group * kGroupStep;
        add_products<type, R>(block, 0, x_group, [&](int r) { return load_sums(sums[registers][r]); }, acc);
        if constexpr (layout.has_minimum) add_minimums<type, R>(block, x_group, acc);
    };
    multiply.template operator()<0>(0);
    for (int group = 0; group < groups; group += 2) {
        if (group + 1 < groups) multiply.template operator()<1>(group + 1);
        add.template operator()<0>(group);
        if (group + 1 == groups) break;
        if (group + 2 < groups) multiply.template operator()<0>(group + 2);
        add.template operator()<1>(group + 1);
    }
    CHAIRLIFT_UNROLL
    for (int r = 0; r < R; r++) store(out[r], acc[r]);
}

#endif

template <Type type>
CHAIRLIFT_INLINE f32x16 load_floats(const std::uint8_t* panel, std::size_t index) {
    if constexpr (type == Type::f32) return load16(reinterpret_cast<const float*>(panel) + index);
    if constexpr (type == Type::f16) return load16_f16(reinterpret_cast<const std::uint16_t*>(panel) + index);
    if constexpr (type == Type::bf16) return load16_bf16(reinterpret_cast<const std::uint16_t*>(panel) + index);
}

// R rows by one panel of float weights.
template <Type type, int R>
void float_tile(const std::uint8_t* panel, int cols, const Rows& rows, float (*out)[kPanel]) {
    f32x16 acc[R];
    CHAIRLIFT_UNROLL
    for (int r = 0; r < R; r++) acc[r] = zero16();
    for (int k = 0; k < cols; k++) {
        const f32x16 weights = load_floats<type>(panel, static_cast<std::size_t>(k) * kPanel);
        CHAIRLIFT_UNROLL
        for (int r = 0; r < R; r++) acc[r] = fma(broadcast16(rows.x[r * rows.x_stride + k]), weights, acc[r]);
    }
    for (int r = 0; r < R; r++) store(out[r], acc[r]);
}

constexpr int kPanelsAtOnce = 4;

// One row by some panels of float weights, whose sums need not wait for each other.
template <Type type>
void float_panels(const std::uint8_t* panel, std::size_t panel_bytes, int cols, const float* x, float (*out)[kPanel]) {
    f32x16 acc[kPanelsAtOnce];
    CHAIRLIFT_UNROLL
    for (int p = 0; p < kPanelsAtOnce; p++) acc[p] = zero16();
    for (int k = 0; k < cols; k++) {
        const f32x16 value = broadcast16(x[k]);
        CHAIRLIFT_UNROLL
        for (int p = 0; p < kPanelsAtOnce; p++)
            acc[p] = fma(value, load_floats<type>(panel + p * panel_bytes, static_cast<std::size_t>(k) * kPanel), acc[p]);
    }
    for (int p = 0; p < kPanelsAtOnce; p++) store(out[p], acc[p]);
}

template <Type type, int R>
CHAIRLIFT_INLINE void tile(const std::uint8_t* panel, int cols, const Rows& rows, float (*out)[kPanel]) {
    if constexpr (is_quantized(type)) {
        quantized_tile<type, R>(panel, cols, rows, out);
    } else {
        float_tile<type, R>(panel, cols, rows, out);
    }
}

// `count` rows, 1 to R.
template <Type type, int R>
CHAIRLIFT_INLINE void tile_of(int count, const std::uint8_t* panel, int cols, const Rows& rows, float (*out)[kPanel]) {
    if constexpr (R > 1) {
        if (count < R) return tile_of<type, R - 1>(count, panel, cols, rows, out);
    }
    tile<type, R>(panel, cols, rows, out);
}

struct Output {
    float* out;
    std::size_t stride;
    const float* bias;  // of the panel's first column, or null
    bool accumulate;
    int columns;  // 16, or fewer in the last panel
};

void write_tile(const float (*sums)[kPanel], int rows, const Output& to) {
    if (to.columns == kPanel) {
        const f32x16 bias = to.bias ? load16(to.bias) : zero16();
        for (int r = 0; r < rows; r++) {
            float* out = to.out + r * to.stride;
            f32x16 value = load16(sums[r]);
            if (to.bias) value = value + bias;
            if (to.accumulate) value = value + load16(out);
            store(out, value);
        }
        return;
    }
    for (int r = 0; r < rows; r++) {
        float* out = to.out + r * to.stride;
        for (int c = 0; c < to.columns; c++) {
            float value = sums[r][c];
            if (to.bias) value += to.bias[c];
            if (to.accumulate) value += out[c];
            out[c] = value;
        }
    }
}

// A product of some rows and some panels: what gemm() is asked for.
struct Product {
    const MatrixView& w;
    const ActRows& x;
    int panel_begin, panel_end;
    float* out;
    std::size_t out_stride;
    const float* bias;
    bool accumulate;

    Rows rows(int row) const {
        return {x.x + row * x.x_stride, x.x_stride, x.q + row * x.q_stride, x.q_stride, x.groups_of(row)};
    }
    void write(const float (*sums)[kPanel], int row, int count, int panel) const {
        const int column = panel * kPanel, columns = w.rows - column < kPanel ? w.rows - column : kPanel;
        write_tile(sums, count, {out + row * out_stride + column, out_stride, bias ? bias + column : nullptr, accumulate,
                                 columns});
    }
};

template <Type type>
void by_panels(const Product& product, int row) {
    alignas(64) float sums[kPanelsAtOnce][kPanel];
    const std::size_t bytes = product.w.panel_bytes;
    const Rows one = product.rows(row);
    for (int panel = product.panel_begin, count; panel < product.panel_end; panel += count) {
        const std::uint8_t* weights = product.w.data + panel * bytes;
        count = product.panel_end - panel < kPanelsAtOnce ? 1 : kPanelsAtOnce;
        if (count == 1)
            float_tile<type, 1>(weights, product.w.cols, one, sums);
        else
            float_panels<type>(weights, bytes, product.w.cols, one.x, sums);
        for (int p = 0; p < count; p++) product.write(sums + p, row, 1, panel + p);
    }
}

template <Type type>
void by_rows(const Product& product, int row_begin, int row_end) {
    if constexpr (!is_quantized(type))
        if (row_end - row_begin == 1) return by_panels<type>(product, row_begin);
    alignas(64) float sums[kTileRows][kPanel];
    for (int panel = product.panel_begin; panel < product.panel_end; panel++) {
        for (int row = row_begin; row < row_end; row += kTileRows) {
            const int count = row_end - row < kTileRows ? row_end - row : kTileRows;
            const std::uint8_t* weights = product.w.data + panel * product.w.panel_bytes;
            tile_of<type, kTileRows>(count, weights, product.w.cols, product.rows(row), sums);
            product.write(sums, row, count, panel);
        }
    }
}

#ifdef CHAIRLIFT_TILE_PRODUCTS

template <Type type>
void by_tiles(const Product& product, int row_begin, int row_end) {
    const TileRegisters tiles(kTiles);
    alignas(64) float sums[kRowBlock][kPanel];
    for (int panel = product.panel_begin; panel < product.panel_end; panel++) {
        const std::uint8_t* weights = product.w.data + panel * product.w.panel_bytes;
        const Bytes bytes = bytes_of<type>(weights, product.w.cols);
        for (int row = row_begin; row < row_end; row += kRowBlock) {
            tiled_tile<type>(tiles, weights, bytes, product.w.cols, product.rows(row), sums);
            product.write(sums, row, row_end - row < kRowBlock ? row_end - row : kRowBlock, panel);
        }
    }
}

template <Type type>
constexpr bool suits_tiles = is_quantized(type) && packed_layout(type).scale_rows == 1;

#endif

template <Type type>
void gemm_of(const Product& product, int row_begin, int row_end) {
#ifdef CHAIRLIFT_TILE_PRODUCTS
    if constexpr (suits_tiles<type>) {
        const int rest = (row_end - row_begin) % kRowBlock;
        const bool fits = packed_layout(type).value_bits == 8 || product.w.cols <= kMostTiledCols;
        const int tiled = !fits ? row_begin : rest < kLeastTiledRows ? row_end - rest : row_end;
        if (tiled > row_begin) by_tiles<type>(product, row_begin, tiled);
        row_begin = tiled;
    }
#endif
    by_rows<type>(product, row_begin, row_end);
}

void gemm(const MatrixView& w, const ActRows& x, int row_begin, int row_end, int panel_begin, int panel_end, float* out,
          std::size_t out_stride, const float* bias, bool accumulate) {
#define CHAIRLIFT_CASE(type) \
    case Type::type:         \
        return gemm_of<Type::type>({w, x, panel_begin, panel_end, out, out_stride, bias, accumulate}, row_begin, row_end);
    switch (w.type) {
        CHAIRLIFT_CASE(f32)
        CHAIRLIFT_CASE(f16)
        CHAIRLIFT_CASE(bf16)
        CHAIRLIFT_CASE(q4_0)
        CHAIRLIFT_CASE(q4_1)
        CHAIRLIFT_CASE(q5_0)
        CHAIRLIFT_CASE(q5_1)
        CHAIRLIFT_CASE(q8_0)
        CHAIRLIFT_CASE(q4_k)
        CHAIRLIFT_CASE(q5_k)
        CHAIRLIFT_CASE(q6_k)
    }
#undef CHAIRLIFT_CASE
}

#ifdef CHAIRLIFT_TILE_PRODUCTS

// The numbers of rows that a tile has beyond the last one. Whatever they are, nobody sees what comes of them, but denormal
// ones would take a hundred times as long.
void clear_numbers_after(const ActRows& rows) {
    const int rest = rows.rows % kRowBlock;
    if (rest < kLeastTiledRows) return;
    float* numbers = rows.groups_of(rows.rows - 1) + kRowNumbers;
    for (int k = 0; k < rows.cols; k += kGroup, numbers += kGroupStep)
        for (int i = 0; i < (kRowBlock - rest) * kRowNumbers; i++) numbers[i] = 0.0f;
}

#endif

void quantize_row(const ActRows& rows, int row) {
    const float* x = rows.x + row * rows.x_stride;
    std::int8_t* q = rows.q + row * rows.q_stride;
    float* x_group = rows.groups_of(row);
    for (int k = 0; k < rows.cols; k += kGroup, x += kGroup, q += kGroup, x_group += kGroupStep) {
        f32x8 v[4], largest = zero8();
        for (int i = 0; i < 4; i++) {
            v[i] = load(x + 8 * i);
            largest = greater_magnitude(v[i], largest);
        }
        const float peak = magnitude(largest);
        const bool finite = peak <= __FLT_MAX__;
        // Below 1e-30 the reciprocal may overflow; such a group is zero to every purpose.
        const bool usable = finite && peak >= 1e-30f;
        const float scale = finite ? (usable ? peak / 127.0f : 0.0f) : __builtin_nanf("");
        const f32x8 inverse = broadcast(usable ? 127.0f / peak : 0.0f);
        for (int i = 0; i < 4; i++) v[i] = usable ? v[i] * inverse : zero8();
        store_rounded(q, v);

        const std::int8_t ones[4] = {1, 1, 1, 1};
        float sums[8];  // of four values each
        store(sums, to_float(widen_pairs<1>(multiply_pairs(broadcast_quad(ones), load_bytes(q)))));
        const float first = (sums[0] + sums[1]) + (sums[2] + sums[3]);
        const float both = first + ((sums[4] + sums[5]) + (sums[6] + sums[7]));
        x_group[kScale] = scale;
        x_group[kScaledSum] = scale * both;
        x_group[kSum] = both;
        x_group[kFirstSum] = first;
    }
#ifdef CHAIRLIFT_TILE_PRODUCTS
    if (row == rows.rows - 1) clear_numbers_after(rows);
#endif
}

#ifdef CHAIRLIFT_TILE_PRODUCTS
constexpr std::size_t kThreadBytes = sizeof widened;
void prepare_thread() {
    volatile std::uint8_t* bytes = widened;
    for (std::size_t i = 0; i < sizeof widened; i += 4096) bytes[i] = 0;
}
#else
constexpr std::size_t kThreadBytes = 0;
void prepare_thread() {}
#endif

}  // namespace

extern const MatmulKernels matmul_kernels = {quantize_row, gemm, kThreadBytes, prepare_thread};

}  // namespace chairlift::CHAIRLIFT_ISA
