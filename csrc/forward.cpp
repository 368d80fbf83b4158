// Decoder::step: the forward pass, phase by phase, and the draws.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>

#include "decoder.h"

namespace chairlift {

namespace {

bool any_quantized(std::initializer_list<const PackedMatrix*> matrices) {
    return std::any_of(matrices.begin(), matrices.end(), [](const PackedMatrix* m) { return is_quantized(m->view.type); });
}

}  // namespace

// One step in progress. Its functions run on every thread, in the same order, and each leaves its results behind a
// barrier.
struct Decoder::Pass {
    using Time = std::chrono::steady_clock::time_point;

    Decoder& d;
    const StepInput& input;
    const StepOutput& output;
    Time lap;

    const DecoderSpec& spec = d.spec_;
    ThreadPool& pool = d.pool_;
    const int rows = input.rows(), head_rows = static_cast<int>(d.head_rows_.size());
    const int hidden = spec.hidden_size, ffn = spec.ffn_size, q = spec.q_size(), kv = spec.kv_size();
    const int qkv = q + 2 * kv;

    void run(int thread) {
        begin_rows();
        end_phase(thread, d.profile.other);
        for (int layer = 0; layer < spec.num_layers && rows > 0; ++layer) {
            compute_keys(thread, layer);
            if (rows_from(layer) == 0) return;
            attention_block(thread, layer);
            ffn_block(thread, layer);
        }
        if (spec.post_norms) finish_rows(thread);
        for (int begin = 0; begin < head_rows; begin += d.logit_rows_)
            head_piece(thread, begin, std::min(head_rows - begin, d.logit_rows_));
    }

    // How many rows a layer goes on with once it has stored keys and values: the last one only with those of which logits
    // are wanted, which it moves to the front.
    int rows_from(int layer) const { return layer + 1 < spec.num_layers ? rows : head_rows; }

    void end_phase(int thread, double& part) {
        pool.barrier();
        if (thread != 0) return;
        const Time now = std::chrono::steady_clock::now();
        part += std::chrono::duration<double>(now - lap).count();
        lap = now;
    }

    // Embeddings, and the angles of the rotary embedding.
    void begin_rows() {
        for_rows(pool, rows, 1, [&](int row) {
            float* x = d.x_ + std::size_t(row) * hidden;
            dequantize_packed_row(d.weights_.embed(), input.tokens[row], x);
            if (spec.embed_scale != 1.0f)
                for (int i = 0; i < hidden; ++i) x[i] *= spec.embed_scale;
            fill_angles(d.rope_, spec.rope, row);
            if (!(spec.rope_local == spec.rope)) fill_angles(d.rope_local_, spec.rope_local, row);
        });
    }

    void fill_angles(const Rope& rope, const RopeSpec& rope_spec, int row) const {
        const std::size_t pairs = rope.inv_freq.size();
        for (std::size_t i = 0; i < pairs; ++i) {
            const float angle = static_cast<float>(input.positions[row]) * rope.inv_freq[i];
            rope.cosines[row * pairs + i] = static_cast<float>(std::cos(double{angle}) * rope_spec.attention_factor);
            rope.sines[row * pairs + i] = static_cast<float>(std::sin(double{angle}) * rope_spec.attention_factor);
        }
    }

    ActRows activations(const float* x, int count, int cols) const { return d.activations_.rows(x, cols, count, cols); }

    // x += post_norm(y) where there are post norms, then y = norm(x), quantised if a weight wants that.
    void norm_rows(int count, const Vector* post_norm, const Vector& norm, bool quantized) {
        const ActRows y = activations(d.y_, count, hidden);
        for_rows(pool, count, quantized ? kLineRows : 1, [&](int row) {
            float* x_row = d.x_ + std::size_t(row) * hidden;
            float* y_row = d.y_ + std::size_t(row) * hidden;
            if (post_norm) d.rows_.add_rms_norm(y_row, post_norm->data(), hidden, spec.norm_eps, x_row);
            d.rows_.rms_norm(x_row, norm.data(), hidden, spec.norm_eps, y_row);
            if (quantized) d.matmul_.quantize_row(y, row);
        });
    }

    const Vector* post_ffn_norm(int layer) const {
        return spec.post_norms && layer >= 0 ? &d.weights_.layer(layer).post_ffn_norm : nullptr;
    }

    // Adds a product to x, or with post norms leaves it in y for the next norm_rows.
    void project(int thread, const PackedMatrix& w, const ActRows& in, const Vector& b) {
        const MatmulJob job{&w.view, spec.post_norms ? d.y_ : d.x_, std::size_t(hidden), bias(b), !spec.post_norms};
        matmul(d.matmul_, {&job, 1}, in, pool);
        end_phase(thread, d.profile.matmul);
    }

