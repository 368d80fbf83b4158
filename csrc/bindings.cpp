// The module chairlift._native, as _native.pyi describes it. Arrays from Python are checked here for type and length,
// and what they hold by check_step; errors become ValueError.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <optional>

#include "decoder.h"
#include "plan_from_python.h"
#include "quantize.h"
#include "spec_from_python.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace chairlift {

namespace {

template <class T>
using Array = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
template <class T>
using Matrix = nb::ndarray<const T, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

template <class T>
std::span<const T> span(const Array<T>& array) {
    return {array.data(), array.size()};
}

// A new numpy array, filled with `value`.
template <class T, class... Sizes>
nb::ndarray<nb::numpy, T> new_array(T value, Sizes... sizes) {
    const std::size_t shape[] = {static_cast<std::size_t>(sizes)...};
    std::size_t count = 1;
    for (std::size_t size : shape) count *= size;
    T* data = new T[count];
    std::fill(data, data + count, value);
    nb::capsule owner(data, [](void* p) noexcept { delete[] static_cast<T*>(p); });
    return nb::ndarray<nb::numpy, T>(data, sizeof...(sizes), shape, owner);
}

// The columns of `sampling`, held for as long as the draws point into them.
struct DrawColumns {
    Array<std::int32_t> row, forced, index, position, top_k, num_logprobs, history_prompt;
    Array<std::uint64_t> seed;
    Array<float> temperature, top_p, min_p, repetition, presence, frequency;
    Array<std::int32_t> history, history_offsets, bias_ids, bias_offsets, banned, banned_offsets;
    Array<float> bias_values;

    explicit DrawColumns(const nb::dict& sampling) {
        auto take = [&]<class T>(const char* name, Array<T>& column) {
            if (!sampling.contains(name)) throw std::invalid_argument(std::string("sampling has no ") + name);
            if (!nb::try_cast(sampling[name], column, false))
                throw std::invalid_argument(std::string("sampling.") + name +
                                            " must be a contiguous one-dimensional array of the documented type");
        };
        take("row", row), take("forced", forced), take("index", index), take("position", position);
        take("top_k", top_k), take("num_logprobs", num_logprobs), take("history_prompt", history_prompt);
        take("seed", seed), take("temperature", temperature), take("top_p", top_p), take("min_p", min_p);
        take("repetition", repetition), take("presence", presence), take("frequency", frequency);
        take("history", history), take("history_offsets", history_offsets);
        take("bias_ids", bias_ids), take("bias_values", bias_values), take("bias_offsets", bias_offsets);
        take("banned", banned), take("banned_offsets", banned_offsets);
        check();
    }

    void check() const {
        const std::size_t count = row.size();
        auto same = [&](const char* name, std::size_t size) {
            if (size != count)
                throw std::invalid_argument(std::string("sampling.") + name + " must hold " + std::to_string(count) +
                                            " values, got " + std::to_string(size));
        };
        same("forced", forced.size()), same("index", index.size()), same("position", position.size());
        same("top_k", top_k.size()), same("num_logprobs", num_logprobs.size());
        same("history_prompt", history_prompt.size()), same("seed", seed.size());
        same("temperature", temperature.size()), same("top_p", top_p.size()), same("min_p", min_p.size());
        same("repetition", repetition.size()), same("presence", presence.size()), same("frequency", frequency.size());
        if (bias_ids.size() != bias_values.size())
            throw std::invalid_argument("sampling.bias_ids and bias_values differ in length");
        check_offsets("history_offsets", span(history_offsets), count, history.size());
        check_offsets("bias_offsets", span(bias_offsets), count, bias_ids.size());
        check_offsets("banned_offsets", span(banned_offsets), count, banned.size());
    }

    void fill(std::vector<Draw>& draws) const {
        draws.resize(row.size());
        for (std::size_t i = 0; i < draws.size(); ++i) {
            Draw& draw = draws[i];
            draw.row = row.data()[i];
            draw.forced = forced.data()[i];
            draw.seed = seed.data()[i];
            draw.index = index.data()[i];
            draw.position = position.data()[i];
            draw.temperature = temperature.data()[i];
            draw.top_k = top_k.data()[i];
            draw.top_p = top_p.data()[i];
            draw.min_p = min_p.data()[i];
            draw.repetition = repetition.data()[i];
            draw.presence = presence.data()[i];
            draw.frequency = frequency.data()[i];
            draw.num_logprobs = num_logprobs.data()[i];
            draw.history_prompt = history_prompt.data()[i];
            draw.history = part(history, history_offsets, i);
            draw.bias_ids = part(bias_ids, bias_offsets, i);
            draw.bias_values = part(bias_values, bias_offsets, i);
            draw.banned = part(banned, banned_offsets, i);
        }
    }

