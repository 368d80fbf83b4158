// Attention by tiles of bf16, for keys and values stored as such.
//
// Queries and weights are split into the nearest bf16 and what is left, as another: 16 bits and more of them count,
// twice what the cache keeps of keys and values, which need no splitting. A product is that of their high halves and that
// of their low ones.
//
// Work is by tiles of positions as everywhere (attention.h), of so many as one tile product sums up, and within one by
// sixteen queries. Each of the sums is made in one order, and what is out of view adds zeros to it, so a query's bits do
// not depend on the others.
#pragma once

#include "attention_parts.h"

namespace chairlift::CHAIRLIFT_ISA {
namespace {

constexpr int kStep = 32;           // numbers, or positions, that a tile product sums up: pairs of neighbours
constexpr int kTile = 16 * kLanes;  // pairs, or sums, of a tile
constexpr int kHalves = 2;
constexpr int kTilesAhead = 2, kLinesAProduct = 16;  // what the memory brings meanwhile

constexpr int steps_of(int count) { return (count + kStep - 1) / kStep; }

// Registers: a column's sums, those of two steps on the right, and the halves of two steps on the left.
constexpr int kSums = 0, kRight = 1, kLeft = 3;

struct TileRows : TileRegisters {
    // Only so many rows on the left, and of sums: of queries, at most 16.
    explicit TileRows(std::uint8_t rows)
        : TileRegisters({{rows, 64}, {16, 64}, {16, 64}, {rows, 64}, {rows, 64}, {rows, 64}, {rows, 64}, {0, 0}}) {}
};

// What will soon be used of the cache, asked for a little at a time while there is other work: all at once, the work
// behind it would wait, since few lines can be under way.
class Ahead {
public:
    // The tile at `start`, but nothing after `last`.
    CHAIRLIFT_INLINE void set(const AttentionShape& shape, const AttentionUnit& unit, int start, int last) {
        count_ = next_ = 0;
        for_stored(shape, unit, start, last, [&](const std::uint8_t* begin, std::size_t bytes) CHAIRLIFT_ALWAYS {
            if (count_ < kMost) pieces_[count_++] = {begin, static_cast<int>((bytes + 63) / 64)};
        });
    }

    CHAIRLIFT_INLINE void ask(int lines) {
        while (lines > 0 && next_ < count_) {
            Piece& piece = pieces_[next_];
            const int some = lines < piece.lines ? lines : piece.lines;
            for (int i = 0; i < some; ++i) prefetch_l1(piece.begin + 64 * i);
            piece.begin += 64 * some;
            piece.lines -= some;
            next_ += piece.lines == 0;
            lines -= some;
        }
    }

private:
    static constexpr int kMost = 1024;  // what is more must be waited for

    struct Piece {
        const std::uint8_t* begin;
        int lines;
    };