    // Queries, keys and values of all rows; the last two go into the cache.
    void compute_keys(int thread, int layer) {
        const LayerWeights& w = d.weights_.layer(layer);
        norm_rows(rows, post_ffn_norm(layer - 1), w.attn_norm, any_quantized({&w.q, &w.k, &w.v}));
        end_phase(thread, d.profile.other);

        const std::size_t stride = qkv;
        const MatmulJob jobs[] = {{&w.q.view, d.qkv_, stride, bias(w.q_bias), false},
                                  {&w.k.view, d.qkv_ + q, stride, bias(w.k_bias), false},
                                  {&w.v.view, d.qkv_ + q + kv, stride, bias(w.v_bias), false}};
        matmul(d.matmul_, jobs, activations(d.y_, rows, hidden), pool);
        end_phase(thread, d.profile.matmul);

        store_rows(w, layer);
        end_phase(thread, d.profile.other);
    }

    void attention_block(int thread, int layer) {
        const LayerWeights& w = d.weights_.layer(layer);
        const int count = rows_from(layer);
        if (count < rows && thread == 0)
            for (int i = 0; i < count; ++i)
                if (const int row = d.head_rows_[i]; row != i)  // else it is after i
                    std::copy_n(d.x_ + std::size_t(row) * hidden, hidden, d.x_ + std::size_t(i) * hidden);
        attend(thread, layer, count < rows ? d.head_units_ : d.units_);
        end_phase(thread, d.profile.attention);

        const ActRows attended = activations(d.attended_, count, q);
        if (is_quantized(w.o.view.type)) {
            quantize_rows(d.matmul_, attended, pool);
            end_phase(thread, d.profile.other);
        }
        project(thread, w.o, attended, w.o_bias);
    }

    void ffn_block(int thread, int layer) {
        const LayerWeights& w = d.weights_.layer(layer);
        const int count = rows_from(layer);
        norm_rows(count, spec.post_norms ? &w.post_attn_norm : nullptr, w.ffn_norm, any_quantized({&w.gate, &w.up}));
        end_phase(thread, d.profile.other);

        const MatmulJob jobs[] = {{&w.gate.view, d.gate_, std::size_t(ffn), bias(w.gate_bias), false},
                                  {&w.up.view, d.up_, std::size_t(ffn), bias(w.up_bias), false}};
        matmul(d.matmul_, jobs, activations(d.y_, count, hidden), pool);
        end_phase(thread, d.profile.matmul);

        const ActRows gated = activations(d.gate_, count, ffn);
        const bool quantized = is_quantized(w.down.view.type);
        const auto activate =
            spec.activation == Activation::silu ? d.rows_.silu_times : d.rows_.gelu_tanh_times;
        for_rows(pool, count, quantized ? kLineRows : 1, [&](int row) {
            activate(d.gate_ + std::size_t(row) * ffn, d.up_ + std::size_t(row) * ffn, ffn);
            if (quantized) d.matmul_.quantize_row(gated, row);
        });
        end_phase(thread, d.profile.other);
        project(thread, w.down, gated, w.down_bias);
    }

    // Norms and rotates queries and keys, and writes keys and values into the cache.
    void store_rows(const LayerWeights& w, int layer) {
        const Rope& rope = local(layer) ? d.rope_local_ : d.rope_;
        for_rows(pool, rows, 1, [&](int row) { store_row(w, layer, rope, row, d.item_of_row_[row]); });
    }

    bool local(int layer) const { return spec.layer_windows[layer] > 0 && !(spec.rope_local == spec.rope); }

    void store_row(const LayerWeights& w, int layer, const Rope& rope, int row, int item) {
        float* heads = d.qkv_ + std::size_t(row) * qkv;
        const std::size_t pairs = rope.inv_freq.size();
        for (int head = 0; head < spec.num_heads + spec.num_kv_heads; ++head) {
            float* values = heads + std::size_t(head) * spec.head_dim;
            const Vector& norm = head < spec.num_heads ? w.q_norm : w.k_norm;
            if (spec.qk_norm) d.rows_.rms_norm(values, norm.data(), spec.head_dim, spec.norm_eps, values);
            d.rows_.rotate(values, rope.cosines + row * pairs, rope.sines + row * pairs, static_cast<int>(pairs));
        }
        const CacheShape& cache = d.cache_;
        const int position = input.positions[row], slot = position % cache.head.block_size;
        const int block = table_of(item, layer)[position / cache.head.block_size * d.attention_shape_.table_stride];
        std::uint8_t* keys = d.cache_memory_->data() + block * cache.block_bytes + cache.slot_of[layer] * cache.layer_bytes;
        for (int head = 0; head < spec.num_kv_heads; ++head, keys += cache.head.next_head()) {
            const float* key = heads + q + std::size_t(head) * spec.head_dim;
            d.attention_.store_key(cache.head, key, slot, keys);
            d.attention_.store_value(cache.head, key + kv, slot, keys + cache.head.values());
        }
    }

