#include "plan_from_python.h"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <utility>

namespace nb = nanobind;

namespace chairlift {

namespace {

constexpr float kSmallest = 1.2e-38f;  // a divisor below it would be 0 in f32

// The fields of a StepItem, in their order.
enum Field { kSequence, kStart, kTokenIds, kBlockTable, kNumSamples, kHistory, kPromptTargets, kDiscard, kNumDrafts, kFields };

PyObject* field(PyObject* item, Field name) { return PyTuple_GET_ITEM(item, name); }

// An attribute's name, made once.
class Name {
public:
    explicit Name(const char* text) : text_(PyUnicode_InternFromString(text)) {}
    nb::object of(PyObject* object) const {
        PyObject* value = PyObject_GetAttr(object, text_);
        if (!value) throw nb::python_error();
        return nb::steal(value);
    }

private:
    PyObject* text_;  // for as long as the process lives
};

std::int32_t int32(PyObject* number) {
    if (!PyLong_Check(number)) throw nb::type_error("a plan's numbers must be of type int");
    int overflow = 0;
    const long value = PyLong_AsLongAndOverflow(number, &overflow);
    if (overflow != 0 || value < INT32_MIN || value > INT32_MAX)
        throw std::invalid_argument("a number of the plan does not fit 32 bits");
    return static_cast<std::int32_t>(value);
}

std::int32_t int32(const nb::object& number) { return int32(number.ptr()); }

// How many of the best tokens are wanted: memory is taken for them before check_step sees the number.
std::int32_t num_best(const nb::object& number, std::int32_t otherwise) {
    const std::int32_t value = number.is_none() ? otherwise : int32(number);
    if (value < -1 || value > kMostLogprobs)
        throw std::invalid_argument("bad step: num_logprobs " + std::to_string(value) + " is not in -1.." +
                                    std::to_string(kMostLogprobs));
    return value;
}

float real(const nb::object& number) {
    const double value = PyFloat_AsDouble(number.ptr());
    if (value == -1.0 && PyErr_Occurred()) throw nb::python_error();
    return static_cast<float>(value);
}

std::uint64_t uint64(const nb::object& number) {
    const unsigned long long value = PyLong_AsUnsignedLongLong(number.ptr());
    if (value == ~0ULL && PyErr_Occurred()) throw nb::python_error();
    return value;
}

void require_tuple(PyObject* object) {
    if (!PyTuple_Check(object)) throw nb::type_error("a plan's lists must be tuples");
}

// A tuple while it is filled, one element after the other.
class NewTuple {
public:
    explicit NewTuple(std::size_t size) : tuple_(nb::steal<nb::tuple>(PyTuple_New(static_cast<Py_ssize_t>(size)))) {
        if (!tuple_.is_valid()) throw nb::python_error();
    }
    void add(nb::object value) { PyTuple_SET_ITEM(tuple_.ptr(), filled_++, value.release().ptr()); }
    nb::tuple done() { return std::move(tuple_); }

private:
    nb::tuple tuple_;
    Py_ssize_t filled_ = 0;
};

nb::object python_int(long value) {
    PyObject* number = PyLong_FromLong(value);
    if (!number) throw nb::python_error();
    return nb::steal(number);
}

}  // namespace

PlanReader::Sequence::Sequence(PyObject* given) : info(nb::borrow(given)) {
    static const Name index_name("index"), params_name("params"), seed_name("seed"), num_prompt_name("num_prompt"),
        stop_ids_name("stop_ids"), num_logprobs_name("num_logprobs");
    static const Name temperature("temperature"), top_k("top_k"), top_p("top_p"), min_p("min_p"),
        repetition("repetition_penalty"), presence("presence_penalty"), frequency("frequency_penalty"),
        min_tokens_name("min_tokens"), bias_name("logit_bias");
    params = params_name.of(given);
    num_prompt = int32(num_prompt_name.of(given));
    draw.index = int32(index_name.of(given));
    draw.seed = uint64(seed_name.of(given));
    draw.num_logprobs = num_best(num_logprobs_name.of(given), -1);
    PyObject* from = params.ptr();
    draw.temperature = real(temperature.of(from));
    draw.top_k = std::max(0, int32(top_k.of(from)));
    draw.top_p = real(top_p.of(from));
    draw.min_p = real(min_p.of(from));
    draw.repetition = std::max(kSmallest, real(repetition.of(from)));
    draw.presence = real(presence.of(from));
    draw.frequency = real(frequency.of(from));
    bias = bias_name.of(from);
    if (!PyDict_Check(bias.ptr())) throw nb::type_error("logit_bias must be a dict");
    min_tokens = int32(min_tokens_name.of(from));
    if (min_tokens > 0) stop_ids = stop_ids_name.of(given);
}

int PlanReader::Sequence::num_prompt_logprobs() const {
    static const Name name("prompt_logprobs");
    return num_best(name.of(params.ptr()), 0);
}

StepInput PlanReader::read(const nb::tuple& items, const nb::tuple& previous, const StepLimits& limits) {
    vocab_size_ = limits.vocab_size;
    for (auto* list : {&tokens_, &positions_, &block_tables_, &history_, &bias_ids_, &banned_}) list->clear();
    bias_values_.clear(), draws_.clear(), lists_.clear(), asked_.clear();
    item_rows_.assign(1, 0), table_offsets_.assign(1, 0);
    std::swap(sequences_, sequences_before_);
    sequences_.clear();
    flattened_ = false;
    for (std::size_t i = 0; i < items.size(); ++i) read_item(PyTuple_GET_ITEM(items.ptr(), i), previous, limits);
    sequences_before_.clear();
    for (std::size_t i = 0; i < draws_.size(); ++i) {
        const Lists& at = lists_[i];
        draws_[i].history = std::span(history_).subspan(at.history, at.history_size);
        draws_[i].bias_ids = std::span(bias_ids_).subspan(at.bias, at.bias_size);
        draws_[i].bias_values = std::span(bias_values_).subspan(at.bias, at.bias_size);
        draws_[i].banned = std::span(banned_).subspan(at.banned, at.banned_size);
    }
    make_room_for_results();
    return {tokens_, positions_, item_rows_, block_tables_, table_offsets_, draws_};
}

void PlanReader::read_item(PyObject* item, const nb::tuple& previous, const StepLimits& limits) {
    require_tuple(item);
    if (PyTuple_GET_SIZE(item) != kFields) throw nb::type_error("a plan's items must be of type StepItem");
    const int first = static_cast<int>(tokens_.size()), start = int32(field(item, kStart));
    if (start < 0 || start >= limits.max_positions)
        throw std::invalid_argument("bad step: position " + std::to_string(start) + " is not in 0.." +
                                    std::to_string(limits.max_positions - 1));
    append_known(field(item, kTokenIds), previous, tokens_);
    const int end = static_cast<int>(tokens_.size());
    for (int row = first; row < end; ++row) positions_.push_back(start + (row - first));
    append(field(item, kBlockTable), block_tables_);
    item_rows_.push_back(end);
    table_offsets_.push_back(static_cast<std::int32_t>(block_tables_.size()));

    PyObject* targets = field(item, kPromptTargets);
    require_tuple(targets);
    Asked asked{static_cast<int>(PyTuple_GET_SIZE(targets)), int32(field(item, kNumSamples)), int32(field(item, kNumDrafts)), false};
    check(asked, end - first, limits);
    if (asked.samples + asked.scores > 0) {
        const Sequence& sequence = this->sequence(field(item, kSequence));
        asked.logprobs = sequence.draw.num_logprobs >= 0;
        if (asked.scores > 0) read_scores(targets, first, sequence.num_prompt_logprobs());
        const int last = end - 1 - asked.drafts;
        if (asked.samples > 0)
            add_draws(asked, sequence, last, start + (last - first) + 1, read_lists(field(item, kHistory), sequence, previous));
    }
    asked_.push_back(asked);
}

const PlanReader::Sequence& PlanReader::sequence(PyObject* info) {
    if (const auto known = sequences_.find(info); known != sequences_.end()) return known->second;
    if (auto before = sequences_before_.extract(info)) return sequences_.insert(std::move(before)).position->second;
    return sequences_.try_emplace(info, info).first->second;
}

void PlanReader::check(const Asked& asked, int tokens, const StepLimits& limits) const {
    const auto fail = [](const std::string& what) { throw std::invalid_argument("bad step: " + what); };
    if (asked.scores > tokens)
        fail(std::to_string(asked.scores) + " tokens to score after " + std::to_string(tokens));
    if (asked.samples < 0 || asked.drafts < 0 || (asked.drafts > 0 && (asked.samples != 1 || asked.drafts >= tokens)))
        fail(std::to_string(asked.samples) + " samples and " + std::to_string(asked.drafts) + " drafts of " +
             std::to_string(tokens) + " tokens");
    const std::int64_t draws = std::int64_t(draws_.size()) + asked.scores + asked.samples + asked.drafts;
    if (draws > limits.max_samples)
        fail(std::to_string(draws) + " draws, and room for " + std::to_string(limits.max_samples) + " was reserved");
}

// What is scored needs nothing of that which shapes a draw.
void PlanReader::read_scores(PyObject* targets, int first_row, int num_logprobs) {
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(targets); ++i) {
        Draw draw;
        draw.row = first_row + static_cast<int>(i);
        draw.forced = int32(PyTuple_GET_ITEM(targets, i));
        if (draw.forced < 0) throw std::invalid_argument("bad step: forced token " + std::to_string(draw.forced));
        draw.num_logprobs = num_logprobs;
        draws_.push_back(draw);
        lists_.push_back({});
    }
}

