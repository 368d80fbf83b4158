// The weights of a decoder, packed for the kernels, under the names of models/spec.py's DecoderSpec.tensor_shapes.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "formats.h"
#include "spec.h"
#include "threads.h"

namespace chairlift {

// Matrices are [outputs, inputs]. A tensor that the spec does not ask for stays empty; `bias()` of it is null.
using Vector = std::vector<float>;

inline const float* bias(const Vector& vector) { return vector.empty() ? nullptr : vector.data(); }

struct LayerWeights {
    Vector attn_norm, q_norm, k_norm, post_attn_norm, ffn_norm, post_ffn_norm;
    PackedMatrix q, k, v, o, gate, up, down;
    Vector q_bias, k_bias, v_bias, o_bias, gate_bias, up_bias, down_bias;
};

class Weights {
public:
    explicit Weights(const DecoderSpec& spec);

    // Packs one tensor as the type `packed`. Throws std::invalid_argument for a name that the spec does not have, a
    // second tensor of a name, a wrong shape, a wrong number of bytes, or a type that it cannot be packed as.
    void set(const std::string& name, Type type, std::span<const std::int64_t> shape,
             std::span<const std::uint8_t> stored, Type packed, ThreadPool& pool);

    // Throws std::invalid_argument naming a tensor that was not set.
    void check_complete();

    std::size_t bytes() const { return bytes_; }
    const LayerWeights& layer(int index) const { return layers_[index]; }
    const MatrixView& embed() const { return embed_.view; }
    const MatrixView& lm_head() const { return spec_.tied_embeddings ? embed_.view : lm_head_.view; }
    const Vector& final_norm() const { return final_norm_; }

private:
    // A place for a tensor: `vector` or `matrix` is set, `cols` is 1 for a vector.
    struct Slot {
        Vector* vector = nullptr;
        PackedMatrix* matrix = nullptr;
        int rows = 0;
        int cols = 1;
        int layer = -1;
        bool rotated = false;  // q and k, whose rows follow the rotary embedding's order
        bool filled() const { return vector ? !vector->empty() : matrix->view.data != nullptr; }
    };

    struct NamedSlot {
        const char* name;
        Slot slot;
    };

    // The tensors that the spec asks for: of the whole model, and of one layer.
    std::vector<NamedSlot> model_slots();
    std::vector<NamedSlot> layer_slots(int index);
    Slot find(const std::string& name);
    std::vector<std::uint8_t> in_rope_order(const Slot& slot, std::span<const std::uint8_t> stored) const;

    const DecoderSpec& spec_;
    std::vector<LayerWeights> layers_;
    PackedMatrix embed_, lm_head_;
    Vector final_norm_;
    std::size_t bytes_ = 0;
};

}  // namespace chairlift