    Piece pieces_[kMost];
    int count_ = 0, next_ = 0;
};

// A tile of positions, of which begin..end are seen by some row.
struct Packed {
    std::uint32_t* keys;    // [column of positions][step of numbers]
    std::uint32_t* values;  // [column of numbers]
    int start, begin, end;
    bool finite;            // all of the values
};

// The parts of the scratch memory. A tile of pairs has a row for each of sixteen queries or pairs of numbers or
// positions; a column is sixteen positions of keys, or sixteen numbers of values.
struct TileWork {
    Packed packed;           // the tile at hand
    std::uint32_t* queries;  // [sixteen queries][half][step], scaled
    std::uint32_t* weights;  // [half], of sixteen queries
    float* scores;           // [16][positions], the same
    float* sums;             // [sixteen queries][column][16][16]
    float* greatest;         // [queries]
    float* mass;             // [queries] sum of weights
    float* lanes;            // [16][16] each query's greatest scores, or sums of weights, of some positions each
    Bf16* staged;            // keys, or values, of a column where the cache has no whole vectors of them
    int steps, columns;      // of numbers
    std::size_t floats;      // of all of it
};

// `scratch` may be null, to know the size.
CHAIRLIFT_INLINE TileWork divide_for_tiles(const AttentionShape& shape, float* scratch) {
    TileWork work;
    work.steps = steps_of(shape.head.head_dim);
    work.columns = 2 * work.steps;
    const std::size_t numbers = work.steps * kStep;
    const std::size_t queries = (std::size_t{kRowTile} * shape.group + 15) / 16 * 16;
    work.floats = 0;
    const auto take = [&](std::size_t floats) CHAIRLIFT_ALWAYS {
        const std::size_t at = work.floats;
        work.floats += floats;
        return scratch ? scratch + at : nullptr;
    };
    const auto take_halves = [&](std::size_t count) CHAIRLIFT_ALWAYS {
        return reinterpret_cast<std::uint32_t*>(take(count / 2));
    };
    work.packed.keys = take_halves(numbers * kStep);
    work.packed.values = take_halves(numbers * kStep);
    work.queries = take_halves(kHalves * queries * numbers);
    work.weights = take_halves(kHalves * 16 * kStep);
    work.scores = take(16 * kStep);
    work.sums = take(queries * numbers);
    work.greatest = take(queries);
    work.mass = take(queries);
    work.lanes = take(kTile);
    work.staged = reinterpret_cast<Bf16*>(take_halves(kLanes * numbers));
    return work;
}

std::size_t bf16_scratch(const AttentionShape& shape) { return divide_for_tiles(shape, nullptr).floats; }

CHAIRLIFT_INLINE int bf16_tile(int) { return kStep; }

// sums[column] += left * right over the next step or two of all, for each column; or = where they are `fresh`. Rows of
// sums are `stride` bytes apart. The left side stays in its registers: with another thread on the same core, a load waits
// until the products before it are done, so there should be few. A product takes its time: some of what is ahead is asked
// for.
template <int Steps, bool fresh>
CHAIRLIFT_INLINE void multiply_steps(const TileRegisters& tiles, const std::uint32_t* left, const std::uint32_t* right,
                                     std::size_t all_steps, int columns, float* sums, std::size_t column,
                                     std::size_t stride, Ahead& ahead) {
    const std::size_t apart = all_steps * kTile;  // halves on the left, columns on the right
    tiles.load<kLeft>(left, 64);
    tiles.load<kLeft + 1>(left + apart, 64);
    if constexpr (Steps == 2) {
        tiles.load<kLeft + 2>(left + kTile, 64);
        tiles.load<kLeft + 3>(left + apart + kTile, 64);
    }
    for (int done = 0; done < columns; ++done, right += apart, sums += column) {
        if constexpr (fresh) {
            tiles.clear<kSums>();
        } else {
            tiles.load<kSums>(sums, stride);
        }
        tiles.load<kRight>(right, 64);
        if constexpr (Steps == 2) tiles.load<kRight + 1>(right + kTile, 64);
        tiles.multiply_halves<kSums, kLeft, kRight>();
        tiles.multiply_halves<kSums, kLeft + 1, kRight>();
        if constexpr (Steps == 2) {
            tiles.multiply_halves<kSums, kLeft + 2, kRight + 1>();
            tiles.multiply_halves<kSums, kLeft + 3, kRight + 1>();
        }
        ahead.ask(kLinesAProduct);
        tiles.store<kSums>(sums, stride);
    }
}

// The same over all steps, from 1 on: of the tiles left[half][step] and right[column][step].
template <bool fresh>
CHAIRLIFT_INLINE void multiply(const TileRegisters& tiles, const std::uint32_t* left, const std::uint32_t* right, int steps,
                               int columns, float* sums, std::size_t column, std::size_t stride, Ahead& ahead) {
    int done = 0;
    const auto some = [&]<int Steps, bool first>() CHAIRLIFT_ALWAYS {
        multiply_steps<Steps, first>(tiles, left + done * kTile, right + done * kTile, steps, columns, sums, column, stride,
                                     ahead);
        done += Steps;
    };
    steps > 1 ? some.template operator()<2, fresh>() : some.template operator()<1, fresh>();
    while (steps - done > 1) some.template operator()<2, false>();
    if (steps > done) some.template operator()<1, false>();
}

// Some numbers of sixteen positions.
struct Column {
    const Bf16* numbers;
    std::size_t stride;  // from one number to the next of keys, from one position to the next of values
};

// Where they lie in the cache, which has to have all sixteen in a block, and whole steps of numbers.
CHAIRLIFT_INLINE Column stored_keys(const AttentionShape& shape, const AttentionUnit& unit, int position) {
    const std::uint8_t* const block = unit.keys + block_at(shape, unit, position);
    const int slot = position % shape.head.block_size;
    return {reinterpret_cast<const Bf16*>(block + shape.head.key_at(0, slot)), std::size_t(shape.head.block_size)};
}

CHAIRLIFT_INLINE Column stored_values(const AttentionShape& shape, const AttentionUnit& unit, int position) {
    const std::uint8_t* const block = unit.values + block_at(shape, unit, position);
    const int slot = position % shape.head.block_size;
    return {reinterpret_cast<const Bf16*>(block + shape.head.value_at(slot)), std::size_t(shape.head.head_dim)};
}

// Lets copy(i, count, block, slot) fill the staged column with those of its positions that are of the tile, i from its
// first one on. The others are zeros, and so are numbers that there are not.
template <class Copy>
CHAIRLIFT_INLINE void stage(const AttentionShape& shape, const AttentionUnit& unit, const TileWork& work, int column,
                            Copy&& copy) {
    const Packed& tile = work.packed;
    const int base = column * kLanes, begin = base > tile.begin ? base : tile.begin;
    const int end = base + kLanes < tile.end ? base + kLanes : tile.end;
    for (int i = 0; i < kLanes * work.steps * kStep; ++i) work.staged[i] = {0};
    for_pieces(shape, unit, tile.start, begin, end, [&](int i, int count, std::size_t block, int slot) CHAIRLIFT_ALWAYS {
        copy(i - base, count, block, slot);
    });
}

CHAIRLIFT_INLINE Column staged_keys(const AttentionShape& shape, const AttentionUnit& unit, const TileWork& work,
                                    int column) {
    const auto copy = [&](int i, int count, std::size_t block, int slot) CHAIRLIFT_ALWAYS {
        const Bf16* key = reinterpret_cast<const Bf16*>(unit.keys + block + shape.head.key_at(0, slot));
        for (int number = 0; number < shape.head.head_dim; ++number, key += shape.head.block_size)
            for (int n = 0; n < count; ++n) work.staged[number * kLanes + i + n] = key[n];
    };
    stage(shape, unit, work, column, copy);
    return {work.staged, kLanes};
}

CHAIRLIFT_INLINE Column staged_values(const AttentionShape& shape, const AttentionUnit& unit, const TileWork& work,
                                      int column) {
    const int numbers = work.steps * kStep;
    const auto copy = [&](int i, int count, std::size_t block, int slot) CHAIRLIFT_ALWAYS {
        const Bf16* value = reinterpret_cast<const Bf16*>(unit.values + block + shape.head.value_at(slot));
        for (int n = 0; n < count; ++n, value += shape.head.head_dim)
            for (int number = 0; number < shape.head.head_dim; ++number)
                work.staged[(i + n) * numbers + number] = value[number];
    };
    stage(shape, unit, work, column, copy);
    return {work.staged, std::size_t(numbers)};
}

CHAIRLIFT_INLINE bool whole(const AttentionShape& shape) {
    return shape.head.block_size % kLanes == 0 && shape.head.head_dim % kStep == 0;
}

// What is out of view may be anything: its scores are not used.
CHAIRLIFT_INLINE void pack_keys(const AttentionShape& shape, const AttentionUnit& unit, const TileWork& work) {
    const Packed& tile = work.packed;
    for (int column = tile.begin / kLanes; column * kLanes < tile.end; ++column) {
        const Column keys = whole(shape) ? stored_keys(shape, unit, tile.start + column * kLanes)
                                         : staged_keys(shape, unit, work, column);
        std::uint32_t* out = tile.keys + std::size_t(column) * work.steps * kTile;
        const Bf16* from = keys.numbers;
        for (int pair = 0; pair < work.steps * kStep / 2; ++pair, from += 2 * keys.stride, out += kLanes)
            store(out, pair_up(from, from + keys.stride));
    }
}

// Values that no row sees are zeros: times a weight of zero, NaN would be NaN.
CHAIRLIFT_INLINE void pack_values(const AttentionShape& shape, const AttentionUnit& unit, TileWork& work) {
    Packed& tile = work.packed;
    static constexpr Bf16 zeros[kLanes] = {};
    bool finite = true;
    for (int position = 0; position < kStep; position += kLanes) {
        Column values = {zeros, 0};
        if (position < tile.end && position + kLanes > tile.begin)
            values = whole(shape) ? stored_values(shape, unit, tile.start + position)
                                  : staged_values(shape, unit, work, position / kLanes);
        for (int i = position; i < position + kLanes; i += 2, values.numbers += 2 * values.stride) {
            const bool here = i >= tile.begin && i < tile.end, next = i + 1 >= tile.begin && i + 1 < tile.end;
            std::uint32_t* out = tile.values + i / 2 * kLanes;
            for (int number = 0; number < kLanes * work.columns; number += kLanes, out += kTile) {
                const Bf16* const from = values.numbers + (here || next ? number : 0);
                const bf16x32 pairs = pair_up(here ? from : zeros, next ? from + values.stride : zeros);
                finite &= all_finite(pairs);
                store(out, pairs);
            }
        }
    }
    tile.finite = finite;
}

CHAIRLIFT_INLINE void score_sixteen(const TileRegisters& tiles, const TileWork& work, int first, Ahead& ahead) {
    const std::uint32_t* const queries = work.queries + std::size_t(first / 16) * kHalves * work.steps * kTile;
    multiply<true>(tiles, queries, work.packed.keys, work.steps, kStep / kLanes, work.scores, kLanes,
                   kStep * sizeof(float), ahead);
}

// Turns scores into weights, as halves, and rescales what was summed up before them.
CHAIRLIFT_INLINE void weigh_sixteen(const AttentionShape& shape, const AttentionUnit& unit, const TileWork& work,
                                    int first, Ahead& ahead) {
    const int left = unit.rows * shape.group - first, count = left < 16 ? left : 16;
    const View one = view_of(shape, unit, work.packed.start, first / shape.group);  // views only move on from row to row
    const View last = view_of(shape, unit, work.packed.start, (first + count - 1) / shape.group);
    const bool all_see_all = last.begin <= 0 && one.end >= kStep;
    float* const lanes = work.lanes;
    for (int r = 0; r < count; ++r) {
        float* const scores = work.scores + r * kStep;
        if (shape.softcap > 0.0f) {
            const f32x16 cap = broadcast16(shape.softcap);
            for (int i = 0; i < kStep; i += kLanes) store(scores + i, cap * tanh(load16(scores + i) / cap));
        }
        if (!all_see_all) {
            const View view = view_of(shape, unit, work.packed.start, (first + r) / shape.group);
            for (int i = 0; i < kStep; ++i)
                if (i < view.begin || i >= view.end) scores[i] = -kInfinity;
        }
        store(lanes + r * kLanes, max(load16(scores), load16(scores + kLanes)));
    }
    // A query that has not seen anything yet has the least finite number, from which -infinity is still infinitely far.
    float* const running = work.greatest + first;
    const f32x16 before = load16(running);
    const f32x16 greatest = max(across(lanes, [](f32x16 a, f32x16 b) CHAIRLIFT_ALWAYS { return max(a, b); }), before);
    store(running, greatest);
    for (int r = 0; r < count; ++r) {
        const float* const scores = work.scores + r * kStep;
        const f32x16 most = broadcast16(running[r]);
        const f32x16 a = exp(load16(scores) - most), b = exp(load16(scores + kLanes) - most);
        bf16x32 high, low;
        split(a, b, &high, &low);
        store(work.weights + r * kLanes, high);
        store(work.weights + r * kLanes + kTile, low);
        store(lanes + r * kLanes, a + b);
        ahead.ask(kLinesAProduct);
    }
    const f32x16 masses = across(lanes, [](f32x16 a, f32x16 b) CHAIRLIFT_ALWAYS { return a + b; });
    const f32x16 rescale = exp(before - greatest);  // e^0 is 1 to the last bit
    float* const mass = work.mass + first;
    store(mass, fma(load16(mass), rescale, masses));
    if (!any_differs(before, greatest)) return;
    store(lanes, rescale);
    float* const sums = work.sums + std::size_t(first / 16) * work.columns * kTile;
    for (int column = 0; column < work.columns; ++column)
        for (int r = 0; r < count; ++r) {
            float* const at = sums + column * kTile + r * kLanes;
            store(at, load16(at) * broadcast16(lanes[r]));
        }
}

CHAIRLIFT_INLINE void add_sixteen(const TileRegisters& tiles, const TileWork& work, int first, Ahead& ahead) {
    float* const sums = work.sums + std::size_t(first / 16) * work.columns * kTile;
    multiply<false>(tiles, work.weights, work.packed.values, 1, work.columns, sums, kTile, kLanes * sizeof(float), ahead);
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
    for (int i = 0; i < kTile; i += kLanes) store(work.lanes + i, zero16());  // of queries that there are not: any numbers
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

// False, and nothing is written to unit.out, if a value that not all rows see is not finite: times a weight of zero it would be NaN.
CHAIRLIFT_INLINE bool attend_together(const AttentionShape& shape, const AttentionUnit& unit, TileWork& work) {
    const int queries = unit.rows * shape.group, last_row = unit.rows - 1;
    const TileRows tiles(queries < 16 ? queries : 16);
    const int last = unit.first_position + last_row;
    const int from = first_in_view(unit.first_position, unit.window);  // the later rows begin there or after it
    begin_sixteens(shape, unit, work);
    Packed& tile = work.packed;
    Ahead ahead;
    for (int start = from / kStep * kStep; start <= last; start += kStep) {
        tile.start = start;
        tile.begin = from > start ? from - start : 0;
        tile.end = last + 1 - start < kStep ? last + 1 - start : kStep;
        pack_keys(shape, unit, work);
        pack_values(shape, unit, work);
        const View first_view = view_of(shape, unit, start, 0), last_view = view_of(shape, unit, start, last_row);
        const bool same_view = first_view.begin == last_view.begin && first_view.end == last_view.end;
        if (!tile.finite && !same_view) return false;
        ahead.set(shape, unit, start + kTilesAhead * kStep, last);
        for (int first = 0; first < queries; first += 16) {
            score_sixteen(tiles, work, first, ahead);
            weigh_sixteen(shape, unit, work, first, ahead);
            add_sixteen(tiles, work, first, ahead);
        }
    }
    end_sixteens(shape, unit, work);
    return true;
}

void attend_bf16(const AttentionShape& shape, const AttentionUnit& unit, float* scratch) {
    TileWork work = divide_for_tiles(shape, scratch);
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
