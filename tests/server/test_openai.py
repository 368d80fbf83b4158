"""The openai client against the toy server, with strict checks of every answer against OpenAI's types (A2)."""

from __future__ import annotations

import json
import threading

import httpx
import openai
import pytest

SCRIPT = "Ünï 🚠 lift, never stops; 山 up. "


@pytest.fixture(scope="module")
def client(server):
    return server.openai


def chat(client, **options):
    return client.chat.completions.create(
        **{"model": "toy", "messages": [{"role": "user", "content": "hi"}], "temperature": 0, "max_tokens": 20}
        | options
    )


def complete(client, **options):
    if options.get("stream"):
        # openai-python's type of a completion demands a finish_reason, also of the chunks that OpenAI itself sends
        # without one; so these are not checked.
        client = openai.OpenAI(base_url=client.base_url, api_key="none", max_retries=0)
    return client.completions.create(**{"model": "toy", "prompt": "hi", "temperature": 0, "max_tokens": 20} | options)


def test_models(client):
    """A5: the card states the context and the default length."""
    (card,) = client.models.list().data
    assert (card.id, card.max_model_len, card.defaults["completions"]) == ("toy", 256, {"max_tokens": 16})
    assert client.models.retrieve("toy").id == "toy"
    with pytest.raises(openai.NotFoundError) as error:
        client.models.retrieve("gpt-9")
    assert error.value.code == "model_not_found"


def test_completion(client):
    answer = complete(client)
    assert answer.choices[0].text == SCRIPT.encode()[:20].decode(errors="replace")
    assert answer.choices[0].finish_reason == "length"
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (2, 20, 22)


def test_default_of_sixteen_tokens_ends_with_length(client):
    """A5"""
    answer = client.completions.create(model="toy", prompt="hi", temperature=0)
    assert (answer.usage.completion_tokens, answer.choices[0].finish_reason) == (16, "length")


def test_chat(client):
    answer = chat(client)
    assert answer.choices[0].message.content == SCRIPT.encode()[:20].decode(errors="replace")
    assert answer.choices[0].message.role == "assistant"
    assert answer.usage.prompt_tokens == len("user: hi\n")


def test_chat_without_max_tokens_goes_to_the_end_of_the_context(client):
    """C9"""
    answer = client.chat.completions.create(model="toy", messages=[{"role": "user", "content": "hi"}], temperature=0)
    assert answer.usage.total_tokens == 256
    assert answer.choices[0].finish_reason == "length"


def test_end_token(client):
    answer = complete(client, logit_bias={"256": 100})
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == (SCRIPT.encode()[:3].decode(), "stop")
    assert answer.usage.completion_tokens == 4
    longer = complete(client, logit_bias={"256": 100}, extra_body={"ignore_eos": True})
    assert longer.choices[0].finish_reason == "length"


@pytest.mark.parametrize("method", [chat, complete])
@pytest.mark.parametrize(
    "options", [{}, {"stop": "lift"}, {"stop": ["zz", "🚠"]}, {"n": 3, "temperature": 1.0, "seed": 5}]
)
@pytest.mark.parametrize("with_logprobs", [False, True])
def test_a_stream_adds_up_to_the_whole(client, method, options, with_logprobs):
    """C7, C8, A4, Q1: text, logprobs, finish reasons and token counts, for each choice."""
    if with_logprobs:
        options = options | ({"logprobs": True, "top_logprobs": 2} if method is chat else {"logprobs": 2})
    whole = method(client, **options)
    texts, reasons, tokens, logprobs = {}, {}, {}, {}
    for chunk in method(client, stream=True, **options):
        (choice,) = chunk.choices
        text = choice.delta.content if method is chat else choice.text
        texts[choice.index] = texts.get(choice.index, "") + text
        tokens[choice.index] = tokens.get(choice.index, 0) + chunk.chairlift["tokens"]
        if choice.logprobs:
            part = choice.logprobs.content if method is chat else list(zip(*lists(choice.logprobs), strict=True))
            logprobs.setdefault(choice.index, []).extend(part)
        if choice.finish_reason:
            assert choice.index not in reasons, "a choice ended twice"
            reasons[choice.index] = choice.finish_reason
    assert sum(tokens.values()) == whole.usage.completion_tokens
    for choice in whole.choices:
        assert texts[choice.index] == (choice.message.content if method is chat else choice.text)
        assert reasons[choice.index] == choice.finish_reason
        if with_logprobs:
            parts = choice.logprobs.content if method is chat else list(zip(*lists(choice.logprobs), strict=True))
            assert logprobs[choice.index] == parts


def lists(logprobs):
    return logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, logprobs.text_offset