void PlanReader::add_draws(const Asked& asked, const Sequence& sequence, int row, int position, const Lists& shared) {
    for (int i = 0; i < asked.samples + asked.drafts; ++i) {
        const int draft = std::max(0, i - asked.samples + 1);  // counted from 1; 0 for a sample
        Draw draw = sequence.draw;
        Lists lists = shared;
        draw.row = row + draft;
        draw.position = position + draft;
        draw.index = static_cast<std::int32_t>(static_cast<std::uint32_t>(draw.index) + std::min(i, asked.samples - 1));
        draw.history_prompt = std::min(sequence.num_prompt, static_cast<int>(shared.history_size));
        ban(sequence, draw.position, lists);
        draws_.push_back(draw);
        lists_.push_back(lists);
    }
}

// Ids past the vocabulary are never drawn, so there is nothing to favour or ban.
PlanReader::Lists PlanReader::read_lists(PyObject* history, const Sequence& sequence, const nb::tuple& previous) {
    Lists lists;
    lists.history = history_.size();
    append_known(history, previous, history_);
    lists.history_size = history_.size() - lists.history;
    lists.bias = bias_ids_.size();
    PyObject *token, *value;
    for (Py_ssize_t at = 0; PyDict_Next(sequence.bias.ptr(), &at, &token, &value);) {
        if (int32(token) >= vocab_size_) continue;
        bias_ids_.push_back(int32(token));
        bias_values_.push_back(real(nb::borrow(value)));
    }
    lists.bias_size = bias_ids_.size() - lists.bias;
    return lists;
}

