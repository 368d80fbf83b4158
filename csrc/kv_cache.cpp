#include "kv_cache.h"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace chairlift {

CacheShape::CacheShape(const DecoderSpec& spec, const std::vector<std::vector<int>>& groups, int num_blocks,
                       int block_size, KvType kv)
    : num_blocks(num_blocks), head{spec.head_dim, block_size, kv}, group_of(spec.num_layers, -1), slot_of(spec.num_layers) {
    if (num_blocks < 1) throw std::invalid_argument("num_blocks must be at least 1");
    if (block_size < 1 || block_size > 1 << 16) throw std::invalid_argument("block_size must be from 1 to 65536");
    std::size_t slots = 0;
    for (const std::vector<int>& layers : groups) {
        int window = layers.empty() ? 0 : 1;
        for (std::size_t slot = 0; slot < layers.size(); ++slot) {
            const int layer = layers[slot];
            if (layer < 0 || layer >= spec.num_layers || group_of[layer] >= 0)
                throw std::invalid_argument("groups must name each layer once, got layer " + std::to_string(layer));
            group_of[layer] = static_cast<int>(windows.size());
            slot_of[layer] = static_cast<int>(slot);
            const int own = spec.layer_windows[layer];
            window = own == 0 || window == 0 ? 0 : std::max(window, own);
        }
        windows.push_back(window);
        slots = std::max(slots, layers.size());
    }
    if (std::count(group_of.begin(), group_of.end(), -1) > 0)
        throw std::invalid_argument("groups must name each layer once, and some layers are missing");
    layer_bytes = head.next_head() * spec.num_kv_heads;
    block_bytes = layer_bytes * slots;
}

}  // namespace chairlift
