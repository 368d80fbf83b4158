// What attention by vectors and by tiles (attention_tiles.h) have in common.
#pragma once

#include "attention.h"
#include "simd.h"

namespace chairlift::CHAIRLIFT_ISA {
namespace {

constexpr float kInfinity = __builtin_inff();
constexpr int kLanes = 16;                // positions, or numbers of a value, of a vector
constexpr int kRuns = kMaxTile / kLanes;  // of sixteen positions in a tile

struct Bf16 {
    std::uint16_t bits;
};

CHAIRLIFT_INLINE f32x16 load_stored(const float* p) { return load16(p); }
CHAIRLIFT_INLINE f32x16 load_stored(const std::uint16_t* p) { return load16_f16(p); }
CHAIRLIFT_INLINE f32x16 load_stored(const Bf16* p) { return load16_bf16(&p->bits); }
CHAIRLIFT_INLINE f32x16 load_stored(const std::int8_t* p) { return load16_i8(p); }

CHAIRLIFT_INLINE int run_end(int position) { return (position + kLanes - 1) / kLanes; }

CHAIRLIFT_INLINE std::size_t block_at(const AttentionShape& shape, const AttentionUnit& unit, int position) {
    return unit.table[position / shape.head.block_size * shape.table_stride] * shape.block_bytes;
}

// body(i, count, block, slot) for the pieces of begin..end of the tile at `start` that lie in one block.
template <class Body>
CHAIRLIFT_INLINE void for_pieces(const AttentionShape& shape, const AttentionUnit& unit, int start, int begin, int end,
                                 Body&& body) {
    for (int i = begin, count; i < end; i += count) {
        const int slot = (start + i) % shape.head.block_size, rest = shape.head.block_size - slot;
        count = rest < end - i ? rest : end - i;
        body(i, count, block_at(shape, unit, start + i), slot);
    }
}

// Of the keys and values of a tile, where they are stored as bytes.
struct Scales {
    bool used;
    alignas(64) float keys[kMaxTile], values[kMaxTile];
};

CHAIRLIFT_INLINE void find_scales(const AttentionShape& shape, const AttentionUnit& unit, int start, int begin, int end,
                                  Scales& scales) {
    for_pieces(shape, unit, start, begin, end, [&](int i, int count, std::size_t block, int slot) {
        const std::size_t at = block + shape.head.scale_at(slot);
        std::memcpy(scales.keys + i, unit.keys + at, count * sizeof(float));
        std::memcpy(scales.values + i, unit.values + at, count * sizeof(float));
    });
}

// What will soon be used of the cache, asked for a little at a time while there is other work: all at once, it would wait
// for the few lines that can be under way, and the work behind it. The processor cannot foresee it, since blocks lie far
// apart.
class Ahead {
public:
    // Some positions from `first` on, but none after `last`; at most kMaxTile.
    CHAIRLIFT_INLINE void set(const AttentionShape& shape, const AttentionUnit& unit, int first, int count, int last) {
        const int end = last + 1 - first < count ? last + 1 - first : count;
        const KvHead& head = shape.head;
        count_ = next_ = 0;
        for_pieces(shape, unit, first, 0, end, [&](int, int positions, std::size_t block, int slot) CHAIRLIFT_ALWAYS {
            const std::uint8_t* const keys = unit.keys + block;
            if (positions == head.block_size) {  // all of the block's keys, in one piece
                add(keys, head.value_at(positions));
            } else {
                for (int number = 0; number < head.head_dim; ++number)
                    add(keys + head.key_at(number, slot), head.key_at(0, positions));
            }
            add(unit.values + block + head.value_at(slot), head.value_at(positions));
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

    CHAIRLIFT_INLINE void add(const std::uint8_t* begin, std::size_t bytes) {
        if (count_ < kMost) pieces_[count_++] = {begin, static_cast<int>((bytes + 63) / 64)};
    }

    Piece pieces_[kMost];
    int count_ = 0, next_ = 0;
};

struct View {
    int begin, end;  // of a tile, what a query sees of it
};

CHAIRLIFT_INLINE View view_of(const AttentionShape& shape, const AttentionUnit& unit, int start, int row) {
    const int position = unit.first_position + row, seen = first_in_view(position, unit.window);
    return {seen > start ? seen - start : 0, position + 1 - start < shape.tile ? position + 1 - start : shape.tile};
}

CHAIRLIFT_INLINE float exp_one(float x) {
    float lanes[8];
    store(lanes, exp(broadcast(x)));
    return lanes[0];
}

// Turns the scores of keys begin..end into weights, and returns the factor for what was summed up before.
CHAIRLIFT_INLINE float weigh(const Scales& scales, float* scores, int begin, int end, float cap,
                             float* running_greatest, float* mass) {
    const int first = begin / kLanes * kLanes, last = run_end(end) * kLanes;
    if (scales.used)
        for (int key = first; key < last; key += kLanes)
            store(scores + key, load16(scores + key) * load16(scales.keys + key));
    if (cap > 0.0f)
        for (int key = first; key < last; key += kLanes)
            store(scores + key, broadcast16(cap) * tanh(load16(scores + key) / broadcast16(cap)));
    for (int key = first; key < begin; ++key) scores[key] = -kInfinity;  // out of view, and may have been anything
    for (int key = end; key < last; ++key) scores[key] = -kInfinity;
    f32x16 greatest16 = broadcast16(-kInfinity);
    for (int key = first; key < last; key += kLanes) greatest16 = max(load16(scores + key), greatest16);
    const float before = *running_greatest, here = maximum(greatest16);
    const float greatest = here > before ? here : before;
    f32x16 mass16 = zero16();
    for (int key = first; key < last; key += kLanes) {
        const f32x16 weight = exp(load16(scores + key) - broadcast16(greatest));
        store(scores + key, scales.used ? weight * load16(scales.values + key) : weight);
        mass16 = mass16 + weight;
    }
    const float rescale = greatest == before ? 1.0f : exp_one(before - greatest);  // e^0 is 1 to the last bit
    *running_greatest = greatest;
    *mass = *mass * rescale + sum(mass16);
    return rescale;
}

}  // namespace
}  // namespace chairlift::CHAIRLIFT_ISA