def test_chat_stream_begins_with_the_role(client):
    chunks = list(chat(client, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert all(chunk.choices[0].delta.role is None for chunk in chunks[1:])


def test_stop(client):
    """C7: neither the stop string nor what follows is in the text."""
    answer = chat(client, stop=["never"], max_tokens=200)
    assert answer.choices[0].message.content == "Ünï 🚠 lift, "
    assert answer.choices[0].finish_reason == "stop"
    included = chat(client, stop=["never"], max_tokens=200, extra_body={"include_stop_str_in_output": True})
    assert included.choices[0].message.content == "Ünï 🚠 lift, never"


def test_stop_token_ids(client):
    answer = complete(client, max_tokens=200, extra_body={"stop_token_ids": [ord(",")]})
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("Ünï 🚠 lift", "stop")


def test_n_and_seed(client):
    """C2: three different samples, the same each time, and the same whether streamed alone or together."""
    first = chat(client, n=3, seed=7, temperature=1)
    again = chat(client, n=3, seed=7, temperature=1)
    texts = [choice.message.content for choice in first.choices]
    assert len(set(texts)) == 3
    assert texts == [choice.message.content for choice in again.choices]
    assert [choice.index for choice in first.choices] == [0, 1, 2]
    assert first.usage.prompt_tokens == len("user: hi\n"), "the prompt counts once"
    assert first.usage.completion_tokens == 60
    other = chat(client, n=3, seed=8, temperature=1)
    assert texts != [choice.message.content for choice in other.choices]
    assert chat(client, temperature=1).choices[0] != chat(client, temperature=1).choices[0], (
        "no seed means a random one"
    )


def test_batches_of_prompts(client):
    answer = complete(client, prompt=["a", "bb"], n=2, max_tokens=4)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (3, 16)
    by_ids = complete(client, prompt=[[97], [98, 98]], n=2, max_tokens=4)
    assert [choice.text for choice in by_ids.choices] == [choice.text for choice in answer.choices]
    assert complete(client, prompt=[97, 98]).usage.prompt_tokens == 2
    streamed = list(complete(client, prompt=["a", "bb"], n=2, max_tokens=4, stream=True))
    assert {chunk.choices[0].index for chunk in streamed} == {0, 1, 2, 3}


def test_completion_logprobs(client):
    """C5: minus infinity is a number; OpenAI's legacy shape."""
    logprobs = complete(client, logprobs=2, max_tokens=5).choices[0].logprobs
    assert logprobs.tokens[2:] == ["n", "\ufffd", "\ufffd"]
    assert logprobs.token_logprobs == [-0.5] * 5
    assert logprobs.text_offset == [0, 0, 1, 2, 2]
    assert logprobs.top_logprobs[2] == {"n": -0.5, "<end>": -9999.0}


def test_chat_logprobs(client):
    content = chat(client, logprobs=True, top_logprobs=2, max_tokens=5).choices[0].logprobs.content
    assert [entry.bytes for entry in content] == [[byte] for byte in SCRIPT.encode()[:5]]
    assert [top.logprob for top in content[0].top_logprobs] == [-0.5, -9999.0]
    (entry,) = chat(client, logprobs=True, max_tokens=1).choices[0].logprobs.content
    assert entry.top_logprobs == []
    assert chat(client).choices[0].logprobs is None


@pytest.mark.parametrize("method", [chat, complete])
def test_usage_in_a_stream(client, method):
    """A1: exactly one final chunk without choices holds it; the others say null."""
    *chunks, last = method(client, stream=True, stream_options={"include_usage": True})
    assert last.choices == [] and last.usage.completion_tokens == 20
    assert all(chunk.usage is None and chunk.choices for chunk in chunks)
    for options in ({}, {"stream_options": {}}, {"stream_options": {"include_usage": False}}):
        assert all(chunk.choices and chunk.usage is None for chunk in method(client, stream=True, **options))


def test_cached_tokens_are_told(client):
    prompt = "cache me if you can, please, now!"
    complete(client, prompt=prompt)
    assert complete(client, prompt=prompt).usage.prompt_tokens_details.cached_tokens == 32


def test_events_on_the_wire(server):
    """A4: one JSON object a data line, encoded once; [DONE] at the end."""
    body = {"prompt": "hi", "stream": True, "max_tokens": 3, "temperature": 0}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in response.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    assert all(isinstance(json.loads(line.removeprefix("data: ")), dict) for line in lines[:-1])


def test_32_concurrent_streams(client):
    """C10: each gets its own tokens: those it gets alone."""
    alone = [read(client, seed) for seed in range(4)]
    together: dict[int, str] = {}
    threads = [threading.Thread(target=lambda k=k: together.__setitem__(k, read(client, k % 4))) for k in range(32)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [together[k] for k in range(32)] == [alone[k % 4] for k in range(32)]


def read(client, seed):
    chunks = chat(
        client, stream=True, seed=seed, temperature=1, max_tokens=40, messages=[{"role": "user", "content": f"{seed}"}]
    )
    return "".join(chunk.choices[0].delta.content for chunk in chunks)


def test_bad_logits_fail_the_request_alone(client):
    """C4"""
    with pytest.raises(openai.InternalServerError, match="not finite"):
        complete(client, logit_bias={"255": -100})
    assert complete(client).choices[0].finish_reason == "length"
