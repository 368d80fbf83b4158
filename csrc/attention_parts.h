// What attention by vectors and by tiles (attention_tiles.h) have in common.
#pragma once

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

// body(begin, bytes) for what the cache holds of the tile at `start`, but nothing after position `last`: to be asked for
// before it is used, since the processor cannot foresee where the next block lies.
template <class Body>
CHAIRLIFT_INLINE void for_stored(const AttentionShape& shape, const AttentionUnit& unit, int start, int last, Body&& body) {
    const int end = last + 1 - start < shape.tile ? last + 1 - start : shape.tile;
    const KvHead& head = shape.head;
    for_pieces(shape, unit, start, 0, end, [&](int, int positions, std::size_t block, int slot) CHAIRLIFT_ALWAYS {
        const std::uint8_t* const keys = unit.keys + block;
        if (positions == head.block_size) {  // all of the block's keys, in one piece
            body(keys, head.value_at(positions));
        } else {
            for (int number = 0; number < head.head_dim; ++number)
                body(keys + head.key_at(number, slot), head.key_at(0, positions));
        }
        body(unit.values + block + head.value_at(slot), head.value_at(positions));
    });
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
