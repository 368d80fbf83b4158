#include "spec_from_python.h"

#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>

namespace nb = nanobind;

namespace chairlift {

namespace {

template <class T>
T get(const nb::dict& dict, const char* name) {
    if (!dict.contains(name)) throw std::invalid_argument(std::string("spec has no ") + name);
    try {
        return nb::cast<T>(dict[name]);
    } catch (const std::bad_cast&) {
        throw std::invalid_argument(std::string("spec.") + name + " has a wrong type");
    }
}

template <class T>
std::vector<T> get_list(const nb::dict& dict, const char* name) {
    return get<std::vector<T>>(dict, name);
}

RopeSpec rope_spec(const nb::dict& dict) {
    RopeSpec rope;
    rope.theta = get<double>(dict, "theta");
    rope.dims = get<int>(dict, "dims");
    const auto style = get<std::string>(dict, "style");
    if (style != "half" && style != "interleaved")
        throw std::invalid_argument("rope.style must be half or interleaved, got " + style);
    rope.interleaved = style == "interleaved";
    rope.inv_freq_scale = get_list<double>(dict, "inv_freq_scale");
    rope.attention_factor = get<double>(dict, "attention_factor");
    return rope;
}

}  // namespace

DecoderSpec spec_from_python(const nb::dict& dict) {
    DecoderSpec spec;
    spec.vocab_size = get<int>(dict, "vocab_size");
    spec.hidden_size = get<int>(dict, "hidden_size");
    spec.num_layers = get<int>(dict, "num_layers");
    spec.num_heads = get<int>(dict, "num_heads");
    spec.num_kv_heads = get<int>(dict, "num_kv_heads");
    spec.head_dim = get<int>(dict, "head_dim");
    spec.ffn_size = get<int>(dict, "ffn_size");
    spec.max_positions = get<int>(dict, "max_positions");
    spec.norm_eps = get<float>(dict, "norm_eps");
    spec.rope = rope_spec(get<nb::dict>(dict, "rope"));
    const bool local = dict.contains("rope_local") && !dict["rope_local"].is_none();
    spec.rope_local = local ? rope_spec(get<nb::dict>(dict, "rope_local")) : spec.rope;
    spec.layer_windows = get_list<int>(dict, "layer_windows");
    if (spec.layer_windows.empty() && spec.num_layers > 0 && spec.num_layers < 1 << 16)
        spec.layer_windows.assign(spec.num_layers, 0);
    spec.attn_scale = get<float>(dict, "attn_scale");
    const auto activation = get<std::string>(dict, "activation");
    if (activation != "silu" && activation != "gelu_tanh")
        throw std::invalid_argument("activation must be silu or gelu_tanh, got " + activation);
    spec.activation = activation == "silu" ? Activation::silu : Activation::gelu_tanh;
    spec.qk_norm = get<bool>(dict, "qk_norm");
    spec.post_norms = get<bool>(dict, "post_norms");
    spec.attn_bias = get<bool>(dict, "attn_bias");
    spec.attn_out_bias = get<bool>(dict, "attn_out_bias");
    spec.ffn_bias = get<bool>(dict, "ffn_bias");
    spec.tied_embeddings = get<bool>(dict, "tied_embeddings");
    spec.embed_scale = get<float>(dict, "embed_scale");
    spec.attn_softcap = get<float>(dict, "attn_softcap");
    spec.logit_softcap = get<float>(dict, "logit_softcap");
    return spec;
}

}  // namespace chairlift