    template <class T>
    static std::span<const T> part(const Array<T>& values, const Array<std::int32_t>& offsets, std::size_t i) {
        const std::size_t begin = offsets.data()[i], end = offsets.data()[i + 1];
        return {values.data() + begin, end - begin};
    }
};

KvType parse_kv_type(const std::string& name) {
    if (name == "f32") return KvType::f32;
    if (name == "f16") return KvType::f16;
    if (name == "bf16") return KvType::bf16;
    if (name == "int8") return KvType::int8;
    throw std::invalid_argument("kv_dtype must be f32, f16, bf16 or int8, got " + name);
}

using Logits = nb::ndarray<float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Groups = std::vector<std::vector<int>>;  // the layers that share a block

Type packed_type(const std::optional<std::string>& wanted, Type stored) { return wanted ? parse_type(*wanted) : stored; }

class Model {
public:
    Model(const nb::dict& spec, int threads, const std::string& isa)
        : decoder_(spec_from_python(spec), threads, parse_isa(isa)) {}

    void set_tensor(const std::string& name, const std::string& type, const std::vector<std::int64_t>& shape,
                    const Array<std::uint8_t>& data, const std::optional<std::string>& packed) {
        const Type parsed = parse_type(type), wanted = packed_type(packed, parsed);
        nb::gil_scoped_release unlocked;
        const Busy busy(*this);
        decoder_.set_tensor(name, parsed, shape, span(data), wanted);
    }

    void lay_out(const std::vector<std::pair<std::string, std::string>>& tensors) {
        std::vector<NamedType> types;
        for (const auto& [name, type] : tensors) types.emplace_back(name, parse_type(type));
        decoder_.lay_out(types);
    }

    bool read_packed(int file, std::uint64_t offset, std::uint64_t checksum) {
        nb::gil_scoped_release unlocked;
        const Busy busy(*this);
        return decoder_.read_packed(file, offset, checksum);
    }

    nb::ndarray<nb::numpy, const std::uint8_t> packed() const {
        const std::shared_ptr<AlignedBuffer>& memory = decoder_.packed().memory();
        const std::size_t shape[] = {memory->size()};
        return {memory->data(), 1, shape, owner_of(memory)};
    }

    std::uint64_t packed_checksum() {
        nb::gil_scoped_release unlocked;
        const Busy busy(*this);
        return decoder_.packed_checksum();
    }

    void finalize() { decoder_.finalize(); }
    std::size_t weight_bytes() const { return decoder_.weight_bytes(); }
    std::size_t kv_block_bytes(int block_size, const std::string& kv_dtype, const Groups& groups) const {
        return CacheShape(decoder_.spec(), groups, 1, block_size, parse_kv_type(kv_dtype)).block_bytes;
    }
    std::size_t workspace_bytes(int max_rows, int max_samples, const std::string& kv_dtype) const {
        return decoder_.workspace_bytes(max_rows, max_samples, parse_kv_type(kv_dtype));
    }

    void reserve(int num_blocks, int block_size, const std::string& kv_dtype, const Groups& groups, int max_rows,
                 int max_samples) {
        const CacheShape cache(decoder_.spec(), groups, num_blocks, block_size, parse_kv_type(kv_dtype));
        nb::gil_scoped_release unlocked;
        const Busy busy(*this);
        decoder_.reserve(cache, max_rows, max_samples);
        draws_.reserve(max_samples);
        results_.reserve(max_samples);
    }

    nb::ndarray<nb::numpy, std::uint8_t> cache() const {
        const std::shared_ptr<AlignedBuffer> memory = decoder_.cache_memory();
        if (!memory) throw std::logic_error("cache() before reserve()");
        const std::size_t bytes = decoder_.cache().block_bytes, shape[] = {memory->size() / bytes, bytes};
        return {memory->data(), 2, shape, owner_of(memory)};
    }

