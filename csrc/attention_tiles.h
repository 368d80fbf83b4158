// Attention by tiles of bf16, for keys and values stored as such, or as bytes, of which bf16 holds every one: their scales
// are applied to the scores and to the weights.
//
// Queries and weights are split into the nearest bf16 and what is left, as another: 16 bits and more of them count,
// twice what the cache keeps of keys and values, which need no splitting. A product is that of their high halves and that
// of their low ones.
//
// Work is by tiles of positions as everywhere (attention.h), and within one by sixteens of queries, of one KV head. Each
// of the sums is made in one order, and what is out of view adds zeros to it, so a query's bits do not depend on the
// others. While the weights of one sixteen are computed, by vectors, the products of its neighbours are under way.
#pragma once

#include "attention_parts.h"

namespace chairlift::CHAIRLIFT_ISA {
namespace {

constexpr int kStep = 32;                         // numbers, or positions, that a tile product sums up, by pairs
constexpr int kPositions = kMaxTile;              // of a tile
constexpr int kSteps = kPositions / kStep;        // of positions
constexpr int kColumns = kPositions / kLanes;     // of keys, of sixteen positions
constexpr int kTile = 16 * kLanes;                // pairs, or sums, of a tile register
constexpr int kHalves = 2;
constexpr int kLinesAtOnce = 8;                   // that the memory is asked for, between products

constexpr float kLog2E = 1.44269504f;  // scores are taken times this, so that weights are powers of 2

constexpr int steps_of(int count) { return (count + kStep - 1) / kStep; }

// Registers: the sums of a column and of the one before it, two steps on the right, and the halves of two on the left.
constexpr int kSums = 0, kRight = 2, kLeft = 4;

struct TileRows : TileRegisters {
    // Only so many rows on the left, and of sums: of queries, at most 16.
    explicit TileRows(std::uint8_t rows)
        : TileRegisters({{rows, 64}, {rows, 64}, {16, 64}, {16, 64}, {rows, 64}, {rows, 64}, {rows, 64}, {rows, 64}}) {}
};

// What will soon be used of the cache, asked for a little at a time while there is other work: all at once, the work
// behind it would wait, since few lines can be under way.
class Ahead {
public:
    CHAIRLIFT_INLINE void set(const AttentionShape& shape, const AttentionUnit& unit, int start) {
        count_ = next_ = 0;
        for_stored(shape, unit, start, [&](const std::uint8_t* begin, std::size_t bytes) CHAIRLIFT_ALWAYS {
            if (count_ < kMost) pieces_[count_++] = {begin, static_cast<int>((bytes + 63) / 64)};
        });
    }

    // For the next few lines.
    template <int lines = kLinesAtOnce>
    CHAIRLIFT_INLINE void ask() {
        if (next_ >= count_) return;
        Piece& piece = pieces_[next_];
        for (int i = 0; i < lines; ++i) prefetch_l2(piece.begin + 64 * i);  // a few beyond its end do no harm
        piece.begin += 64 * lines;
        piece.lines -= lines;
        next_ += piece.lines <= 0;
    }

private:
    static constexpr int kMost = 256;  // what is more, of blocks longer than a tile, must be waited for

    struct Piece {
        const std::uint8_t* begin;
        int lines;
    };

    Piece pieces_[kMost];
    int count_ = 0, next_ = 0;
};

// Sixteen columns on the right of a product, of pairs: a row of them every so many bytes. Sixteen rows are a step.
struct Right {
    const void* rows;
    std::size_t stride;
};

// sums[column] (+)= left * right[column] for columns first..last, over all steps: a column of the next step or two at a
// time, so that it can be done along with other work. The left side stays in its registers: with another thread on the
// same core, a load waits until the products before it are done, so there should be few. Sums are stored once the
// products behind them are under way.
class Product {
public:
    const std::uint32_t* left;  // [half][step]
    std::size_t halves_apart;
    const Right* right;
    int steps, first, last;
    float* sums;
    std::size_t column_floats, row_bytes;  // from one column's sums to the next one's, and from one row to the next
    bool fresh;                            // sums begin at zero

