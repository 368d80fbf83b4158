// A step as the scheduler plans it: from the items of a StepPlan to the flat arrays of the core, and from what was drawn
// to a StepResult. The Python of a step of hundreds of decodes would else be a large part of it.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <span>
#include <unordered_map>
#include <vector>

#include "step.h"

namespace chairlift {

class PlanReader {
public:
    // `items` are of the type StepItem (core/plan.py); `previous` are the tokens that the step before drew, by item, for
    // which negative tokens stand. Throws type_error, and std::invalid_argument for a number that means nothing; what
    // the numbers say is for check_step, but for those that decide how much there is to read: these keep within `limits`.
    // The result is good until the next call.
    StepInput read(const nanobind::tuple& items, const nanobind::tuple& previous, const StepLimits& limits);

    // Where the draws of the last plan leave what they find: one result a draw.
    std::vector<DrawResult>& results() { return results_; }

    // StepResult's tokens, logprobs and prompt_logprobs. `scored` makes a TokenLogprob of its four fields.
    nanobind::tuple drawn(const nanobind::object& scored) const;

private:
    // What an item asked for: in order, draws that only score, `samples` from one row, one from the row of each draft.
    struct Asked {
        int scores, samples, drafts;
        bool logprobs;
    };
    // The part of each list that belongs to a draw, while the lists still grow.
    struct Lists {
        std::size_t history = 0, history_size = 0, bias = 0, bias_size = 0, banned = 0, banned_size = 0;
    };
    // A SequenceInfo and its SamplingParams, as far as draws need them.
    struct Sequence {
        explicit Sequence(PyObject* info);
        int num_prompt_logprobs() const;  // best tokens wanted with each prompt token

        nanobind::object info;  // keeps the object, by whose address it is known
        Draw draw;              // what is the same in all draws of the sequence
        nanobind::object params, bias, stop_ids;
        int num_prompt = 0, min_tokens = 0;
    };

    const Sequence& sequence(PyObject* info);
    void read_item(PyObject* item, const nanobind::tuple& previous, const StepLimits& limits);
    void check(const Asked& asked, int tokens, const StepLimits& limits) const;
    void read_scores(PyObject* targets, int first_row, int num_logprobs);
    void add_draws(const Asked& asked, const Sequence& sequence, int row, int position, const Lists& shared);
    Lists read_lists(PyObject* history, const Sequence& sequence, const nanobind::tuple& previous);
    void ban(const Sequence& sequence, int position, Lists& lists);
    void append(PyObject* numbers, std::vector<std::int32_t>& to);
    void append_known(PyObject* tokens, const nanobind::tuple& previous, std::vector<std::int32_t>& to);
    std::int32_t draw_of_step_before(std::int32_t token, const nanobind::tuple& previous);
    void make_room_for_results();
    nanobind::object entry(const nanobind::object& scored, std::size_t draw) const;

    int vocab_size_ = 0;
    // By their SequenceInfo, those of the last plan: what never changes is read from Python once.
    std::unordered_map<PyObject*, Sequence> sequences_, sequences_before_;
    std::vector<std::int32_t> tokens_, positions_, item_rows_, block_tables_, table_offsets_;
    std::vector<std::int32_t> history_, bias_ids_, banned_, previous_;
    std::vector<float> bias_values_;
    std::vector<Draw> draws_;
    std::vector<Lists> lists_;  // of each draw
    std::vector<Asked> asked_;  // by each item
    std::vector<DrawResult> results_;
    std::vector<std::int32_t> top_ids_;
    std::vector<float> top_logprobs_;
    bool flattened_ = false;  // whether previous_ is that of this plan
};

}  // namespace chairlift