// The stop tokens, while there are too few others.
void PlanReader::ban(const Sequence& sequence, int position, Lists& lists) {
    lists.banned = banned_.size();
    if (sequence.min_tokens <= 0 || std::int64_t{position} - sequence.num_prompt >= sequence.min_tokens) return;
    for (nb::handle token : nb::iter(sequence.stop_ids))
        if (const std::int32_t id = int32(token.ptr()); id < vocab_size_) banned_.push_back(id);
    lists.banned_size = banned_.size() - lists.banned;
}

void PlanReader::append(PyObject* numbers, std::vector<std::int32_t>& to) {
    require_tuple(numbers);
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(numbers); ++i) to.push_back(int32(PyTuple_GET_ITEM(numbers, i)));
}

void PlanReader::append_known(PyObject* tokens, const nb::tuple& previous, std::vector<std::int32_t>& to) {
    const std::size_t begin = to.size();
    append(tokens, to);
    for (std::size_t i = begin; i < to.size(); ++i)
        if (to[i] < 0) to[i] = draw_of_step_before(to[i], previous);
}

std::int32_t PlanReader::draw_of_step_before(std::int32_t token, const nb::tuple& previous) {
    if (!flattened_) {
        previous_.clear();
        for (std::size_t i = 0; i < previous.size(); ++i) append(PyTuple_GET_ITEM(previous.ptr(), i), previous_);
        flattened_ = true;
    }
    const std::size_t which = -1 - std::int64_t{token};
    if (which >= previous_.size())
        throw std::invalid_argument("token " + std::to_string(token) + ": the step before drew " +
                                    std::to_string(previous_.size()) + " tokens");
    return std::max(0, previous_[which]);  // after broken logits any token will do: the result is not used
}

void PlanReader::make_room_for_results() {
    std::size_t total = 0;
    for (const Draw& draw : draws_) total += std::max(0, draw.num_logprobs);
    top_ids_.assign(total, -1);
    top_logprobs_.assign(total, 0.0f);
    results_.assign(draws_.size(), {});
    std::size_t at = 0;
    for (std::size_t i = 0; i < draws_.size(); ++i) {
        results_[i].top_ids = top_ids_.data() + at;
        results_[i].top_logprobs = top_logprobs_.data() + at;
        at += std::max(0, draws_[i].num_logprobs);
    }
}

nb::tuple PlanReader::drawn(const nb::object& scored) const {
    const auto entries = [&](std::size_t begin, std::size_t end) {
        NewTuple tuple(end - begin);
        for (std::size_t draw = begin; draw < end; ++draw) tuple.add(entry(scored, draw));
        return tuple.done();
    };
    const bool any_scores = std::any_of(asked_.begin(), asked_.end(), [](const Asked& asked) { return asked.scores > 0; });
    NewTuple tokens(asked_.size()), logprobs(asked_.size()), prompt_logprobs(any_scores ? asked_.size() : 0);
    std::size_t at = 0;
    for (const Asked& asked : asked_) {
        const std::size_t first = at + asked.scores;
        std::size_t end = first + asked.samples;
        for (int draft = 0; draft < asked.drafts && results_[end - 1].token == tokens_[draws_[end].row]; ++draft) ++end;
        NewTuple drawn(end - first);
        for (std::size_t draw = first; draw < end; ++draw) drawn.add(python_int(results_[draw].token));
        tokens.add(drawn.done());
        logprobs.add(entries(asked.logprobs ? first : end, end));
        if (any_scores) prompt_logprobs.add(entries(at, first));
        at = first + asked.samples + asked.drafts;
    }
    return nb::make_tuple(tokens.done(), logprobs.done(), prompt_logprobs.done());
}

nb::object PlanReader::entry(const nb::object& scored, std::size_t draw) const {
    const DrawResult& result = results_[draw];
    nb::list best;
    for (int i = 0; i < draws_[draw].num_logprobs && result.top_ids[i] >= 0; ++i)
        best.append(nb::make_tuple(result.top_ids[i], result.top_logprobs[i]));
    return scored(result.token, result.logprob, result.rank, nb::tuple(best));
}

}  // namespace chairlift
