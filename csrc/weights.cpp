#include "weights.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>

namespace chairlift {

namespace {

void require(bool condition, const std::string& message) {
    if (!condition) throw std::invalid_argument(message);
}

// Matrices begin at lines of the processor's caches.
std::size_t line_end(std::size_t bytes) { return (bytes + 63) / 64 * 64; }

void check_rope(const RopeSpec& rope, int head_dim) {
    require(rope.dims >= 2 && rope.dims % 2 == 0 && rope.dims <= head_dim,
            "rope.dims must be even, above 0 and at most head_dim, got " + std::to_string(rope.dims));
    require(rope.theta > 0, "rope.theta must be above 0, got " + std::to_string(rope.theta));
    require(rope.inv_freq_scale.empty() || rope.inv_freq_scale.size() == static_cast<std::size_t>(rope.dims) / 2,
            "rope.inv_freq_scale must be empty or hold dims / 2 values");
}

std::string shape_text(std::span<const std::int64_t> shape) {
    std::string text = "[";
    for (std::size_t i = 0; i < shape.size(); ++i) text += (i ? ", " : "") + std::to_string(shape[i]);
    return text + "]";
}

}  // namespace

void DecoderSpec::check() const {
    constexpr int kMost = 1 << 28;
    const struct {
        const char* name;
        int value, most;
    } sizes[] = {
        {"vocab_size", vocab_size, kMost},   {"hidden_size", hidden_size, 1 << 20}, {"num_layers", num_layers, 1 << 12},
        {"num_heads", num_heads, 1 << 12},   {"num_kv_heads", num_kv_heads, 1 << 12}, {"head_dim", head_dim, 1 << 12},
        {"ffn_size", ffn_size, 1 << 22},     {"max_positions", max_positions, kMost},
    };
    for (const auto& size : sizes)
        require(size.value >= 1 && size.value <= size.most,
                std::string(size.name) + " must be from 1 to " + std::to_string(size.most) + ", got " +
                    std::to_string(size.value));
    require(head_dim % 2 == 0, "head_dim must be even, got " + std::to_string(head_dim));
    require(num_heads % num_kv_heads == 0, "num_heads must be a multiple of num_kv_heads, got " +
                                               std::to_string(num_heads) + " and " + std::to_string(num_kv_heads));
    require(layer_windows.size() == static_cast<std::size_t>(num_layers), "layer_windows must hold one value a layer");
    for (int window : layer_windows) require(window >= 0, "layer_windows must not be negative");
    check_rope(rope, head_dim);
    check_rope(rope_local, head_dim);
}

Weights::Weights(const DecoderSpec& spec) : spec_(spec), layers_(spec.num_layers) {}

std::vector<Weights::NamedSlot> Weights::model_slots() {
    const int vocab = spec_.vocab_size, hidden = spec_.hidden_size;
    std::vector<NamedSlot> slots = {{"embed", {nullptr, &embed_, vocab, hidden}},
                                    {"final_norm", {&final_norm_, nullptr, hidden}}};
    if (!spec_.tied_embeddings) slots.push_back({"lm_head", {nullptr, &lm_head_, vocab, hidden}});
    return slots;
}

std::vector<Weights::NamedSlot> Weights::layer_slots(int index) {
    LayerWeights& w = layers_[index];
    const int hidden = spec_.hidden_size, ffn = spec_.ffn_size, q = spec_.q_size(), kv = spec_.kv_size();
    std::vector<NamedSlot> slots = {
        {"attn_norm", {&w.attn_norm, nullptr, hidden}},
        {"q", {nullptr, &w.q, q, hidden, index, true}},
        {"k", {nullptr, &w.k, kv, hidden, index, true}},
        {"v", {nullptr, &w.v, kv, hidden}},
        {"o", {nullptr, &w.o, hidden, q}},
        {"ffn_norm", {&w.ffn_norm, nullptr, hidden}},
        {"gate", {nullptr, &w.gate, ffn, hidden}},
        {"up", {nullptr, &w.up, ffn, hidden}},
        {"down", {nullptr, &w.down, hidden, ffn}},
    };
    auto add = [&](bool present, std::initializer_list<NamedSlot> more) {
        if (present) slots.insert(slots.end(), more);
    };
    add(spec_.qk_norm, {{"q_norm", {&w.q_norm, nullptr, spec_.head_dim, 1, index, true}},
                        {"k_norm", {&w.k_norm, nullptr, spec_.head_dim, 1, index, true}}});
    add(spec_.post_norms, {{"post_attn_norm", {&w.post_attn_norm, nullptr, hidden}},
                           {"post_ffn_norm", {&w.post_ffn_norm, nullptr, hidden}}});
    add(spec_.attn_bias, {{"q_bias", {&w.q_bias, nullptr, q, 1, index, true}},
                          {"k_bias", {&w.k_bias, nullptr, kv, 1, index, true}},
                          {"v_bias", {&w.v_bias, nullptr, kv}}});
    add(spec_.attn_out_bias, {{"o_bias", {&w.o_bias, nullptr, hidden}}});
    add(spec_.ffn_bias, {{"gate_bias", {&w.gate_bias, nullptr, ffn}},
                         {"up_bias", {&w.up_bias, nullptr, ffn}},
                         {"down_bias", {&w.down_bias, nullptr, hidden}}});
    return slots;
}

Weights::Slot Weights::find(const std::string& name) {
    const auto among = [](const std::vector<NamedSlot>& slots, std::string_view wanted) {
        for (const NamedSlot& slot : slots)
            if (wanted == slot.name) return slot.slot;
        return Slot{};
    };
    const std::string prefix = "layers.";
    const std::size_t dot = name.find('.', prefix.size());
    if (!name.starts_with(prefix) || dot == std::string::npos) return among(model_slots(), name);
    const std::string number = name.substr(prefix.size(), dot - prefix.size());
    for (int i = 0; i < spec_.num_layers; ++i)
        if (number == std::to_string(i)) return among(layer_slots(i), std::string_view(name).substr(dot + 1));
    return {};
}

void Weights::lay_out(std::span<const NamedType> tensors) {
    require(places_.empty(), "tensors are laid out once");
    std::size_t size = 0;
    for (const auto& [name, type] : tensors) {
        const Slot slot = find(name);
        require(slot.vector || slot.matrix, "this model has no tensor " + name);
        if (slot.vector) continue;
        require(!place_of(slot.matrix), "tensor " + name + " was laid out twice");
        const MatrixView view = packed_view(type, slot.rows, slot.cols);
        places_.push_back({slot.matrix, view, size});
        size = line_end(size + view.bytes());
    }
    image_ = WeightImage(size);
    clear_gaps();
}

void Weights::clear_gaps() {
    for (const Place& place : places_) {
        const std::size_t end = place.offset + place.view.bytes();
        std::memset(image_.at(end), 0, line_end(end) - end);
    }
}

const Weights::Place* Weights::place_of(const PackedMatrix* matrix) const {
    const auto found = std::find_if(places_.begin(), places_.end(), [&](const Place& p) { return p.matrix == matrix; });
    return found == places_.end() ? nullptr : &*found;
}

bool Weights::read(int file, std::uint64_t offset, std::uint64_t checksum, ThreadPool& pool) {
    if (!image_.read(file, offset, checksum, pool)) {
        clear_gaps();
        return false;
    }
    for (const Place& place : places_) {
        place.matrix->view = place.view;
        place.matrix->view.data = image_.at(place.offset);
        bytes_ += place.view.bytes();
    }
    return true;
}

void Weights::set(const std::string& name, Type type, std::span<const std::int64_t> shape,
                  std::span<const std::uint8_t> stored, Type packed, ThreadPool& pool) {
    const Slot slot = find(name);
    require(slot.vector || slot.matrix, "this model has no tensor " + name);
    require(!slot.filled(), "tensor " + name + " was given twice");
    const std::int64_t expected[] = {slot.rows, slot.cols};
    const std::span<const std::int64_t> wanted(expected, slot.matrix ? 2 : 1);
    require(std::equal(shape.begin(), shape.end(), wanted.begin(), wanted.end()),
            "tensor " + name + " must have shape " + shape_text(wanted) + ", got " + shape_text(shape));
    check_stored_size(type, slot.rows, slot.cols, stored.size());
    std::vector<std::uint8_t> ordered;
    if (slot.rotated && spec_.rope_of(slot.layer).interleaved) {
        ordered = in_rope_order(slot, stored);
        stored = ordered;
    }
    if (slot.vector) {
        require(type == Type::f32 && packed == type, "tensor " + name + " must be f32, got " + type_name(type));
        slot.vector->resize(slot.rows);
        std::memcpy(slot.vector->data(), stored.data(), stored.size());
        bytes_ += stored.size();
    } else {
        const Place* place = place_of(slot.matrix);
        require(!place || place->view.type == packed, "tensor " + name + " was laid out for another type");
        std::uint8_t* memory = place ? image_.at(place->offset) : nullptr;
        try {
            *slot.matrix = pack(type, slot.rows, slot.cols, stored, packed, pool, memory);
        } catch (const std::invalid_argument& error) {
            throw std::invalid_argument("tensor " + name + ": " + error.what());
        }
        bytes_ += slot.matrix->bytes();
    }
}

// The kernels rotate the pairs (i, i + dims / 2). Weights made for the pairs (2i, 2i + 1) get their rows in that order:
// a permutation of q's and k's components alike, which leaves every q.k as it was.
std::vector<std::uint8_t> Weights::in_rope_order(const Slot& slot, std::span<const std::uint8_t> stored) const {
    const int head_dim = spec_.head_dim, half = spec_.rope_of(slot.layer).dims / 2;
    const std::size_t row_bytes = stored.size() / slot.rows;
    std::vector<std::uint8_t> ordered(stored.begin(), stored.end());
    for (int head = 0; head < slot.rows; head += head_dim)
        for (int i = 0; i < 2 * half; ++i) {
            const int source = i < half ? 2 * i : 2 * (i - half) + 1;
            std::memcpy(ordered.data() + (head + i) * row_bytes, stored.data() + (head + source) * row_bytes, row_bytes);
        }
    return ordered;
}

void Weights::check_complete() {
    const auto check = [](const std::vector<NamedSlot>& slots, const std::string& prefix) {
        for (const NamedSlot& slot : slots) require(slot.slot.filled(), "tensor " + prefix + slot.name + " is missing");
    };
    check(model_slots(), "");
    for (int i = 0; i < spec_.num_layers; ++i) check(layer_slots(i), "layers." + std::to_string(i) + ".");
}

}  // namespace chairlift
