// The weights of a decoder, packed for the kernels, under the names of models/spec.py's DecoderSpec.tensor_shapes.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "formats.h"
#include "spec.h"
#include "threads.h"
#include "weight_image.h"

namespace chairlift {

// Matrices are [outputs, inputs]. A tensor that the spec does not ask for stays empty; `bias()` of it is null.
using Vector = std::vector<float>;

inline const float* bias(const Vector& vector) { return vector.empty() ? nullptr : vector.data(); }

struct LayerWeights {
    Vector attn_norm, q_norm, k_norm, post_attn_norm, ffn_norm, post_ffn_norm;
    PackedMatrix q, k, v, o, gate, up, down;
    Vector q_bias, k_bias, v_bias, o_bias, gate_bias, up_bias, down_bias;
};

using NamedType = std::pair<std::string, Type>;  // of a tensor as it is packed

class Weights {
public:
    explicit Weights(const DecoderSpec& spec);

    // Gives each matrix among `tensors` its place in the image, in this order. Once, before set() and read(). Throws
    // std::invalid_argument for a name that the spec does not have, or that is there twice, and std::bad_alloc.
    void lay_out(std::span<const NamedType> tensors);

    // Sets all matrices of the image from a file that holds it, or none if that is not whole (WeightImage::read).
    // Before any set().
    bool read(int file, std::uint64_t offset, std::uint64_t checksum, ThreadPool& pool);

    // Packs one tensor as the type `packed`, in its place if it was given one. Throws std::invalid_argument for a name
    // that the spec does not have, a second tensor of a name, a wrong shape or number of bytes, a type that it cannot be
    // packed as, or another than it was laid out for.
    void set(const std::string& name, Type type, std::span<const std::int64_t> shape,
             std::span<const std::uint8_t> stored, Type packed, ThreadPool& pool);

    // Throws std::invalid_argument naming a tensor that was not set.
    void check_complete();

    std::size_t bytes() const { return bytes_; }
    const WeightImage& image() const { return image_; }
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

    // A matrix in the image.
    struct Place {
        PackedMatrix* matrix;
        MatrixView view;
        std::size_t offset;
    };
    void clear_gaps();  // what lies between two matrices is part of the checksum
    const Place* place_of(const PackedMatrix* matrix) const;

    const DecoderSpec& spec_;
    WeightImage image_;
    std::vector<Place> places_;
    std::vector<LayerWeights> layers_;
    PackedMatrix embed_, lm_head_;
    Vector final_norm_;
    std::size_t bytes_ = 0;
};

}  // namespace chairlift
