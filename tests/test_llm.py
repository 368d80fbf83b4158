"""`LLM`, the engine in the caller's process, with the names and results that vLLM's users expect."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

import chairlift
from chairlift import LLM, SamplingParams
from chairlift.core.plan import Output, StepStats
from chairlift.errors import ConfigError, ParameterError, RequestRefused

GREEDY = SamplingParams(temperature=0, max_tokens=8)


@pytest.fixture(scope="module")
def llm(smollm2_path: Path) -> Iterator[LLM]:
    made = LLM(smollm2_path, kv_cache_memory="200MiB", max_model_len=1024, debug=True)
    yield made
    made.engine.executor.close()


def test_generate(llm: LLM) -> None:
    outputs = llm.generate(["The capital of France is", "1, 2, 3,"], GREEDY)
    assert [output.prompt for output in outputs] == ["The capital of France is", "1, 2, 3,"]
    first = outputs[0].outputs[0]
    assert first.text.startswith(" Paris")
    assert first.finish_reason == "length" and first.finished() and outputs[0].finished
    assert len(first.token_ids) == 8
    assert llm.get_tokenizer().decode(first.token_ids) == first.text


def test_one_prompt_ids_and_mappings(llm: LLM) -> None:
    ids = llm.get_tokenizer().encode("The capital of France is")
    expected = llm.generate("The capital of France is", GREEDY)[0].outputs[0].text
    for prompt in (ids, [ids], {"prompt_token_ids": ids}, [{"prompt": "The capital of France is"}]):
        assert llm.generate(prompt, GREEDY)[0].outputs[0].text == expected
    assert llm.generate([], GREEDY) == []


def test_parameters_for_each_prompt(llm: LLM) -> None:
    outputs = llm.generate(["a", "b"], [SamplingParams(max_tokens=1), SamplingParams(max_tokens=3)])
    assert [len(output.outputs[0].token_ids) for output in outputs] == [1, 3]
    with pytest.raises(ParameterError, match="sampling_params"):
        llm.generate(["a", "b"], [GREEDY])


def test_n_and_seed(llm: LLM) -> None:
    params = SamplingParams(n=3, seed=11, temperature=1.0, max_tokens=10, logprobs=2)
    first, again = (llm.generate("Once upon a time", params)[0] for _ in range(2))
    assert [c.text for c in first.outputs] == [c.text for c in again.outputs]
    assert len({c.text for c in first.outputs}) == 3
    assert [c.index for c in first.outputs] == [0, 1, 2]


def test_best_of(llm: LLM) -> None:
    """The best by mean logprob of the samples that n draws, best first; their logprobs only if asked for."""
    drawn = llm.generate("Once upon a time", SamplingParams(n=4, seed=5, max_tokens=10, logprobs=0))[0].outputs
    by_mean = sorted(drawn, key=lambda sample: -(sample.cumulative_logprob or 0.0) / len(sample.token_ids))
    chosen = llm.generate("Once upon a time", SamplingParams(n=2, best_of=4, seed=5, max_tokens=10))[0]
    assert [sample.token_ids for sample in chosen.outputs] == [sample.token_ids for sample in by_mean[:2]]
    assert [sample.index for sample in chosen.outputs] == [0, 1] and chosen.finished
    assert [sample.cumulative_logprob for sample in chosen.outputs] == [s.cumulative_logprob for s in by_mean[:2]]
    assert all(sample.logprobs is None for sample in chosen.outputs)
    params = SamplingParams(best_of=4, seed=5, max_tokens=10, logprobs=1)
    (best,) = llm.generate("Once upon a time", params)[0].outputs
    assert best.token_ids == by_mean[0].token_ids and best.logprobs is not None and len(best.logprobs) == 10


def test_beam_search(llm: LLM) -> None:
    """Results come best first, at least as likely as the greedy text, with the logprob that scoring them gives."""
    ids = llm.get_tokenizer().encode("The capital of France is")
    (result,) = llm.beam_search([ids], beam_width=3, max_tokens=6, ignore_eos=True)
    logprobs = [beam.cumulative_logprob or 0.0 for beam in result.outputs]
    assert logprobs == sorted(logprobs, reverse=True) and len({tuple(b.token_ids) for b in result.outputs}) == 3
    greedy = llm.generate([ids], SamplingParams(temperature=0, max_tokens=6, logprobs=0, ignore_eos=True))[0].outputs[0]
    assert logprobs[0] >= (greedy.cumulative_logprob or 0.0)
    for beam in result.outputs:
        assert (len(beam.token_ids), beam.finish_reason) == (6, "length")
        assert beam.text == llm.get_tokenizer().decode(beam.token_ids)
        scored = llm.generate([ids + beam.token_ids], SamplingParams(max_tokens=1, prompt_logprobs=0))[
            0
        ].prompt_logprobs
        assert scored is not None
        entries = zip(beam.token_ids, scored[len(ids) :], strict=True)
        assert beam.cumulative_logprob == pytest.approx(sum(e[token].logprob for token, e in entries if e is not None))
    params = SamplingParams(n=1, best_of=3, use_beam_search=True, max_tokens=6, ignore_eos=True)
    assert llm.generate([ids], params)[0].outputs[0].token_ids == result.outputs[0].token_ids


def test_one_continuation_is_streamed(llm: LLM) -> None:
    for name, params in (
        ("n", SamplingParams(n=2)),
        ("best_of", SamplingParams(best_of=2)),
        ("use_beam_search", SamplingParams(use_beam_search=True)),
    ):
        with pytest.raises(ParameterError, match=f"^{name} must be left alone"):
            next(llm.stream([5], params))


def test_a_deadline_is_told_as_such(llm: LLM) -> None:
    """S9, S10: counted from the call, with what there is by then."""
    (late,) = llm.generate("Once upon a time", SamplingParams(max_tokens=1000, ignore_eos=True, deadline_ms=150))
    assert late.finished and late.outputs[0].finish_reason == "deadline"
    assert len(late.outputs[0].token_ids) < 1000
    (early,) = llm.generate("Once upon a time", SamplingParams(max_tokens=2, deadline_ms=10**6))
    assert early.outputs[0].finish_reason == "length"


def test_priority(llm: LLM, smollm2_path: Path) -> None:
    """S3: with one slot, the lower number is served first; without an order by priority it has no place."""
    made = LLM(smollm2_path, kv_cache_memory="50MiB", max_model_len=256, order="priority", max_num_seqs=1)
    finished: list[str] = []
    put = made._mailbox.put

    def watch(outputs: Sequence[Output], stats: StepStats) -> None:
        finished.extend(output.request_id for output in outputs if output.finish_reason is not None)
        put(outputs, stats)

    made._mailbox.put = watch  # type: ignore[method-assign]
    outputs = made.generate(["a", "b", "c"], GREEDY, priority=[1, 0, -1])
    assert finished == [output.request_id for output in reversed(outputs)]
    made.engine.close()
    with pytest.raises(ParameterError, match="--order priority"):
        llm.generate("a", GREEDY, priority=1)
    for wrong in ([0], [0, 0, 0], [0, 1.5], "00", ["0", "1"]):
        with pytest.raises(ParameterError, match="priority"):
            llm.generate(["a", "b"], GREEDY, priority=wrong)  # type: ignore[arg-type]


def test_a_pinned_prefix(smollm2_path: Path, tmp_path: Path) -> None:
    """It is there before the first request, and stays when the cache is full of others."""
    path, text = tmp_path / "system.txt", "You are a lift attendant. Be brief, be kind, and mind the gap. " * 4
    path.write_text(text)
    made = LLM(smollm2_path, kv_cache_memory="12MiB", max_model_len=256, pin_prefix=str(path), debug=True)
    length = len(made.get_tokenizer().encode(text))
    for _ in range(3):
        (output,) = made.generate(text + "Hello!", GREEDY)
        assert output.num_cached_tokens == length // 16 * 16
        made.generate([[token] * 200 for token in range(20)], SamplingParams(max_tokens=1))
    made.engine.close()
    with pytest.raises(ConfigError, match="--pin-prefix"):
        LLM(smollm2_path, pin_prefix=str(tmp_path / "missing"))


def test_a_tokenizer_is_not_made_twice(llm: LLM, smollm2_path: Path) -> None:
    with LLM(smollm2_path, tokenizer=llm.get_tokenizer(), kv_cache_memory="32MiB", max_model_len=256) as other:
        assert other.get_tokenizer() is llm.get_tokenizer()
        assert other.generate("The sky is", GREEDY)[0].outputs[0].text


def test_chat_ends_at_the_models_own_end(llm: LLM) -> None:
    conversation = [{"role": "user", "content": "Say hello."}]
    single = llm.chat(conversation, SamplingParams(temperature=0, max_tokens=200))[0].outputs[0]
    assert single.finish_reason == "stop" and single.stop_reason is None
    assert "<|im_end|>" not in single.text
    both = llm.chat([conversation, conversation], SamplingParams(temperature=0, max_tokens=200))
    assert [output.outputs[0].text for output in both] == [single.text] * 2


def test_logprobs(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=4, logprobs=3, prompt_logprobs=1)
    output = llm.generate("The capital of France is", params)[0]
    completion = output.outputs[0]
    assert completion.logprobs is not None and len(completion.logprobs) == 4
    for token, entries in zip(completion.token_ids, completion.logprobs, strict=True):
        assert entries[token].rank == 1 and len(entries) == 3
        assert entries[token].logprob == max(entry.logprob for entry in entries.values())
    pairs = zip(completion.token_ids, completion.logprobs, strict=True)
    total = sum(entries[token].logprob for token, entries in pairs)
    assert completion.cumulative_logprob == pytest.approx(total)
    assert output.prompt_logprobs is not None and output.prompt_logprobs[0] is None
    assert len(output.prompt_logprobs) == len(output.prompt_token_ids)
    for token, entry in zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True):
        assert entry is not None and math.isfinite(entry[token].logprob) and entry[token].logprob <= 0


def test_prompt_logprobs_equal_what_generating_gave(llm: LLM) -> None:
    """C6: scoring a generated text gives the bits that generating it gave."""
    ids = llm.get_tokenizer().encode("The capital of France is")
    made = llm.generate(ids, SamplingParams(temperature=0, max_tokens=6, logprobs=0))[0].outputs[0]
    scored = llm.generate(ids + made.token_ids, SamplingParams(max_tokens=1, prompt_logprobs=0))[0].prompt_logprobs
    assert made.logprobs is not None and scored is not None
    for token, given, again in zip(made.token_ids, made.logprobs, scored[len(ids) :], strict=True):
        assert again is not None and given[token].logprob == again[token].logprob


def test_stop_strings(llm: LLM) -> None:
    """C7: text after a stop string never appears; the string itself only if asked for."""
    text = llm.generate("1, 2, 3,", SamplingParams(temperature=0, max_tokens=20))[0].outputs[0].text
    assert "6" in text
    cut = llm.generate("1, 2, 3,", SamplingParams(temperature=0, max_tokens=20, stop=["6"]))[0].outputs[0]
    assert cut.text == text[: text.index("6")]
    assert (cut.finish_reason, cut.stop_reason) == ("stop", "6")
    params = SamplingParams(temperature=0, max_tokens=20, stop="6", include_stop_str_in_output=True)
    assert llm.generate("1, 2, 3,", params)[0].outputs[0].text == text[: text.index("6") + 1]


def test_refusals_leave_the_engine_clean(llm: LLM) -> None:
    """M1, A7: nothing of a batch with a bad request stays behind, and the engine goes on."""
    with pytest.raises(RequestRefused, match="1024"):
        llm.generate(["fine", [5] * 2000], SamplingParams(max_tokens=100))
    with pytest.raises(ParameterError, match="token ids"):
        llm.generate([[10**9]], GREEDY)
    with pytest.raises(ParameterError, match="logit_bias"):
        llm.generate("x", SamplingParams(logit_bias={10**8: 1.0}))
    assert llm.generate("1, 2, 3,", GREEDY)[0].finished
    llm.engine.step()
    assert not llm.engine.scheduler.has_work
    pool = llm.engine.scheduler.kv.pool
    assert pool.num_free == pool.num_blocks


def test_a_stream_that_is_left_early_frees_its_blocks(llm: LLM) -> None:
    """M5."""
    stream = llm.stream(llm.get_tokenizer().encode("Once upon a time"), SamplingParams(max_tokens=100, ignore_eos=True))
    assert next(stream)
    stream.close()
    llm.engine.step()
    assert not llm.engine.scheduler.has_work
    assert llm.engine.scheduler.kv.pool.num_free == llm.engine.scheduler.kv.pool.num_blocks


def test_streams_in_turns(llm: LLM) -> None:
    """C1, M2: two streams read alternately, and a whole run in between, each get their own text."""
    prompts = [llm.get_tokenizer().encode(text) for text in ("The capital of France is", "1, 2, 3,")]
    alone = ["".join(llm.stream(ids, GREEDY)) for ids in prompts]
    streams = [llm.stream(ids, GREEDY) for ids in prompts]
    texts = [next(stream) for stream in streams]
    assert llm.generate("1, 2, 3,", GREEDY)[0].outputs[0].text == alone[1]
    for _ in range(8):
        texts = [text + next(stream, "") for text, stream in zip(texts, streams, strict=True)]
    assert texts == alone


def test_unknown_settings_and_names() -> None:
    with pytest.raises(ConfigError, match="tensor_parallel_size"):
        LLM("x", tensor_parallel_size=2)
    with pytest.raises(AttributeError, match="nothing"):
        _ = chairlift.nothing


@pytest.mark.parametrize(
    "prompts",
    [
        None,
        1.5,
        [None],
        [1.5],
        {"x": 1},
        b"bytes",
        [b"bytes"],
        {"a", "b"},
        [[True]],
        [["a"]],
        pytest.param(10**5000, id="huge"),
    ],
)
def test_prompts_that_are_none(llm: LLM, prompts: object) -> None:
    with pytest.raises(ParameterError):
        llm.generate(prompts, GREEDY)


@pytest.mark.parametrize("messages", [None, "hello", [[]], ["hello"], [{"role": "user", "content": "x"}, "y"], 5])
def test_conversations_that_are_none(llm: LLM, messages: object) -> None:
    with pytest.raises(ParameterError):
        llm.chat(messages, GREEDY)


@pytest.mark.parametrize("params", ["greedy", {}, [], [None], [GREEDY, GREEDY], 3])
def test_params_that_are_none(llm: LLM, params: object) -> None:
    with pytest.raises(ParameterError, match="sampling_params"):
        llm.generate("x", params)
