// Attention of query rows over a paged KV cache (kv_cache.h), and the storing of keys and values into it.
//
// The unit of work is some consecutive rows of one item, and one KV head or several with their groups of query heads. It
// walks over the positions in tiles that begin at multiples of the tile size, whatever the block size, and keeps for each
// query (one head of one row) the greatest score, the sum of weights and the weighted values so far ("online softmax").
// For each query the order of operations depends on its own position and window alone:
//
//     for each tile, first to last:  scores of the keys in view, each summed number by number; new maximum; weights;
//                                    rescale; add values key by key
//
// (by tiles of bf16, attention_tiles.h, in another order, but also one that is each query's own), so the same bits come
// out of a decode, of a chunk of any size, and of any division of the work among threads. Several queries are computed
// side by side, which saves reading the keys and values again for each, and changes no result.
#pragma once

#include <cstddef>
#include <cstdint>

#include "isa.h"
#include "kv_cache.h"

namespace chairlift {

constexpr int kRowTile = 32;  // most rows of a unit
constexpr int kMaxTile = 64;  // most positions of a tile

CHAIRLIFT_INLINE int first_in_view(int position, int window) {
    return window > 0 && position >= window ? position - window + 1 : 0;
}

// What is the same for all units of a model. Sizes in floats unless they say bytes.
struct AttentionShape {
    KvHead head;
    int padded_dim = 0;  // head_dim rounded up to 16
    int group = 0;       // query heads per KV head
    int kv_heads = 1;    // at most, of a unit of one row; units of more rows have one
    int tile = 0;        // positions, a multiple of 16, at most kMaxTile
    int table_stride = 1;         // block table entries from one block to the next of the same layers
    std::size_t block_bytes = 0;  // from one block of the cache to the next
    std::size_t q_stride = 0;     // from one query row to the next
    std::size_t out_stride = 0;
    float scale = 1.0f;
    float softcap = 0.0f;  // 0: none
};

struct AttentionUnit {
    const float* q = nullptr;  // the groups' heads of the first row, one after the other
    float* out = nullptr;      // the same layout
    int kv_heads = 1;
    int rows = 0;              // 1 to kRowTile
    int first_position = 0;    // of the first row; the others follow it
    int window = 0;            // 0: all positions up to its own
    const std::int32_t* table = nullptr;   // the item's first block of this layer
    const std::uint8_t* keys = nullptr;    // this layer's in block 0, of the first head
    const AttentionUnit* next = nullptr;   // what this thread will do after it, if that is known
};

struct AttentionKernels {
    int (*tile)(const KvHead& head);  // how many positions
    std::size_t (*scratch_floats)(const AttentionShape& shape);

    // `scratch` has so many floats, 64-byte aligned.
    void (*attend)(const AttentionShape& shape, const AttentionUnit& unit, float* scratch);

    // Store head_dim floats as the key or the value at `slot` of a head's keys or values in a block.
    void (*store_key)(const KvHead& head, const float* key, int slot, std::uint8_t* keys);
    void (*store_value)(const KvHead& head, const float* value, int slot, std::uint8_t* values);
};

}  // namespace chairlift

CHAIRLIFT_PER_ISA(AttentionKernels, attention_kernels)
