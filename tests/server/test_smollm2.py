"""The whole thing: `chairlift serve` with the real model, used through the openai client."""

from __future__ import annotations

import signal
import sys
import threading

import httpx
import openai
import psutil
import pytest

MESSAGES = [{"role": "user", "content": "Count from one to twenty in words."}]


def command(path):
    cli = [sys.executable, "-m", "chairlift.cli", "serve", str(path)]
    return [*cli, "--port", "0", "--kv-cache-memory", "128MiB", "--max-model-len", "2048", "--max-num-seqs", "16"]


@pytest.fixture(scope="module")
def real(run_server, smollm2_path):
    server = run_server(command(smollm2_path)).wait_listening()
    yield server
    server.end()


@pytest.fixture(scope="module")
def client(real):
    return real.openai


def chat(client, **options):
    return client.chat.completions.create(
        **{"model": client.models.list().data[0].id, "messages": MESSAGES, "temperature": 0, "max_tokens": 24} | options
    )


def streamed(client, **options):
    chunks = list(chat(client, stream=True, **options))
    texts: dict[int, str] = {}
    for chunk in chunks:
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + (choice.delta.content or "")
    return texts, chunks


def test_chat_streamed_and_not(client):
    whole = chat(client)
    assert streamed(client)[0] == {0: whole.choices[0].message.content}
    assert whole.usage.completion_tokens == 24 and whole.choices[0].finish_reason == "length"


def test_an_answer_comes_to_its_own_end(client):
    answer = chat(client, messages=[{"role": "user", "content": "Say hello."}], max_tokens=200)
    assert answer.choices[0].finish_reason == "stop"
    assert "<|im_end|>" not in answer.choices[0].message.content


def test_completion_by_text_and_by_ids(client):
    model = client.models.list().data[0].id
    text = client.completions.create(model=model, prompt="The capital of France is", temperature=0, max_tokens=2)
    assert "Paris" in text.choices[0].text
    assert text.choices[0].text[0] == " "
    ids = client.completions.create(model=model, prompt=[504, 3575, 282, 4649, 314], temperature=0, max_tokens=2)
    assert ids.usage.prompt_tokens == 5


def test_n_seed_and_interleaved_stream(client):
    """C1, C2: three samples, the same bits alone and beside others."""
    options = {"n": 3, "seed": 11, "temperature": 1.0, "max_tokens": 16}
    whole = [choice.message.content for choice in chat(client, **options).choices]
    assert len(set(whole)) == 3
    texts, _ = streamed(client, **options)
    assert [texts[k] for k in range(3)] == whole


def test_stop(client):
    text = chat(client).choices[0].message.content
    stop = text[6:12]
    answer = chat(client, stop=stop)
    assert answer.choices[0].message.content == text[: text.index(stop)]
    assert answer.choices[0].finish_reason == "stop"
    assert streamed(client, stop=stop)[0] == {0: answer.choices[0].message.content}


def test_logprobs(client):
    content = chat(client, logprobs=True, top_logprobs=3, max_tokens=8).choices[0].logprobs.content
    for entry in content:
        assert entry.top_logprobs[0].token == entry.token, "greedy takes the likeliest"
        values = [top.logprob for top in entry.top_logprobs]
        assert values == sorted(values, reverse=True) and all(value <= 0 for value in values)
    whole = chat(client, max_tokens=8).choices[0].message.content
    assert b"".join(bytes(entry.bytes) for entry in content).decode() == whole


def test_include_usage(client):
    """A1"""
    _, chunks = streamed(client, stream_options={"include_usage": True})
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == 24
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_32_concurrent_streams(client):
    """C1, C10: each has the text it has alone, though only 16 run at once."""
    alone = [streamed(client, seed=seed, temperature=0.8, max_tokens=16)[0] for seed in range(3)]
    together: dict[int, dict[int, str]] = {}

    def run(k):
        together[k] = streamed(client, seed=k % 3, temperature=0.8, max_tokens=16)[0]

    threads = [threading.Thread(target=run, args=(k,)) for k in range(32)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert [together[k] for k in range(32)] == [alone[k % 3] for k in range(32)]


def test_a_disconnect_frees_the_blocks(real, until):
    """D7"""
    body = {"messages": MESSAGES, "max_tokens": 1500, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{real.url}/v1/chat/completions", json=body) as response:
        lines = response.iter_lines()  # kept: the connection is closed with it
        assert "chat.completion.chunk" in next(lines)
        assert real.metric("requests_running") == 1
        steps = real.metric("step_seconds_count")
    until(lambda: real.metric("requests_running") == 0)
    assert real.metric("kv_blocks_free") == real.metric("kv_blocks_total")
    assert real.metric("step_seconds_count") - steps < 100


def test_refusals(real, client):
    with pytest.raises(openai.BadRequestError) as error:
        chat(client, temperature=3)
    assert error.value.param == "temperature" and "0 to 2" in error.value.message
    with pytest.raises(openai.BadRequestError) as error:
        chat(client, max_tokens=2048)
    assert error.value.code == "context_length_exceeded"
    assert real.post("/v1/chat/completions", messages=MESSAGES, tools=[{}]).json()["error"]["param"] == "tools"


def test_the_log_tells_bytes_and_times(real):
    """M10, I3, I4"""
    log = "\n".join(real.log)
    for words in ("memory: weights", "memory: KV cache", "memory: workspace", "bytes", "free at start", "threads"):
        assert words in log, words
    assert "2048 tokens fit at once" in log
    ready = next(line for line in real.log if "ready after" in line)
    for phase in ("interpreter", "model file", "weights", "tokenizer", "HTTP imports"):
        assert phase in ready


def test_ctrl_c_ends_everything(run_server, smollm2_path):
    server = run_server(command(smollm2_path)).wait_listening()
    family = psutil.Process(server.process.pid).children(recursive=True)
    server.signal_group(signal.SIGINT)
    assert server.wait() == 0
    assert not any(member.is_running() for member in family)
    assert server.leftovers() == []
    assert not any("Traceback" in line for line in server.log)


@pytest.mark.parametrize("content", [b"", b"GGUF", b"not a model at all", b"GGUF\x03\x00\x00\x00" + b"\xff" * 16])
def test_a_damaged_model_is_one_line(run_server, tmp_path, content):
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(content)
    server = run_server(command(damaged))
    assert server.wait() == 1
    assert not any("Traceback" in line for line in server.log), server.log
    assert server.leftovers() == []
