// Attention of query rows over a paged KV cache.
//
// The unit of work is some consecutive rows of one item and one KV head with its group of query heads. It walks over the
// positions in tiles that begin at multiples of the tile size, whatever the block size, and keeps for each query the
// greatest score, the sum of weights and the weighted values so far ("online softmax"). For each query the order of
// operations depends on its own position and window alone:
//
//     for each tile, first to last:  scores of the keys in view; new maximum; weights; rescale; add values key by key
//
// so the same bits come out of a decode, of a chunk of any size, and of any division of the work among threads.
// Processing several rows of a chunk together saves reading and widening the keys and values again for each.
#pragma once

#include <cstddef>
#include <cstdint>

#include "isa.h"

namespace chairlift {

constexpr int kRowTile = 16;  // most rows of a unit
constexpr int kMaxTile = 32;  // most positions of a tile

// How the cache stores a key or a value of head_dim numbers. int8: signed bytes, and behind them one f32 that they are
// multiples of. A vector has a scale of its own because one for all of a block's positions would depend on tokens that
// come later, and so a row's bits on which of them were there when it was computed.
enum class KvType { f32, f16, int8 };

inline __attribute__((always_inline)) int first_in_view(int position, int window) {
    return window > 0 && position >= window ? position - window + 1 : 0;
}

// What is the same for all units of a model. Sizes in floats unless they say bytes.
struct AttentionShape {
    static constexpr int kHeadsTogether = 3;  // at most

    int head_dim = 0;
    int padded_dim = 0;  // head_dim rounded up to 8
    int group = 0;       // query heads per KV head
    int tile = 0;        // positions, a multiple of 8, at most kMaxTile
    int block_size = 0;  // positions
    int table_stride = 1;         // block table entries from one block to the next of the same layers
    KvType kv = KvType::f32;
    std::size_t vector_bytes = 0; // from one position of a block to the next
    std::size_t block_bytes = 0;  // from one block of the cache to the next
    std::size_t q_stride = 0;     // from one query row to the next
    std::size_t out_stride = 0;
    float scale = 1.0f;
    float softcap = 0.0f;  // 0: none

    std::size_t scratch_floats() const {
        const std::size_t queries = static_cast<std::size_t>(kRowTile) * group;
        return (2 * static_cast<std::size_t>(tile) + 2 * queries) * padded_dim + 2 * queries +
               static_cast<std::size_t>(kHeadsTogether) * tile;
    }
};

struct AttentionUnit {
    const float* q = nullptr;  // the group's heads of the first row, one after the other
    float* out = nullptr;      // the same layout
    int rows = 0;              // 1 to kRowTile
    int first_position = 0;    // of the first row; the others follow it
    int window = 0;            // 0: all positions up to its own
    const std::int32_t* table = nullptr;   // the item's first block of this layer
    const std::uint8_t* keys = nullptr;    // this layer's and head's [block_size] vectors in block 0
    const std::uint8_t* values = nullptr;
};

struct AttentionKernels {
    // `scratch` has shape.scratch_floats() floats, 32-byte aligned.
    void (*attend)(const AttentionShape& shape, const AttentionUnit& unit, float* scratch);
};

}  // namespace chairlift

CHAIRLIFT_PER_ISA(AttentionKernels, attention_kernels)
