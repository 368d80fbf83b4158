#include "weights.h"

#include <cstring>
#include <stdexcept>

namespace chairlift {

namespace {

void require(bool condition, const std::string& message) {
    if (!condition) throw std::invalid_argument(message);
}

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
    require(num_heads % num_kv_heads == 0, "num_heads must be a multiple of num_kv_heads, got " +
                                               std::to_string(num_heads) + " and " + std::to_string(num_kv_heads));
    require(layer_windows.size() == static_cast<std::size_t>(num_layers), "layer_windows must hold one value a layer");
    for (int window : layer_windows) require(window >= 0, "layer_windows must not be negative");
    check_rope(rope, head_dim);
    check_rope(rope_local, head_dim);
}

Weights::Weights(const DecoderSpec& spec, const std::string& format)
    : spec_(spec), format_(format), layers_(spec.num_layers) {
    require(format == "auto" || format == "f32", "weights must be auto or f32, got " + format);
}

Weights::Slot Weights::find_in_layer(int index, std::string_view name) {
    LayerWeights& w = layers_[index];
    const int hidden = spec_.hidden_size, ffn = spec_.ffn_size, q = spec_.q_size(), kv = spec_.kv_size();
    struct Entry {
        const char* name;
        bool present;
        Slot slot;
    };
    const Entry entries[] = {
        {"attn_norm", true, {&w.attn_norm, nullptr, hidden}},
        {"q", true, {nullptr, &w.q, q, hidden, index, true}},
        {"k", true, {nullptr, &w.k, kv, hidden, index, true}},
        {"v", true, {nullptr, &w.v, kv, hidden}},
        {"o", true, {nullptr, &w.o, hidden, q}},
        {"ffn_norm", true, {&w.ffn_norm, nullptr, hidden}},
        {"gate", true, {nullptr, &w.gate, ffn, hidden}},
        {"up", true, {nullptr, &w.up, ffn, hidden}},
        {"down", true, {nullptr, &w.down, hidden, ffn}},
        {"q_norm", spec_.qk_norm, {&w.q_norm, nullptr, spec_.head_dim, 1, index, true}},
        {"k_norm", spec_.qk_norm, {&w.k_norm, nullptr, spec_.head_dim, 1, index, true}},
        {"post_attn_norm", spec_.post_norms, {&w.post_attn_norm, nullptr, hidden}},
        {"post_ffn_norm", spec_.post_norms, {&w.post_ffn_norm, nullptr, hidden}},
        {"q_bias", spec_.attn_bias, {&w.q_bias, nullptr, q, 1, index, true}},
        {"k_bias", spec_.attn_bias, {&w.k_bias, nullptr, kv, 1, index, true}},
        {"v_bias", spec_.attn_bias, {&w.v_bias, nullptr, kv}},
        {"o_bias", spec_.attn_out_bias, {&w.o_bias, nullptr, hidden}},
        {"gate_bias", spec_.ffn_bias, {&w.gate_bias, nullptr, ffn}},
        {"up_bias", spec_.ffn_bias, {&w.up_bias, nullptr, ffn}},
        {"down_bias", spec_.ffn_bias, {&w.down_bias, nullptr, hidden}},
    };
    for (const Entry& entry : entries)
        if (entry.present && name == entry.name) return entry.slot;
    return {};
}

Weights::Slot Weights::find(const std::string& name) {
    if (name == "embed") return {nullptr, &embed_, spec_.vocab_size, spec_.hidden_size};
    if (name == "final_norm") return {&final_norm_, nullptr, spec_.hidden_size};
    if (name == "lm_head" && !spec_.tied_embeddings) return {nullptr, &lm_head_, spec_.vocab_size, spec_.hidden_size};
    const std::string prefix = "layers.";
    const std::size_t dot = name.find('.', prefix.size());
    if (name.starts_with(prefix) && dot != std::string::npos) {
        const std::string number = name.substr(prefix.size(), dot - prefix.size());
        for (int i = 0; i < spec_.num_layers; ++i)
            if (number == std::to_string(i)) return find_in_layer(i, std::string_view(name).substr(dot + 1));
    }
    return {};
}

void Weights::set(const std::string& name, Type type, std::span<const std::int64_t> shape,
                  std::span<const std::uint8_t> stored, ThreadPool& pool) {
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
        require(type == Type::f32, "tensor " + name + " must be f32, got " + type_name(type));
        slot.vector->resize(slot.rows);
        std::memcpy(slot.vector->data(), stored.data(), stored.size());
        bytes_ += stored.size();
    } else {
        *slot.matrix = pack(type, slot.rows, slot.cols, stored, format_, pool);
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

void Weights::check_complete() const {
    auto& self = const_cast<Weights&>(*this);  // find() hands out places to write to
    auto check = [](const Slot& slot, const std::string& name) {
        require((!slot.vector && !slot.matrix) || slot.filled(), "tensor " + name + " is missing");
    };
    for (const char* name : {"embed", "final_norm", "lm_head"}) check(self.find(name), name);
    for (int i = 0; i < spec_.num_layers; ++i)
        for (const char* name :
             {"attn_norm", "q", "k", "v", "o", "ffn_norm", "gate", "up", "down", "q_norm", "k_norm", "post_attn_norm",
              "post_ffn_norm", "q_bias", "k_bias", "v_bias", "o_bias", "gate_bias", "up_bias", "down_bias"})
            check(self.find_in_layer(i, name), "layers." + std::to_string(i) + "." + name);
}

}  // namespace chairlift