    CHAIRLIFT_INLINE bool over() const { return done_ >= steps; }

    CHAIRLIFT_INLINE void advance(const TileRegisters& tiles, Ahead& ahead) {
        const bool two = steps - done_ > 1;
        if (column_ == 0) load_left(tiles, two);
        const Right from = right[first + column_];
        const char* rows = static_cast<const char*>(from.rows) + done_ * 16 * from.stride;
        float* const out = sums + (first + column_) * column_floats;
        turn_ ? multiply<1>(tiles, rows, from.stride, out, two, ahead)
              : multiply<0>(tiles, rows, from.stride, out, two, ahead);
        turn_ = !turn_;
        if (++column_ < last - first) return;
        store_pending(tiles);  // the next steps begin with what it holds
        column_ = 0;
        done_ += two ? 2 : 1;
    }

private:
    CHAIRLIFT_INLINE void load_left(const TileRegisters& tiles, bool two) const {
        const std::uint32_t* const from = left + done_ * kTile;
        tiles.load<kLeft>(from, 64);
        tiles.load<kLeft + 1>(from + halves_apart, 64);
        if (!two) return;
        tiles.load<kLeft + 2>(from + kTile, 64);
        tiles.load<kLeft + 3>(from + halves_apart + kTile, 64);
    }

    template <int turn>
    CHAIRLIFT_INLINE void multiply(const TileRegisters& tiles, const char* rows, std::size_t stride, float* out, bool two,
                                   Ahead& ahead) {
        if (fresh && done_ == 0) {
            tiles.clear<kSums + turn>();
        } else {
            tiles.load<kSums + turn>(out, row_bytes);
        }
        tiles.load<kRight>(rows, stride);
        ahead.ask();
        tiles.multiply_halves<kSums + turn, kLeft, kRight>();
        tiles.multiply_halves<kSums + turn, kLeft + 1, kRight>();
        ahead.ask();
        if (two) {
            tiles.load<kRight + 1>(rows + 16 * stride, stride);
            tiles.multiply_halves<kSums + turn, kLeft + 2, kRight + 1>();
            tiles.multiply_halves<kSums + turn, kLeft + 3, kRight + 1>();
        }
        ahead.ask();
        if (pending_) tiles.store<kSums + 1 - turn>(pending_, row_bytes);
        pending_ = out;
    }

    CHAIRLIFT_INLINE void store_pending(const TileRegisters& tiles) {
        turn_ ? tiles.store<kSums>(pending_, row_bytes) : tiles.store<kSums + 1>(pending_, row_bytes);
        pending_ = nullptr;
    }

    float* pending_ = nullptr;
    int done_ = 0, column_ = 0;  // steps; columns of the next ones
    bool turn_ = false;
};

// Products to be done one after the other, along with other work. All along, some of what is ahead is asked for.
class Products {
public:
    Products(const TileRegisters& tiles, Ahead& ahead) : tiles_(tiles), ahead_(ahead) {}

    Product& add() {
        queue_[count_] = Product{};
        return queue_[count_++];
    }

    // `columns` of them, if there are so many left.
    CHAIRLIFT_INLINE void advance(int columns) {
        ahead_.ask();
        for (; columns > 0 && at_ < count_; --columns) {
            queue_[at_].advance(tiles_, ahead_);
            at_ += queue_[at_].over();
        }
    }

