// What attention by vectors and by tiles (attention_tiles.h) have in common.
#pragma once

#include <cstring>

#include "attention.h"
#include "simd.h"

namespace chairlift::CHAIRLIFT_ISA {
namespace {

constexpr float kInfinity = __builtin_inff();
constexpr int kLanes = 16;  // positions, or numbers of a value, of a vector

struct Bf16 {
    std::uint16_t bits;
};

CHAIRLIFT_INLINE std::size_t block_at(const AttentionShape& shape, const AttentionUnit& unit, int position) {
    return unit.table[position / shape.head.block_size * shape.table_stride] * shape.block_bytes;
}

// The same rows and one of the heads.
CHAIRLIFT_INLINE AttentionUnit unit_of_head(const AttentionShape& shape, const AttentionUnit& unit, int head) {
    AttentionUnit one = unit;
    one.kv_heads = 1;
    one.q += std::size_t(head) * shape.group * shape.head.head_dim;
    one.out += std::size_t(head) * shape.group * shape.head.head_dim;
    one.keys += head * shape.head.next_head();
    return one;
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
        std::memcpy(scales.values + i, unit.keys + shape.head.values() + at, count * sizeof(float));
    });
}

CHAIRLIFT_INLINE int last_position(const AttentionUnit& unit) { return unit.first_position + unit.rows - 1; }

// The first tile that a row of the unit sees something of.
CHAIRLIFT_INLINE int first_tile(const AttentionShape& shape, const AttentionUnit& unit) {
    return first_in_view(unit.first_position, unit.window) / shape.tile * shape.tile;
}

template <class Body>
CHAIRLIFT_INLINE void for_stored_of(const AttentionShape& shape, const AttentionUnit& unit, int start, Body&& body) {
    const int rest = last_position(unit) + 1 - start, end = rest < shape.tile ? rest : shape.tile;
    const int from = first_in_view(unit.first_position, unit.window), begin = from > start ? from - start : 0;
    const KvHead& head = shape.head;
    for_pieces(shape, unit, start, begin, end, [&](int, int positions, std::size_t block, int slot) CHAIRLIFT_ALWAYS {
        const std::uint8_t* keys = unit.keys + block;
        if (head.block_size <= shape.tile) return body(keys, unit.kv_heads * head.next_head());
        for (int i = 0; i < unit.kv_heads; ++i, keys += head.next_head()) {
            for (int number = 0; number < head.head_dim; number += head.side_by_side())
                body(keys + head.key_at(number, slot), head.key_at(0, positions));
            body(keys + head.values() + head.value_at(slot), head.value_at(positions));
        }
    });
}

// body(begin, bytes) for what the cache holds of a unit's tile at `start`: to be asked for before it is used, since the
// processor cannot foresee where the next block lies. After the unit's last tile comes the first one of the next unit.
template <class Body>
CHAIRLIFT_INLINE void for_stored(const AttentionShape& shape, const AttentionUnit& unit, int start, Body&& body) {
    if (start > last_position(unit)) {
        if (unit.next) for_stored_of(shape, *unit.next, first_tile(shape, *unit.next), body);
    } else {
        for_stored_of(shape, unit, start, body);
    }
}

struct View {
    int begin, end;  // of a tile, what a query sees of it
};

CHAIRLIFT_INLINE View view_of(const AttentionShape& shape, const AttentionUnit& unit, int start, int row) {
    const int position = unit.first_position + row, seen = first_in_view(position, unit.window);
    return {seen > start ? seen - start : 0, position + 1 - start < shape.tile ? position + 1 - start : shape.tile};
}

}  // namespace
}  // namespace chairlift::CHAIRLIFT_ISA
