// Where the keys and values of a position lie in the KV cache.
//
// The layers are divided into groups, and a block holds some positions for the layers of one group, so that a group whose
// layers have a window gives blocks back as it passes. All groups draw from one pool, and copying a block is one run of
// bytes: [block][layer of the group][kv head][keys, values], so that who reads all heads of some positions reads one run
// from memory, and
//
//     keys    [head_dim][block_size]  numbers   a vector of these is one number of several keys, as scores need it
//     values  [block_size][head_dim]  numbers   a vector of these is several numbers of one value, as sums need it
//     scales  [block_size]            f32       behind either, int8 only: what the bytes are multiples of
//
// of bf16 by pairs, as tile products need them: keys [head_dim / 2][block_size][2], values [block_size / 2][head_dim][2].
// Each int8 vector has a scale of its own because one for all of a block's positions would depend on tokens that come
// later, and so a row's bits on which of them were there when it was computed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "inline.h"
#include "spec.h"

namespace chairlift {

enum class KvType { f32, f16, bf16, int8 };

// One head's keys and values within a block. Offsets are in bytes. Always inlined, since the kernels of every instruction
// set use it (isa.h).
struct KvHead {
    int head_dim = 0;
    int block_size = 0;  // positions
    KvType kv = KvType::f32;

    CHAIRLIFT_INLINE std::size_t number_bytes() const { return kv == KvType::f32 ? 4 : kv == KvType::int8 ? 1 : 2; }
    CHAIRLIFT_INLINE int side_by_side() const { return kv == KvType::bf16 ? 2 : 1; }  // numbers of a key, values of a number
    CHAIRLIFT_INLINE std::size_t key_at(int number, int slot) const {
        const int n = side_by_side();
        return ((std::size_t(number / n) * block_size + slot) * n + number % n) * number_bytes();
    }
    CHAIRLIFT_INLINE std::size_t value_at(int slot) const {
        const int n = side_by_side();
        return (std::size_t(slot / n) * n * head_dim + slot % n) * number_bytes();
    }
    CHAIRLIFT_INLINE std::size_t scale_at(int slot) const {
        const int n = side_by_side(), slots = (block_size + n - 1) / n * n;
        return std::size_t(slots) * head_dim * number_bytes() + std::size_t(slot) * sizeof(float);
    }
    CHAIRLIFT_INLINE std::size_t bytes() const { return scale_at(kv == KvType::int8 ? block_size : 0); }
    CHAIRLIFT_INLINE std::size_t values() const { return bytes(); }  // from the keys on
    CHAIRLIFT_INLINE std::size_t next_head() const { return 2 * bytes(); }
};

struct CacheShape {
    int num_blocks = 0;
    KvHead head;
    std::vector<int> windows;      // of each group: the widest of its layers', 0 if one of them sees everything
    std::vector<int> group_of;     // of each layer
    std::vector<int> slot_of;      // which of the group's layers it is
    std::size_t layer_bytes = 0;
    std::size_t block_bytes = 0;

    CacheShape() = default;
    // `groups` names each layer once. Throws std::invalid_argument.
    CacheShape(const DecoderSpec& spec, const std::vector<std::vector<int>>& groups, int num_blocks, int block_size,
               KvType kv);
};

}  // namespace chairlift