    nb::dict step(const Array<std::int32_t>& tokens, const Array<std::int32_t>& positions,
                  const Array<std::int32_t>& item_rows, const Array<std::int32_t>& block_tables,
                  const Array<std::int32_t>& table_offsets, const nb::dict& sampling, bool return_logits) {
        const Busy busy(*this);
        const DrawColumns columns(sampling);
        if (columns.row.size() > static_cast<std::size_t>(decoder_.limits().max_samples))
            throw std::invalid_argument("bad step: more draws than were reserved");
        columns.fill(draws_);
        const StepInput input{span(tokens),       span(positions),     span(item_rows),
                              span(block_tables), span(table_offsets), draws_};
        check_step(input, decoder_.limits());

        std::size_t width = 0;
        for (const Draw& draw : draws_) width = std::max(width, static_cast<std::size_t>(std::max(draw.num_logprobs, 0)));
        auto top_ids = new_array<std::int32_t>(-1, draws_.size(), width);
        auto top_logprobs = new_array<float>(0.0f, draws_.size(), width);
        auto logits = new_array<float>(0.0f, return_logits ? draws_.size() : 0, decoder_.spec().vocab_size);
        results_.assign(draws_.size(), {});
        for (std::size_t i = 0; i < draws_.size(); ++i) {
            results_[i].top_ids = top_ids.data() + i * width;
            results_[i].top_logprobs = top_logprobs.data() + i * width;
        }
        {
            nb::gil_scoped_release unlocked;
            decoder_.step(input, {&results_, return_logits ? logits.data() : nullptr});
        }
        nb::dict out = drawn();
        out["top_ids"] = top_ids;
        out["top_logprobs"] = top_logprobs;
        if (return_logits) out["logits"] = logits;
        return out;
    }

    nb::tuple run(const nb::tuple& items, const nb::tuple& previous, const nb::object& scored,
                  const std::optional<Logits>& logits) {
        const Busy busy(*this);
        const StepInput input = reader_.read(items, previous, decoder_.limits());
        check_step(input, decoder_.limits());
        const std::size_t vocab = decoder_.spec().vocab_size;
        if (logits && (logits->shape(0) != input.draws.size() || logits->shape(1) != vocab))
            throw std::invalid_argument("logits must be [" + std::to_string(input.draws.size()) + ", " +
                                        std::to_string(vocab) + "]");
        {
            nb::gil_scoped_release unlocked;
            decoder_.step(input, {&reader_.results(), logits ? logits->data() : nullptr});
        }
        return reader_.drawn(scored);
    }

    nb::dict profile(bool reset) {
        const Profile& p = decoder_.profile;
        nb::dict out;
        out["matmul"] = p.matmul;
        out["attention"] = p.attention;
        out["sampling"] = p.sampling;
        out["other"] = p.other;
        out["total"] = p.total;
        out["steps"] = static_cast<double>(p.steps);
        if (reset) decoder_.profile = {};
        return out;
    }

private:
    // Held while the decoder works: with the GIL released, a second thread of Python could come in.
    class Busy {
    public:
        explicit Busy(Model& model) : flag_(model.busy_) {
            if (flag_.exchange(true)) throw std::runtime_error("the model is at work in another thread");
        }
        ~Busy() { flag_ = false; }
        Busy(const Busy&) = delete;

    private:
        std::atomic<bool>& flag_;
    };

    // For a view that keeps the memory alive, whatever becomes of the model.
    static nb::capsule owner_of(const std::shared_ptr<AlignedBuffer>& memory) {
        return nb::capsule(new std::shared_ptr(memory),
                           [](void* p) noexcept { delete static_cast<std::shared_ptr<AlignedBuffer>*>(p); });
    }

    nb::dict drawn() const {
        auto tokens = new_array<std::int32_t>(-1, results_.size());
        auto logprobs = new_array<float>(0.0f, results_.size());
        auto ranks = new_array<std::int32_t>(0, results_.size());
        for (std::size_t i = 0; i < results_.size(); ++i) {
            tokens.data()[i] = results_[i].token;
            logprobs.data()[i] = results_[i].logprob;
            ranks.data()[i] = results_[i].rank;
        }
        nb::dict out;
        out["token"] = tokens;
        out["logprob"] = logprobs;
        out["rank"] = ranks;
        return out;
    }