    // The item's first block of the layer's group; its others follow in strides.
    const std::int32_t* table_of(int item, int layer) const {
        return input.block_tables.data() + input.table_offsets[item] + d.cache_.group_of[layer];
    }

    // A thread takes its next unit early, so that it can ask for what the memory has of it; but not one of the last, which
    // another may be free for.
    void attend(int thread, int layer, const std::vector<RowUnit>& units) {
        float* const scratch = d.scratch_ + d.scratch_stride_ * thread;
        const auto count = static_cast<std::int64_t>(units.size());
        std::int64_t index = pool.claim(1);
        while (index < count) {
            AttentionUnit unit = attention_unit(units[index], layer), next;
            const bool early = index + pool.size() < count;
            if (early) index = pool.claim(1);
            if (early && index < count) {
                next = attention_unit(units[index], layer);
                unit.next = &next;
            }
            d.attention_.attend(d.attention_shape_, unit, scratch);
            if (!early) index = pool.claim(1);
        }
    }

    AttentionUnit attention_unit(const RowUnit& planned, int layer) const {
        const CacheShape& cache = d.cache_;
        const std::size_t head_floats = std::size_t(planned.head) * spec.group() * spec.head_dim;
        AttentionUnit unit;
        unit.q = d.qkv_ + std::size_t(planned.row) * qkv + head_floats;
        unit.out = d.attended_ + std::size_t(planned.out) * q + head_floats;
        unit.kv_heads = planned.heads;
        unit.rows = planned.rows;
        unit.first_position = input.positions[planned.row];
        unit.window = spec.layer_windows[layer];
        unit.table = table_of(planned.item, layer);
        unit.keys = d.cache_memory_->data() + cache.slot_of[layer] * cache.layer_bytes + planned.head * cache.head.next_head();
        return unit;
    }

    // The last layer's post norm.
    void finish_rows(int thread) {
        const Vector& norm = *post_ffn_norm(spec.num_layers - 1);
        for_rows(pool, head_rows, 1, [&](int row) {
            const std::size_t at = std::size_t(row) * hidden;
            d.rows_.add_rms_norm(d.y_ + at, norm.data(), hidden, spec.norm_eps, d.x_ + at);
        });
        end_phase(thread, d.profile.other);
    }

    // Logits of `count` of the head rows, and their draws.
    void head_piece(int thread, int begin, int count) {
        const MatrixView& head = d.weights_.lm_head();
        const ActRows y = activations(d.y_, count, hidden);
        for_rows(pool, count, is_quantized(head.type) ? kLineRows : 1, [&](int i) {
            const float* x = d.x_ + std::size_t(begin + i) * hidden;
            d.rows_.rms_norm(x, d.weights_.final_norm().data(), hidden, spec.norm_eps, d.y_ + std::size_t(i) * hidden);
            if (is_quantized(head.type)) d.matmul_.quantize_row(y, i);
        });
        end_phase(thread, d.profile.other);

        const std::size_t vocab = spec.vocab_size;
        const MatmulJob job{&head, d.logits_, vocab, nullptr, false};
        matmul(d.matmul_, {&job, 1}, y, pool);
        end_phase(thread, d.profile.matmul);

        if (spec.logit_softcap > 0.0f) {
            const auto cap = [&](int i) { d.rows_.softcap(d.logits_ + i * vocab, spec.vocab_size, spec.logit_softcap); };
            for_rows(pool, count, 1, cap);
            end_phase(thread, d.profile.other);
        }
        draw(thread, begin, count);
        end_phase(thread, d.profile.sampling);
    }

    void draw(int thread, int begin, int count) {
        const std::size_t vocab = spec.vocab_size;
        const int first = d.first_draw_[begin], last = d.first_draw_[begin + count];
        pool.for_each_piece(last - first, 1, [&](std::int64_t offset, std::int64_t) {
            const int index = d.draw_order_[first + offset];
            const Draw& draw = input.draws[index];
            const auto row = std::lower_bound(d.head_rows_.begin() + begin, d.head_rows_.begin() + begin + count, draw.row);
            const float* logits = d.logits_ + (row - d.head_rows_.begin() - begin) * vocab;
            d.samplers_[thread]->sample(logits, draw, (*output.results)[index]);
            if (output.logits) std::copy(logits, logits + vocab, output.logits + index * vocab);
        });
    }
};

void Decoder::step(const StepInput& input, const StepOutput& output) {
    if (limits_.max_rows == 0) throw std::logic_error("step() before reserve()");
    plan_draws(input);
    plan_rows(input);
    Pass pass{*this, input, output, std::chrono::steady_clock::now()};
    const auto begin = pass.lap;
    step_times_.begin();
    pool_.run([&](int thread) { pass.run(thread); });
    step_times_.end();
    profile.total += std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    ++profile.steps;
}

}  // namespace chairlift
