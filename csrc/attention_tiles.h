// Attention by tiles of bf16, for keys and values stored as such.
//
// Queries and weights are split into the nearest bf16 and what is left, as another: 16 bits and more of them count, twice
// what the cache keeps of keys and values, which need no splitting. A product is that of their high halves and that of
// their low ones.
//
// Work is by tiles of positions as everywhere (attention.h), and within one by sixteen queries. Each of the sums is made
// in one order, and what is out of view adds zeros to it, so a query's bits do not depend on the others.
#pragma once

#include "attention_parts.h"
#include "half.h"

namespace chairlift::CHAIRLIFT_ISA {
namespace {

constexpr int kStep = 32;           // numbers, or positions, that a tile product sums up: pairs of neighbours
constexpr int kTile = 16 * kLanes;  // pairs, or sums, of a tile
constexpr int kHalves = 2;

constexpr int steps_of(int count) { return (count + kStep - 1) / kStep; }

// Registers: a column's sums, those of two steps on the right, and the halves of two steps on the left.
constexpr int kSums = 0, kRight = 1, kLeft = 3;

struct TileRows : TileRegisters {
    // Only so many rows on the left, and of sums: of queries, at most 16.
    explicit TileRows(std::uint8_t rows)
        : TileRegisters({{rows, 64}, {16, 64}, {16, 64}, {rows, 64}, {rows, 64}, {rows, 64}, {rows, 64}, {0, 0}}) {}
};

// The parts of the scratch memory. A tile of pairs has a row for each of sixteen queries or pairs of numbers or positions;
// a column is sixteen positions of keys, or sixteen numbers of values.
struct TileWork {
    std::uint32_t* keys;     // [column][step]
    std::uint32_t* values;   // [step][column]
    std::uint32_t* queries;  // [sixteen queries][half][step], scaled
    std::uint32_t* weights;  // [half][step], of sixteen queries
    float* scores;           // [16][positions of a tile]
    float* sums;             // [sixteen queries][column][16][16]
    float* greatest;         // [queries]
    float* mass;             // [queries] sum of weights
    float* lanes;            // [16][16] each query's greatest scores, or sums of weights, of some positions each
    Bf16* staged;            // keys and values of a step's two columns, where the cache has no whole vectors of them
    int steps, columns;      // of numbers
    std::size_t floats;      // of all of it
};

CHAIRLIFT_INLINE TileWork divide_for_tiles(const AttentionShape& shape, float* scratch) {
    TileWork work;
    work.steps = steps_of(shape.head.head_dim);
    work.columns = 2 * work.steps;
    const std::size_t numbers = work.steps * kStep, positions = shape.tile;
    const std::size_t queries = (std::size_t{kRowTile} * shape.group + 15) / 16 * 16;
    float* at = scratch;
    const auto take = [&](std::size_t floats) CHAIRLIFT_ALWAYS {
        float* const begin = at;
        at += floats;
        return begin;
    };
    const auto take_halves = [&](std::size_t count) CHAIRLIFT_ALWAYS {
        return reinterpret_cast<std::uint32_t*>(take(count / 2));
    };
    work.keys = take_halves(numbers * positions);
    work.values = take_halves(numbers * positions);
    work.queries = take_halves(kHalves * queries * numbers);
    work.weights = take_halves(kHalves * 16 * positions);
    work.scores = take(16 * positions);
    work.sums = take(queries * numbers);
    work.greatest = take(queries);
    work.mass = take(queries);
    work.lanes = take(kTile);
    work.staged = reinterpret_cast<Bf16*>(take_halves(2 * kStep * numbers));
    work.floats = at - scratch;
    return work;
}

std::size_t bf16_scratch(const AttentionShape& shape) {
    float nowhere[1];
    return divide_for_tiles(shape, nowhere).floats;
}

// Positions of a tile: its keys and values stay in the second cache, and a decode is not all waiting.
CHAIRLIFT_INLINE int bf16_tile(int head_dim) { return head_dim <= 64 ? 128 : head_dim <= 128 ? 64 : 32; }

// Tiles of one side of a product: how many lie between its halves, steps and columns.
struct Tiles {
    const std::uint32_t* first;
    std::size_t half, step, column;
};

// sums[column] += left * right over one step or two, for each column; or = where they are `fresh`. Rows of sums are
// `stride` bytes apart. The left side stays in its registers: with another thread on the same core, a load waits until the
// products before it are done, so there should be few.
template <int Steps, bool fresh>
CHAIRLIFT_INLINE void multiply_steps(const TileRegisters& tiles, const Tiles& left, const Tiles& right, int columns,
                                     float* sums, std::size_t column, std::size_t stride) {
    tiles.load<kLeft>(left.first, 64);
    tiles.load<kLeft + 1>(left.first + left.half * kTile, 64);
    if constexpr (Steps == 2) {
        tiles.load<kLeft + 2>(left.first + left.step * kTile, 64);
        tiles.load<kLeft + 3>(left.first + (left.step + left.half) * kTile, 64);
    }
    const std::uint32_t* from = right.first;
    for (int done = 0; done < columns; ++done, from += right.column * kTile, sums += column) {
        if constexpr (fresh) {
            tiles.clear<kSums>();
        } else {
            tiles.load<kSums>(sums, stride);
        }
        tiles.load<kRight>(from, 64);
        if constexpr (Steps == 2) tiles.load<kRight + 1>(from + right.step * kTile, 64);
        tiles.multiply_halves<kSums, kLeft, kRight>();
        tiles.multiply_halves<kSums, kLeft + 1, kRight>();
        if constexpr (Steps == 2) {
            tiles.multiply_halves<kSums, kLeft + 2, kRight + 1>();
            tiles.multiply_halves<kSums, kLeft + 3, kRight + 1>();
        }
        tiles.store<kSums>(sums, stride);
    }
}

// The same over any number of steps, from 1 on.
template <bool fresh>
CHAIRLIFT_INLINE void multiply(const TileRegisters& tiles, Tiles left, Tiles right, int steps, int columns, float* sums,
                               std::size_t column, std::size_t stride) {
    const auto some = [&]<int Steps, bool first>() CHAIRLIFT_ALWAYS {
        multiply_steps<Steps, first>(tiles, left, right, columns, sums, column, stride);
        left.first += Steps * left.step * kTile;
        right.first += Steps * right.step * kTile;
        steps -= Steps;
    };
    steps > 1 ? some.template operator()<2, fresh>() : some.template operator()<1, fresh>();
    while (steps > 1) some.template operator()<2, false>();
    if (steps == 1) some.template operator()<1, false>();
}

// Where sixteen positions have their keys and values.
struct Column {
    const Bf16 *keys, *values;
    std::size_t key_stride, value_stride;  // from one number to the next, from one position to the next
};

// Needs all of them in a block, and whole steps of numbers.
CHAIRLIFT_INLINE Column stored_column(const AttentionShape& shape, const AttentionUnit& unit, int position) {
    const std::size_t block = block_at(shape, unit, position);
    const int slot = position % shape.head.block_size;
    return {reinterpret_cast<const Bf16*>(unit.keys + block + shape.head.key_at(0, slot)),
            reinterpret_cast<const Bf16*>(unit.values + block + shape.head.value_at(slot)),
            static_cast<std::size_t>(shape.head.block_size), static_cast<std::size_t>(shape.head.head_dim)};
}

// The same as a copy, of positions begin..end of the tile, with zeros for others and for numbers that there are not.
CHAIRLIFT_INLINE Column staged_column(const AttentionShape& shape, const AttentionUnit& unit, int start, int begin, int end,
                                      const TileWork& work) {
    const int head_dim = shape.head.head_dim, numbers = work.steps * kStep, base = begin / kLanes * kLanes;
    Bf16* const keys = work.staged + base / kLanes % 2 * kStep * numbers;
    Bf16* const values = keys + kLanes * numbers;
    for (int i = 0; i < kStep * numbers; ++i) keys[i] = {0};
    for_pieces(shape, unit, start, begin, end, [&](int i, int count, std::size_t block, int slot) CHAIRLIFT_ALWAYS {
        const Bf16* key = reinterpret_cast<const Bf16*>(unit.keys + block + shape.head.key_at(0, slot));
        const Bf16* value = reinterpret_cast<const Bf16*>(unit.values + block + shape.head.value_at(slot));
        for (int n = 0; n < count; ++n)
            for (int number = 0; number < head_dim; ++number) {
                keys[number * kLanes + i - base + n] = key[std::size_t(number) * shape.head.block_size + n];
                values[(i - base + n) * numbers + number] = value[n * head_dim + number];
            }
    });
    return {keys, values, kLanes, static_cast<std::size_t>(numbers)};
}

CHAIRLIFT_INLINE void pack_keys(const Column& from, int column, const TileWork& work) {
    std::uint32_t* out = work.keys + std::size_t(column) * work.steps * kTile;
    const Bf16* keys = from.keys;
    for (int pair = 0; pair < work.steps * kStep / 2; ++pair, keys += 2 * from.key_stride, out += kLanes)
        store(out, pair_up(keys, keys + from.key_stride));
}

// The values of a step's two columns of positions; zeros for those that are not among begin..end of the tile. False if
// some are not finite.
CHAIRLIFT_INLINE bool pack_values(const Column (&from)[2], int step, int begin, int end, const TileWork& work) {
    static constexpr Bf16 zeros[kLanes] = {};
    std::uint32_t* const tiles = work.values + std::size_t(step) * work.columns * kTile;
    bool finite = true;
    for (int pair = 0; pair < kStep / 2; ++pair) {
        const Column& of = from[2 * pair / kLanes];
        const int position = step * kStep + 2 * pair;
        const bool here = position >= begin && position < end, next = position + 1 >= begin && position + 1 < end;
        const Bf16* values = of.values + 2 * pair % kLanes * of.value_stride;
        std::uint32_t* out = tiles + pair * kLanes;
        for (int column = 0; column < work.columns; ++column, values += kLanes, out += kTile) {
            const bf16x32 both = pair_up(here ? values : zeros, next ? values + of.value_stride : zeros);
            finite &= all_finite(both);
            store(out, both);
        }
    }
    return finite;
}

// The keys and values of positions begin..end of the tile at `start`. False if some values are not finite.
CHAIRLIFT_INLINE bool pack_tile(const AttentionShape& shape, const AttentionUnit& unit, int start, int begin, int end,
                                int last, const TileWork& work) {
    const bool whole = shape.head.block_size % kLanes == 0 && shape.head.head_dim % kStep == 0;
    bool finite = true;
    for (int step = begin / kStep; step < steps_of(end); ++step) {
        Column from[2] = {};
        for (int i = 0; i < 2; ++i) {
            const int column = 2 * step + i, at = column * kLanes;
            const int first = begin > at ? begin : at, after = end < at + kLanes ? end : at + kLanes;
            if (first >= after) continue;
            from[i] = whole ? stored_column(shape, unit, start + at) : staged_column(shape, unit, start, first, after, work);
            pack_keys(from[i], column, work);
        }
        finite &= pack_values(from, step, begin, end, work);
        prefetch_positions(shape, unit, start + shape.tile + step * kStep, kStep, last);
    }
    return finite;
}

struct Sixteen {
    int first, count;          // queries
    int begin_step, end_step;  // what some of them see of a tile
    bool all_see_all;          // of these steps
};

CHAIRLIFT_INLINE Sixteen sixteen_from(const AttentionShape& shape, const AttentionUnit& unit, int start, int first) {
    const int left = unit.rows * shape.group - first, count = left < 16 ? left : 16;
    // Views only move on from row to row.
    const View one = view_of(shape, unit, start, first / shape.group);
    const View last = view_of(shape, unit, start, (first + count - 1) / shape.group);
    if (one.begin >= last.end) return {first, count, 0, 0, true};
    const int begin = one.begin / kStep, end = steps_of(last.end);
    return {first, count, begin, end, last.begin <= begin * kStep && one.end >= end * kStep};
}

CHAIRLIFT_INLINE void score_sixteen(const AttentionShape& shape, const TileRegisters& tiles, const TileWork& work,
                                    const Sixteen& some) {
    const std::size_t steps = work.steps;
    const int begin = 2 * some.begin_step, end = 2 * some.end_step;  // columns of positions
    const Tiles queries = {work.queries + some.first / 16 * kHalves * steps * kTile, steps, 1, 0};
    const Tiles keys = {work.keys + begin * steps * kTile, 0, 1, steps};
    multiply<true>(tiles, queries, keys, work.steps, end - begin, work.scores + begin * kLanes, kLanes,
                   shape.tile * sizeof(float));
}

// Turns scores into weights, as halves, and rescales what was summed up before them.
CHAIRLIFT_INLINE void weigh_sixteen(const AttentionShape& shape, const AttentionUnit& unit, const TileWork& work, int start,
                                    const Sixteen& some) {
    const int begin = some.begin_step * kStep, end = some.end_step * kStep;
    const std::size_t half = std::size_t(steps_of(shape.tile)) * kTile;
    float* const lanes = work.lanes;
    for (int r = 0; r < some.count; ++r) {
        float* const scores = work.scores + r * shape.tile;
        if (shape.softcap > 0.0f) {
            const f32x16 cap = broadcast16(shape.softcap);
            for (int key = begin; key < end; key += kLanes) store(scores + key, cap * tanh(load16(scores + key) / cap));
        }
        if (!some.all_see_all) {
            const View view = view_of(shape, unit, start, (some.first + r) / shape.group);
            const int seen = view.begin < view.end ? view.begin : end;
            for (int key = begin; key < seen; ++key) scores[key] = -kInfinity;
            for (int key = view.end > seen ? view.end : seen; key < end; ++key) scores[key] = -kInfinity;
        }
        f32x16 greatest = load16(scores + begin);
        for (int key = begin + kLanes; key < end; key += kLanes) greatest = max(load16(scores + key), greatest);
        store(lanes + r * kLanes, greatest);
    }
    // A query that has not seen anything yet has the least finite number, from which -infinity is still infinitely far.
    float* const running = work.greatest + some.first;
    const f32x16 before = load16(running);
    const f32x16 greatest = max(across(lanes, [](f32x16 a, f32x16 b) CHAIRLIFT_ALWAYS { return max(a, b); }), before);
    store(running, greatest);
    for (int r = 0; r < some.count; ++r) {
        const float* scores = work.scores + r * shape.tile + begin;
        std::uint32_t* out = work.weights + std::size_t(some.begin_step) * kTile + r * kLanes;
        const f32x16 most = broadcast16(running[r]);
        f32x16 mass = zero16();
        for (int step = some.begin_step; step < some.end_step; ++step, scores += kStep, out += kTile) {
            const f32x16 a = exp(load16(scores) - most), b = exp(load16(scores + kLanes) - most);
            mass = mass + a + b;
            bf16x32 high, low;
            split(a, b, &high, &low);
            store(out, high);
            store(out + half, low);
        }
        store(lanes + r * kLanes, mass);
    }
    const f32x16 masses = across(lanes, [](f32x16 a, f32x16 b) CHAIRLIFT_ALWAYS { return a + b; });
    const f32x16 rescale = exp(before - greatest);  // e^0 is 1 to the last bit
    float* const mass = work.mass + some.first;
    store(mass, fma(load16(mass), rescale, masses));
    if (!any_differs(before, greatest)) return;
    store(lanes, rescale);
    float* const sums = work.sums + std::size_t(some.first / 16) * work.columns * kTile;
    for (int column = 0; column < work.columns; ++column)
        for (int r = 0; r < some.count; ++r) {
            float* const at = sums + column * kTile + r * kLanes;
            store(at, load16(at) * broadcast16(lanes[r]));
        }
}

CHAIRLIFT_INLINE void add_sixteen(const AttentionShape& shape, const TileRegisters& tiles, const TileWork& work,
                                  const Sixteen& some) {
    const std::size_t columns = work.columns, position_steps = steps_of(shape.tile);
    const Tiles weights = {work.weights + some.begin_step * kTile, position_steps, 1, 0};
    const Tiles values = {work.values + some.begin_step * columns * kTile, 0, columns, 1};
    multiply<false>(tiles, weights, values, some.end_step - some.begin_step, work.columns,
                    work.sums + some.first / 16 * columns * kTile, kTile, kLanes * sizeof(float));
}

CHAIRLIFT_INLINE void begin_sixteens(const AttentionShape& shape, const AttentionUnit& unit, const TileWork& work) {
    const int head_dim = shape.head.head_dim, queries = unit.rows * shape.group;
    const int sixteens = (queries + 15) / 16;
    const f32x16 scale = broadcast16(shape.scale);
    for (int query = 0; query < queries; ++query) {
        const float* q = unit.q + query / shape.group * shape.q_stride + query % shape.group * head_dim;
        std::uint32_t* out = work.queries + std::size_t(query / 16) * kHalves * work.steps * kTile + query % 16 * kLanes;
        for (int step = 0; step < work.steps; ++step, q += kStep, out += kTile) {
            alignas(64) float last[kStep] = {};
            const float* numbers = q;
            if ((step + 1) * kStep > head_dim) {
                for (int i = 0; step * kStep + i < head_dim; ++i) last[i] = q[i];
                numbers = last;
            }
            bf16x32 high, low;
            split(load16(numbers) * scale, load16(numbers + kLanes) * scale, &high, &low);
            store(out, high);
            store(out + std::size_t(work.steps) * kTile, low);
        }
    }
    for (int i = 0; i < sixteens * 16; i += kLanes) {
        store(work.greatest + i, broadcast16(-__FLT_MAX__));
        store(work.mass + i, zero16());
    }
    for (int i = 0; i < sixteens * work.columns * kTile; i += kLanes) store(work.sums + i, zero16());
    for (int i = 0; i < kTile; i += kLanes) store(work.lanes + i, zero16());  // of queries that there are not
}

CHAIRLIFT_INLINE void end_sixteens(const AttentionShape& shape, const AttentionUnit& unit, const TileWork& work) {
    const int head_dim = shape.head.head_dim;
    for (int query = 0; query < unit.rows * shape.group; ++query) {
        float* out = unit.out + query / shape.group * shape.out_stride + query % shape.group * head_dim;
        const float* sums = work.sums + std::size_t(query / 16) * work.columns * kTile + query % 16 * kLanes;
        const f32x16 mass = broadcast16(work.mass[query]);
        int left = head_dim;
        for (; left >= kLanes; left -= kLanes, out += kLanes, sums += kTile) store(out, load16(sums) / mass);
        for (int i = 0; i < left; ++i) out[i] = sums[i] / work.mass[query];
    }
}

// False, and nothing is done, if a value that not all rows see is not finite: times a weight of zero it would be NaN.
CHAIRLIFT_INLINE bool attend_together(const AttentionShape& shape, const AttentionUnit& unit, const TileWork& work) {
    const int queries = unit.rows * shape.group;
    const TileRows tiles(queries < 16 ? queries : 16);
    const int last = unit.first_position + unit.rows - 1;
    const int from = first_in_view(unit.first_position, unit.window);  // the later rows begin there or after it
    begin_sixteens(shape, unit, work);
    for (int start = from / shape.tile * shape.tile; start <= last; start += shape.tile) {
        const int begin = from > start ? from - start : 0;
        const int end = last + 1 - start < shape.tile ? last + 1 - start : shape.tile;
        const bool finite = pack_tile(shape, unit, start, begin, end, last, work);
        const View first_row = view_of(shape, unit, start, 0), last_row = view_of(shape, unit, start, unit.rows - 1);
        if (!finite && (first_row.begin != last_row.begin || first_row.end != last_row.end)) return false;
        for (int first = 0; first < queries; first += 16) {
            const Sixteen some = sixteen_from(shape, unit, start, first);
            if (some.begin_step == some.end_step) continue;
            score_sixteen(shape, tiles, work, some);
            weigh_sixteen(shape, unit, work, start, some);
            add_sixteen(shape, tiles, work, some);
        }
    }
    end_sixteens(shape, unit, work);
    return true;
}

void attend_bf16(const AttentionShape& shape, const AttentionUnit& unit, float* scratch) {
    const TileWork work = divide_for_tiles(shape, scratch);
    if (attend_together(shape, unit, work)) return;
    AttentionUnit one = unit;
    one.rows = 1;
    for (int row = 0; row < unit.rows; ++row) {
        attend_together(shape, one, work);
        one.q += shape.q_stride;
        one.out += shape.out_stride;
        ++one.first_position;
    }
}

}  // namespace
}  // namespace chairlift::CHAIRLIFT_ISA
