// What distinguishes one decoder from another: models/spec.py's DecoderSpec, which explains the fields.
#pragma once

#include <stdexcept>
#include <string>
#include <vector>

namespace chairlift {

struct RopeSpec {
    double theta = 0.0;
    int dims = 0;
    bool interleaved = false;
    std::vector<double> inv_freq_scale;
    double attention_factor = 1.0;

    bool operator==(const RopeSpec&) const = default;
};

enum class Activation { silu, gelu_tanh };

struct DecoderSpec {
    int vocab_size = 0;
    int hidden_size = 0;
    int num_layers = 0;
    int num_heads = 0;
    int num_kv_heads = 0;
    int head_dim = 0;
    int ffn_size = 0;
    int max_positions = 0;
    float norm_eps = 0.0f;
    RopeSpec rope;
    RopeSpec rope_local;  // the same as rope where the model has one
    std::vector<int> layer_windows;  // num_layers of them, 0 is full attention
    float attn_scale = 1.0f;
    Activation activation = Activation::silu;
    bool qk_norm = false;
    bool post_norms = false;
    bool attn_bias = false;
    bool attn_out_bias = false;
    bool ffn_bias = false;
    bool tied_embeddings = false;
    float embed_scale = 1.0f;
    float attn_softcap = 0.0f;
    float logit_softcap = 0.0f;

    int q_size() const { return num_heads * head_dim; }
    int kv_size() const { return num_kv_heads * head_dim; }
    int group() const { return num_heads / num_kv_heads; }
    const RopeSpec& rope_of(int layer) const { return layer_windows[layer] > 0 ? rope_local : rope; }

    // Throws std::invalid_argument for sizes that no decoder can have.
    void check() const;
};

}  // namespace chairlift