    Decoder decoder_;
    PlanReader reader_;
    std::atomic<bool> busy_{false};
    std::vector<Draw> draws_;
    std::vector<DrawResult> results_;
};

std::vector<std::string> isa_names() {
    std::vector<std::string> names;
    for (Isa isa : available_isas()) names.emplace_back(isa_name(isa));
    return names;
}

nb::ndarray<nb::numpy, float> dequantize(const std::string& type, std::int64_t rows, std::int64_t cols,
                                         const Array<std::uint8_t>& data) {
    const Type parsed = parse_type(type);
    check_stored_size(parsed, rows, cols, data.size());
    auto out = new_array<float>(0.0f, rows, cols);
    const std::size_t row_bytes = stored_bytes(parsed, 1, cols);
    for (std::int64_t row = 0; row < rows; ++row)
        dequantize_row(parsed, data.data() + row * row_bytes, static_cast<int>(cols), out.data() + row * cols);
    return out;
}

nb::ndarray<nb::numpy, std::uint8_t> quantize(const Matrix<float>& values, const std::string& type) {
    const Type parsed = parse_type(type);
    if (!can_quantize_to(parsed)) throw std::invalid_argument("nothing is quantised to " + type);
    const std::size_t rows = values.shape(0), row_bytes = stored_bytes(parsed, 1, values.shape(1));
    auto out = new_array<std::uint8_t>(0, rows * row_bytes);
    const int cols = static_cast<int>(values.shape(1));
    for (std::size_t row = 0; row < rows; ++row)
        if (!quantize_row(parsed, values.data() + row * cols, cols, out.data() + row * row_bytes))
            throw std::invalid_argument("row " + std::to_string(row) + " cannot be quantised to " + type);
    return out;
}

nb::ndarray<nb::numpy, float> multiply(const Matrix<float>& x, const std::string& type, std::int64_t rows,
                                       std::int64_t cols, const Array<std::uint8_t>& data, const std::string& isa,
                                       int threads, const std::optional<std::string>& packed_as) {
    const int m = static_cast<int>(x.shape(0));
    if (static_cast<std::int64_t>(x.shape(1)) != cols)
        throw std::invalid_argument("x must have " + std::to_string(cols) + " columns, got " + std::to_string(x.shape(1)));
    const MatmulKernels& kernels = matmul_kernels(parse_isa(isa));
    const Type parsed = parse_type(type);
    ThreadPool pool(threads);
    const PackedMatrix packed = pack(parsed, rows, cols, span(data), packed_type(packed_as, parsed), pool);
    auto out = new_array<float>(0.0f, m, rows);
    if (m == 0) return out;
    const bool quantized = is_quantized(packed.view.type);
    const ActBuffer buffer(m, static_cast<int>(cols));
    const ActRows rows_of_x = buffer.rows(x.data(), cols, m, static_cast<int>(cols));
    const MatmulJob job{&packed.view, out.data(), static_cast<std::size_t>(rows), nullptr, false};
    pool.run([&](int) {
        if (quantized) quantize_rows(kernels, rows_of_x, pool);
        pool.barrier();
        matmul(kernels, {&job, 1}, rows_of_x, pool);
    });
    return out;
}

}  // namespace

}  // namespace chairlift

NB_MODULE(_native, m) {
    using chairlift::Model;
    m.def("available_isas", &chairlift::isa_names);
    m.def("dequantize", &chairlift::dequantize, "type"_a, "rows"_a, "cols"_a, "data"_a.noconvert());
    m.def("matmul", &chairlift::multiply, "x"_a.noconvert(), "type"_a, "rows"_a, "cols"_a, "data"_a.noconvert(),
          "isa"_a, "threads"_a, "packed"_a = nb::none());
    m.def("quantize", &chairlift::quantize, "values"_a.noconvert(), "type"_a);
    m.def("packed_bytes", [](const std::string& type, std::int64_t rows, std::int64_t cols) {
        return chairlift::packed_view(chairlift::parse_type(type), rows, cols).bytes();
    }, "type"_a, "rows"_a, "cols"_a);
    nb::class_<Model>(m, "Model")
        .def(nb::init<const nb::dict&, int, const std::string&>(), "spec"_a, "threads"_a, "isa"_a = "auto")
        .def("set_tensor", &Model::set_tensor, "name"_a, "type"_a, "shape"_a, "data"_a.noconvert(),
             "packed"_a = nb::none())
        .def("lay_out", &Model::lay_out, "tensors"_a)
        .def("read_packed", &Model::read_packed, "file"_a, "offset"_a, "checksum"_a)
        .def("packed", &Model::packed)
        .def("packed_checksum", &Model::packed_checksum)
        .def("finalize", &Model::finalize)
        .def_prop_ro("weight_bytes", &Model::weight_bytes)
        .def("kv_block_bytes", &Model::kv_block_bytes, "block_size"_a, "kv_dtype"_a, "groups"_a)
        .def("workspace_bytes", &Model::workspace_bytes, "max_rows"_a, "max_samples"_a, "kv_dtype"_a)
        .def("reserve", &Model::reserve, "num_blocks"_a, "block_size"_a, "kv_dtype"_a, "groups"_a, "max_rows"_a,
             "max_samples"_a)
        .def("cache", &Model::cache)
        .def("step", &Model::step, "tokens"_a.noconvert(), "positions"_a.noconvert(), "item_rows"_a.noconvert(),
             "block_tables"_a.noconvert(), "table_offsets"_a.noconvert(), "sampling"_a, "return_logits"_a = false)
        .def("run", &Model::run, "items"_a, "previous"_a, "scored"_a,
             "logits"_a.noconvert() = nb::none())
        .def("profile", &Model::profile, "reset"_a = false);
}