    void finish() {
        while (at_ < count_) advance(1);
        at_ = count_ = 0;
    }

private:
    const TileRegisters& tiles_;
    Ahead& ahead_;
    Product queue_[2];
    int at_ = 0, count_ = 0;
};

// A tile of positions, of which begin..end are seen by some row.
struct PositionTile {
    int start, begin, end;
    int steps;            // up to `end`
    bool same_view;       // all rows see the same of it
    Right keys[kColumns];  // of the head at hand, in the cache or staged
};

// The parts of the scratch memory. A tile of pairs has a row for each of sixteen queries or pairs of numbers or
// positions. A slot is sixteen queries of one head.
struct TileWork {
    PositionTile tile;       // the one at hand
    std::uint32_t* queries;  // [slot][half][step], scaled, also by kLog2E where there is no softcap
    float* sums;             // [slot][column of numbers][16][16]
    float* greatest;         // [slot][16]
    float* mass;             // [slot][16] sum of weights
    float* scores[2];           // [16][positions], of the sixteen at hand and the next one
    std::uint32_t* weights[2];  // [half][step of positions], of the one at hand and the one before it
    float* lanes;            // [16][16] each query's greatest scores, or sums of weights, of some positions each
    std::uint32_t* values;   // [column of numbers][step of positions], of the head at hand
    Right* columns_of_values;
    std::uint32_t* staged_keys;    // [column of positions][step of numbers], of the head at hand, where the cache has no
    std::uint32_t* staged_values;  // [pair of positions][number]              whole vectors of them, or bytes
    Scales scales;           // of the head at hand, if it is used
    int steps, columns;      // of numbers
    int slots;               // of a head
    std::size_t floats;      // of all of it
};

// `scratch` may be null, to know the size.
CHAIRLIFT_INLINE TileWork divide_for_tiles(const AttentionShape& shape, float* scratch) {
    TileWork work;
    work.steps = steps_of(shape.head.head_dim);
    work.columns = 2 * work.steps;
    const std::size_t numbers = work.steps * kStep;
    const std::size_t of_rows = (std::size_t{kRowTile} * shape.group + 15) / 16;
    const std::size_t of_heads = std::size_t(shape.kv_heads) * ((shape.group + 15) / 16);
    const std::size_t queries = 16 * (of_rows > of_heads ? of_rows : of_heads);
    work.floats = 0;
    work.scales.used = shape.head.kv == KvType::int8;
    const auto take = [&](std::size_t floats) CHAIRLIFT_ALWAYS {
        const std::size_t at = work.floats;
        work.floats += floats;
        return scratch ? scratch + at : nullptr;
    };
    const auto take_halves = [&](std::size_t count) CHAIRLIFT_ALWAYS {
        return reinterpret_cast<std::uint32_t*>(take(count / 2));
    };
    work.queries = take_halves(kHalves * queries * numbers);
    work.sums = take(queries * numbers);
    work.greatest = take(queries);
    work.mass = take(queries);
    for (int i = 0; i < 2; ++i) {
        work.scores[i] = take(16 * kPositions);
        work.weights[i] = take_halves(kHalves * 16 * kPositions);
    }
    work.lanes = take(kTile);
    work.values = take_halves(numbers * kPositions);
    work.staged_keys = take_halves(numbers * kPositions);
    work.staged_values = take_halves(numbers * kPositions);
    work.columns_of_values = reinterpret_cast<Right*>(take(work.columns * sizeof(Right) / sizeof(float)));
    return work;
}

std::size_t scratch_of_tiles(const AttentionShape& shape) { return divide_for_tiles(shape, nullptr).floats; }

// Whether vectors can be loaded from the cache as it is: all of sixteen positions in a block, and whole steps of numbers.
CHAIRLIFT_INLINE bool whole(const KvHead& head) { return head.block_size % kLanes == 0 && head.head_dim % kStep == 0; }

CHAIRLIFT_INLINE bool by_tiles(const KvHead& head) {
    return head.kv == KvType::bf16 || (head.kv == KvType::int8 && head.head_dim % kStep == 0);
}

// The pairs of a block's keys and of its values.
CHAIRLIFT_INLINE const std::uint32_t* key_pairs(const AttentionShape& shape, const std::uint8_t* block, int slot) {
    return reinterpret_cast<const std::uint32_t*>(block + shape.head.key_at(0, slot));
}
CHAIRLIFT_INLINE const std::uint32_t* value_pairs(const AttentionShape& shape, const std::uint8_t* block, int slot) {
    return reinterpret_cast<const std::uint32_t*>(block + shape.head.values() + shape.head.value_at(slot - slot % 2));
}

// Where sixteen positions of the tile, from `first` on, lie in the cache: all in one block, which some row sees.
struct Sixteen {
    const std::uint8_t* block;
    int slot;
};
CHAIRLIFT_INLINE Sixteen sixteen_at(const AttentionShape& shape, const AttentionUnit& unit, const PositionTile& tile,
                                    int first) {
    const int position = tile.start + first;
    return {unit.keys + block_at(shape, unit, position), position % shape.head.block_size};
}

// body(n, count, block, slot) for the pieces of these sixteen that some row sees: from the n-th on, all in one block.
template <class Body>
CHAIRLIFT_INLINE void for_seen(const AttentionShape& shape, const AttentionUnit& unit, const PositionTile& tile, int first,
                               Body&& body) {
    const int begin = first > tile.begin ? first : tile.begin, end = first + kLanes < tile.end ? first + kLanes : tile.end;
    for_pieces(shape, unit, tile.start, begin, end, [&](int i, int count, std::size_t block, int slot) {
        body(i - first, count, unit.keys + block, slot);
    });
}

// Bytes of keys as pairs of bf16.
CHAIRLIFT_INLINE void widen_keys(const AttentionShape& shape, const AttentionUnit& unit, TileWork& work) {
    PositionTile& tile = work.tile;
    const KvHead& head = shape.head;
    auto* const staged = reinterpret_cast<std::int8_t*>(work.staged_values);  // [number][16]
    std::uint32_t* out = work.staged_keys;
    for (int first = tile.begin / kLanes * kLanes; first < tile.end; first += kLanes) {
        const std::int8_t* number = staged;
        std::size_t apart = kLanes;
        if (whole(head)) {
            const auto [block, slot] = sixteen_at(shape, unit, tile, first);
            number = reinterpret_cast<const std::int8_t*>(block + head.key_at(0, slot));
            apart = head.block_size;
        } else {
            for_seen(shape, unit, tile, first, [&](int n, int count, const std::uint8_t* block, int slot) {
                for (int i = 0; i < head.head_dim; ++i)
                    std::memcpy(staged + i * kLanes + n, block + head.key_at(i, slot), count);
            });
        }
        tile.keys[first / kLanes] = {out, 64};
        for (int i = 0; i < head.head_dim; i += 2, number += 2 * apart, out += kLanes)
            store(out, load_pairs(number, number + apart));
    }
}

// What is out of view may be anything: its scores are not used.
CHAIRLIFT_INLINE void find_keys(const AttentionShape& shape, const AttentionUnit& unit, TileWork& work) {
    PositionTile& tile = work.tile;
    const int block_size = shape.head.block_size;
    if (work.scales.used) return widen_keys(shape, unit, work);
    if (whole(shape.head)) {
        for (int column = tile.begin / kLanes; column * kLanes < tile.end; ++column) {
            const auto [block, slot] = sixteen_at(shape, unit, tile, column * kLanes);
            tile.keys[column] = {key_pairs(shape, block, slot), block_size * sizeof(std::uint32_t)};
        }
        return;
    }
    const std::size_t column_pairs = std::size_t(work.steps) * kTile;
    for (int column = 0; column < kColumns; ++column)
        tile.keys[column] = {work.staged_keys + column * column_pairs, 64};
    for (std::size_t i = 0; i < kColumns * column_pairs; ++i) work.staged_keys[i] = 0;
    for_pieces(shape, unit, tile.start, tile.begin, tile.end, [&](int i, int count, std::size_t block, int slot) {
        for (int n = i; n < i + count; ++n) {
            const std::uint32_t* key = key_pairs(shape, unit.keys + block, slot + n - i);
            std::uint32_t* out = work.staged_keys + n / kLanes * column_pairs + n % kLanes;
            for (int pair = 0; pair < shape.head.head_dim / 2; ++pair) out[pair * kLanes] = key[pair * block_size];
        }
    });
}

// The pairs of positions of the tile, from one pair to the next; zeros where no row sees them: times a weight of
// zero, NaN would be NaN.
CHAIRLIFT_INLINE void stage_values(const AttentionShape& shape, const AttentionUnit& unit, const TileWork& work) {
    const PositionTile& tile = work.tile;
    const int numbers = work.steps * kStep;
    for (int i = 0; i < kPositions / 2 * numbers; ++i) work.staged_values[i] = 0;
    for_pieces(shape, unit, tile.start, tile.begin, tile.end, [&](int i, int count, std::size_t block, int slot) {
        for (int n = i; n < i + count; ++n, ++slot) {
            const std::uint32_t* value = value_pairs(shape, unit.keys + block, slot);
            std::uint32_t* out = work.staged_values + std::size_t(n / 2) * numbers;
            for (int number = 0; number < shape.head.head_dim; ++number)
                out[number] |= (value[number] >> (slot % 2 * 16) & 0xffff) << (n % 2 * 16);
        }
    });
}

// Bytes of values as pairs of bf16.
CHAIRLIFT_INLINE void widen_values(const AttentionShape& shape, const AttentionUnit& unit, const TileWork& work,
                                   Ahead& ahead) {
    const PositionTile& tile = work.tile;
    const KvHead& head = shape.head;
    auto* const staged = reinterpret_cast<std::int8_t*>(work.staged_values);  // [position][number]
    for (int first = 0; first < tile.steps * kStep; first += kLanes) {
        const bool seen = first < tile.end && first + kLanes > tile.begin;
        const std::int8_t* value = staged;
        if (seen && whole(head)) {
            const auto [block, slot] = sixteen_at(shape, unit, tile, first);
            value = reinterpret_cast<const std::int8_t*>(block + head.values() + head.value_at(slot));
        } else if (seen) {
            for_seen(shape, unit, tile, first, [&](int n, int count, const std::uint8_t* block, int slot) {
                std::memcpy(staged + n * head.head_dim, block + head.values() + head.value_at(slot), count * head.head_dim);
            });
        }
        std::uint32_t* out = work.values + first / 2 * kLanes;
        for (int i = 0; i < kLanes; i += 2, value += 2 * head.head_dim, out += kLanes) {
            ahead.ask<1>();
            for (int number = 0; number < head.head_dim; number += kLanes)
                store(out + number / kLanes * kSteps * kTile,
                      seen ? load_pairs(value + number, value + head.head_dim + number) : no_pairs());
        }
    }
}

// False if some of them are not finite, where that matters: not all rows see the same of the tile. Bytes are finite.
CHAIRLIFT_INLINE bool pack_values(const AttentionShape& shape, const AttentionUnit& unit, const TileWork& work,
                                  Ahead& ahead) {
    if (work.scales.used) {
        widen_values(shape, unit, work, ahead);
        return true;
    }
    const PositionTile& tile = work.tile;
    const bool in_cache = whole(shape.head);
    if (!in_cache) stage_values(shape, unit, work);
    bool finite = true;
    for (int sixteen = 0; sixteen < tile.steps * kStep; sixteen += kLanes) {
        const bool seen = sixteen < tile.end && sixteen + kLanes > tile.begin;
        const std::uint32_t* pairs = work.staged_values + std::size_t(sixteen / 2) * work.steps * kStep;
        if (in_cache && seen) {
            const auto [block, slot] = sixteen_at(shape, unit, tile, sixteen);
            pairs = value_pairs(shape, block, slot);
        }
        const bool all = sixteen >= tile.begin && sixteen + kLanes <= tile.end;
        std::uint32_t* out = work.values + sixteen / 2 * kLanes;
        for (int i = sixteen; i < sixteen + kLanes; i += 2, out += kLanes) {
            ahead.ask<1>();  // few: this loop is short, and with more the memory would have nothing to do in others
            const bool first = i >= tile.begin && i < tile.end, second = i + 1 >= tile.begin && i + 1 < tile.end;
            for (int column = 0; column < work.columns; ++column, pairs += kLanes) {
                std::uint32_t* const to = out + std::size_t(column) * kSteps * kTile;
                const bf16x32 kept = all ? load_pairs(pairs) : first || second ? keep(load_pairs(pairs), first, second)
                                                                               : no_pairs();
                if (!tile.same_view) finite &= all_finite(kept);
                store(to, kept);
            }
        }
    }
    return finite;
}

// Of bytes. False if one of the values' is not finite, where that matters, as for pack_values().
CHAIRLIFT_INLINE bool load_scales(const AttentionShape& shape, const AttentionUnit& unit, TileWork& work) {
    if (!work.scales.used) return true;
    const PositionTile& tile = work.tile;
    work.scales = {true, {}, {}};  // 0 where no row sees them
    find_scales(shape, unit, tile.start, tile.begin, tile.end, work.scales);
    f32x16 sum = zero16();
    for (int i = 0; i < kPositions; i += kLanes) sum = sum + load16(work.scales.values + i) * zero16();
    return tile.same_view || !any_differs(sum, zero16());
}

// Scores of a slot and the tile's keys.
CHAIRLIFT_INLINE void begin_scores(const TileWork& work, int slot, Product& product) {
    const PositionTile& tile = work.tile;
    product.halves_apart = std::size_t(work.steps) * kTile;
    product.left = work.queries + slot * kHalves * product.halves_apart;
    product.right = tile.keys;
    product.steps = work.steps;
    product.first = tile.begin / kLanes;
    product.last = (tile.end + kLanes - 1) / kLanes;
    product.sums = work.scores[slot % 2];
    product.column_floats = kLanes;
    product.row_bytes = kPositions * sizeof(float);
    product.fresh = true;
}

// A slot's sums of weighted values, of the tile.
CHAIRLIFT_INLINE void begin_sums(const TileWork& work, int slot, Product& product) {
    product.halves_apart = kSteps * kTile;
    product.left = work.weights[slot % 2];
    product.right = work.columns_of_values;
    product.steps = work.tile.steps;
    product.first = 0;
    product.last = work.columns;
    product.sums = work.sums + std::size_t(slot) * work.columns * kTile;
    product.column_floats = kTile;
    product.row_bytes = kLanes * sizeof(float);
    product.fresh = false;
}

// Turns the scores of queries first.. of a slot into weights, as halves, and rescales what was summed up before them.
// Meanwhile `others` are done.
CHAIRLIFT_INLINE void weigh_sixteen(const AttentionShape& shape, const AttentionUnit& unit, const TileWork& work, int slot,
                                    int first, int count, Products& others) {
    float* const scores = work.scores[slot % 2];
    std::uint32_t* const weights = work.weights[slot % 2];
    const PositionTile& tile = work.tile;
    const View one = view_of(shape, unit, tile.start, first / shape.group);  // views only move on from row to row
    const View last = view_of(shape, unit, tile.start, (first + count - 1) / shape.group);
    const bool all_see_all = last.begin <= 0 && one.end >= kPositions;
    const int seen = tile.steps * kStep;
    float* const lanes = work.lanes;
    for (int r = 0; r < count; ++r) {
        float* const of_query = scores + r * kPositions;
        if (work.scales.used)
            for (int i = 0; i < seen; i += kLanes) store(of_query + i, load16(of_query + i) * load16(work.scales.keys + i));
        if (shape.softcap > 0.0f) {
            const f32x16 cap = broadcast16(shape.softcap), factor = cap * broadcast16(kLog2E);
            for (int i = 0; i < seen; i += kLanes) store(of_query + i, factor * tanh(load16(of_query + i) / cap));
        }
        if (!all_see_all) {
            const View view = view_of(shape, unit, tile.start, (first + r) / shape.group);
            for (int i = 0; i < view.begin && i < seen; ++i) of_query[i] = -kInfinity;
            for (int i = view.end > 0 ? view.end : 0; i < seen; ++i) of_query[i] = -kInfinity;
        }
        f32x16 greatest = max(load16(of_query), load16(of_query + kLanes));
        if (tile.steps == 2) greatest = max(greatest, max(load16(of_query + kStep), load16(of_query + kStep + kLanes)));
        store(lanes + r * kLanes, greatest);
    }
    // A query that has not seen anything yet has the least finite number, from which -infinity is still infinitely far.
    float* const running = work.greatest + slot * 16;
    const f32x16 before = load16(running);
    const f32x16 greatest = max(across(lanes, [](f32x16 a, f32x16 b) CHAIRLIFT_ALWAYS { return max(a, b); }), before);
    store(running, greatest);
    for (int r = 0; r < count; ++r) {
        const float* const of_query = scores + r * kPositions;
        const f32x16 most = broadcast16(running[r]);
        f32x16 sum = zero16();
        for (int step = 0; step < tile.steps; ++step) {
            const f32x16 a = power_of_2(load16(of_query + step * kStep) - most);
            const f32x16 b = power_of_2(load16(of_query + step * kStep + kLanes) - most);
            bf16x32 high, low;
            if (work.scales.used) {
                const float* const scales = work.scales.values + step * kStep;
                split(a * load16(scales), b * load16(scales + kLanes), &high, &low);
            } else {
                split(a, b, &high, &low);
            }
            store(weights + step * kTile + r * kLanes, high);
            store(weights + (kSteps + step) * kTile + r * kLanes, low);
            sum = step == 0 ? a + b : sum + (a + b);
        }
        store(lanes + r * kLanes, sum);
        others.advance(count > 8 ? 1 : 3);
    }
    const f32x16 masses = across(lanes, [](f32x16 a, f32x16 b) CHAIRLIFT_ALWAYS { return a + b; });
    const f32x16 rescale = power_of_2(before - greatest);
    float* const mass = work.mass + slot * 16;
    store(mass, fma(load16(mass), rescale, masses));
    if (!any_differs(before, greatest)) return;
    store(lanes, rescale);
    float* const sums = work.sums + std::size_t(slot) * work.columns * kTile;
    for (int column = 0; column < work.columns; ++column)
        for (int r = 0; r < count; ++r) {
            float* const at = sums + column * kTile + r * kLanes;
            store(at, load16(at) * broadcast16(lanes[r]));
        }
}

// Query `index` of a head, which is one of a row's group.
CHAIRLIFT_INLINE std::size_t query_at(const AttentionShape& shape, std::size_t row_stride, int head, int index) {
    const std::size_t in_row = std::size_t(head) * shape.group + index % shape.group;
    return index / shape.group * row_stride + in_row * shape.head.head_dim;
}

CHAIRLIFT_INLINE void begin_sixteens(const AttentionShape& shape, const AttentionUnit& unit, const TileWork& work) {
    const int head_dim = shape.head.head_dim, queries = unit.rows * shape.group;
    const int sixteens = unit.kv_heads * work.slots;
    const std::size_t apart = std::size_t(work.steps) * kTile;
    const f32x16 scale = broadcast16(shape.softcap > 0.0f ? shape.scale : shape.scale * kLog2E);
    for (int head = 0; head < unit.kv_heads; ++head)
        for (int query = 0; query < queries; ++query) {
            const float* q = unit.q + query_at(shape, shape.q_stride, head, query);
            const int slot = head * work.slots + query / 16;
            std::uint32_t* out = work.queries + slot * kHalves * apart + query % 16 * kLanes;
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
                store(out + apart, low);
            }
        }
    for (int i = 0; i < sixteens * 16; i += kLanes) {
        store(work.greatest + i, broadcast16(-__FLT_MAX__));
        store(work.mass + i, zero16());
    }
    for (int i = 0; i < sixteens * work.columns; ++i)
        for (int r = 0; r < 16 && r < queries; ++r) store(work.sums + i * kTile + r * kLanes, zero16());
    for (int i = 0; i < kTile; i += kLanes) store(work.lanes + i, zero16());  // of queries that there are not: any numbers
}

CHAIRLIFT_INLINE void end_sixteens(const AttentionShape& shape, const AttentionUnit& unit, const TileWork& work) {
    const int head_dim = shape.head.head_dim;
    for (int head = 0; head < unit.kv_heads; ++head)
        for (int query = 0; query < unit.rows * shape.group; ++query) {
            float* out = unit.out + query_at(shape, shape.out_stride, head, query);
            const std::size_t slot = head * work.slots + query / 16;
            const float* sums = work.sums + slot * work.columns * kTile + query % 16 * kLanes;
            const float mass = work.mass[slot * 16 + query % 16];
            int left = head_dim;
            for (; left >= kLanes; left -= kLanes, out += kLanes, sums += kTile)
                store(out, load16(sums) / broadcast16(mass));
            for (int i = 0; i < left; ++i) out[i] = sums[i] / mass;
        }
}

// The tile at hand, for all heads. False if a value that not all rows see is not finite: times a weight of zero it would
// be NaN.
CHAIRLIFT_INLINE bool add_tile(const TileRegisters& tiles, const AttentionShape& shape, const AttentionUnit& unit,
                               TileWork& work, Ahead& ahead) {
    const int queries = unit.rows * shape.group, slots = unit.kv_heads * work.slots;
    Products products(tiles, ahead);
    const auto head_of = [&](int slot) CHAIRLIFT_ALWAYS { return unit_of_head(shape, unit, slot / work.slots); };
    const auto begins_head = [&](int slot) CHAIRLIFT_ALWAYS { return slot % work.slots == 0; };
    for (int slot = -1; slot <= slots; ++slot) {
        if (slot > 0) {
            if (begins_head(slot - 1) && !pack_values(shape, head_of(slot - 1), work, ahead)) return false;
            begin_sums(work, slot - 1, products.add());
        }
        if (slot + 1 < slots) {
            if (begins_head(slot + 1)) find_keys(shape, head_of(slot + 1), work);
            begin_scores(work, slot + 1, products.add());
        }
        if (slot >= 0 && slot < slots) {
            if (begins_head(slot) && !load_scales(shape, head_of(slot), work)) return false;
            const int first = slot % work.slots * 16, left = queries - first;
            weigh_sixteen(shape, unit, work, slot, first, left < 16 ? left : 16, products);
        }
        products.finish();
    }
    return true;
}

// False, and nothing is written to unit.out, if add_tile() is.
CHAIRLIFT_INLINE bool attend_together(const AttentionShape& shape, const AttentionUnit& unit, TileWork& work) {
    const int queries = unit.rows * shape.group, last_row = unit.rows - 1, last = last_position(unit);
    const TileRows tiles(queries < 16 ? queries : 16);
    const int from = first_in_view(unit.first_position, unit.window);  // the later rows begin there or after it
    work.slots = (queries + 15) / 16;
    for (int i = 0; i < work.columns; ++i) work.columns_of_values[i] = {work.values + std::size_t(i) * kSteps * kTile, 64};
    begin_sixteens(shape, unit, work);
    PositionTile& tile = work.tile;
    Ahead ahead;
    for (int start = first_tile(shape, unit); start <= last; start += kPositions) {
        tile.start = start;
        tile.begin = from > start ? from - start : 0;
        tile.end = last + 1 - start < kPositions ? last + 1 - start : kPositions;
        tile.steps = steps_of(tile.end);
        const View first_view = view_of(shape, unit, start, 0), last_view = view_of(shape, unit, start, last_row);
        tile.same_view = first_view.begin == last_view.begin && first_view.end == last_view.end;
        ahead.set(shape, unit, start + kPositions);
        if (!add_tile(tiles, shape, unit, work, ahead)) return false;
    }
    end_sixteens(shape, unit, work);
    return true;
}

void attend_by_tiles(const AttentionShape& shape, const AttentionUnit& unit, float* scratch) {
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
