"""The sampler, on logits of our choice: a decoder without attention or feed-forward turns token t into logits row t."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from chairlift import _native
from chairlift.runners.groups import KVGroups

HIDDEN = 32


class Given:
    """Logits that a step can be asked for: ``draw(row, draws)`` draws from the given row."""

    def __init__(self, helpers: Any, rows: NDArray[Any], isa: str = "auto", threads: int = 2) -> None:
        vocab = rows.shape[1]
        spec = dataclasses.replace(
            helpers.spec, vocab_size=vocab, hidden_size=HIDDEN, ffn_size=32, num_layers=1, norm_eps=0.0
        )
        model = _native.Model(dataclasses.asdict(spec), threads, isa)
        for name, shape in spec.tensor_shapes().items():
            values = np.ones(shape, np.float32) if "norm" in name else np.zeros(shape, np.float32)
            if name == "embed":
                values[: len(rows)] = np.eye(len(rows), HIDDEN)
            elif name == "lm_head":
                values[:, : len(rows)] = rows.T / np.sqrt(HIDDEN)
            model.set_tensor(name, "f32", shape, values.view(np.uint8).reshape(-1))
        model.finalize()
        model.reserve(HIDDEN, 16, "f32", [[0]], HIDDEN, 50_000)
        self.tiny = helpers.tiny(model, spec, {}, 16, KVGroups.of(spec))
        self.item = helpers.item

    def draw(self, draws: Sequence[dict[str, Any]], row: int = 0) -> dict[str, NDArray[Any]]:
        return self.tiny.step([self.item([row], 0, [row], draws)])

    def logits(self, row: int = 0) -> NDArray[np.float64]:
        return self.draw([{}], row)["logits"][0].astype(np.float64)


@pytest.fixture(scope="module")
def helpers(specs: Any, item: Any, build: Any) -> Any:
    """What `Given` is made with: a spec to start from, and the classes of items and models."""
    return types.SimpleNamespace(spec=specs["llama"], item=item, tiny=type(build()))


@pytest.fixture(scope="module")
def given(helpers: Any) -> Any:
    """Rows: 0 normal, 1 flat, 2 with ties, 3 wide, over a vocabulary of 1,000 (not a multiple of any piece)."""
    rng = np.random.default_rng(0)
    rows = np.stack([rng.normal(0, 2, 1000), np.zeros(1000), np.round(rng.normal(0, 1, 1000)), rng.normal(0, 30, 1000)])
    return Given(helpers, rows)


def softmax(logits: NDArray[Any], temperature: float = 1.0) -> NDArray[np.float64]:
    mass = np.exp((logits - logits.max()) / temperature)
    return mass / mass.sum()


def check_distribution(tokens: NDArray[np.int32], expected: NDArray[np.float64]) -> None:
    """Chi-square of the drawn tokens, to 5 standard deviations (seeds are fixed); cells of little mass are merged."""
    assert np.all(expected[tokens] > 0)
    order = np.argsort(-expected)
    counts = np.bincount(tokens, minlength=len(expected))[order]
    mass = expected[order] * len(tokens)
    big = mass >= 8
    cells = np.append(counts[big], counts[~big].sum())
    wanted = np.append(mass[big], mass[~big].sum())
    cells, wanted = cells[wanted > 1e-9], wanted[wanted > 1e-9]
    chi = ((cells - wanted) ** 2 / wanted).sum()
    freedom = len(cells) - 1
    assert chi < freedom + 5 * np.sqrt(2 * freedom) + 5


def many(count: int, **fields: Any) -> list[dict[str, Any]]:
    return [{"seed": 1234, "position": i, **fields} for i in range(count)]


@pytest.mark.parametrize("row", [0, 1, 2, 3])
def test_greedy_takes_the_first_best(given: Given, row: int) -> None:
    assert given.draw([{}], row)["token"][0] == given.logits(row).argmax()


@pytest.mark.parametrize("row", [0, 1, 2, 3])
def test_logprobs_ranks_and_alternatives(given: Given, row: int) -> None:
    logits = given.logits(row)
    logprobs = logits - logits.max() - np.log(np.exp(logits - logits.max()).sum())
    order = np.lexsort((np.arange(1000), -logits))
    ids = [0, 1, 63, 64, 500, 998, 999, int(order[0]), int(order[-1])]
    out = given.draw([{"forced": token, "num_logprobs": 20} for token in ids], row)
    assert out["token"].tolist() == ids
    np.testing.assert_allclose(out["logprob"], logprobs[ids], atol=2e-6, rtol=1e-6)
    assert out["rank"].tolist() == [1 + int(np.flatnonzero(order == token)[0]) for token in ids]
    for top_ids, top_logprobs in zip(out["top_ids"], out["top_logprobs"], strict=True):
        assert top_ids.tolist() == order[:20].tolist()
        np.testing.assert_allclose(top_logprobs, logprobs[order[:20]], atol=2e-6, rtol=1e-6)


def test_logprobs_are_the_models_own(given: Given) -> None:
    """Bias, penalties and temperature change the draw, not the numbers reported."""
    logits = given.logits()
    out = given.draw(
        [{"temperature": 1.7, "bias": [(3, 90.0)], "num_logprobs": 2, "history": [3, 5], "repetition": 1.5, "top_k": 4}]
    )
    assert out["token"][0] == 3
    np.testing.assert_allclose(out["logprob"][0], np.log(softmax(logits))[3], atol=2e-6)
    assert out["rank"][0] == 1 + (logits > logits[3]).sum()
    assert out["top_ids"][0].tolist() == np.argsort(-logits)[:2].tolist()


def test_unused_alternatives_stay_empty(given: Given) -> None:
    out = given.draw([{"num_logprobs": 3}, {"num_logprobs": -1}, {"num_logprobs": 1}])
    assert out["top_ids"].shape == (3, 3)
    assert (out["top_ids"] == -1).tolist() == [[False] * 3, [True] * 3, [False, True, True]]
    assert out["top_logprobs"][1].tolist() == [0.0] * 3
    assert out["logprob"][1] == 0.0


@pytest.mark.parametrize("isa", _native.available_isas())
@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.0])
def test_distribution(helpers: Any, isa: str, temperature: float) -> None:
    rows = np.random.default_rng(3).normal(0, 2, (1, 1000))
    given = Given(helpers, rows, isa)
    out = given.draw(many(20_000, temperature=temperature))
    check_distribution(out["token"], softmax(given.logits(), temperature))


def keep(mass: NDArray[Any], top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> NDArray[np.float64]:
    """The filters by their definition."""
    order = np.lexsort((np.arange(len(mass)), -mass))
    kept = order[: top_k or len(mass)]
    share = mass[kept] / mass[kept].sum()
    kept = kept[: int(np.searchsorted(np.cumsum(share), top_p)) + 1]
    kept = kept[mass[kept] >= min_p * mass.max()]
    out = np.zeros_like(mass)
    out[kept] = mass[kept] / mass[kept].sum()
    return out


@pytest.mark.parametrize(
    "filters",
    [
        {"top_k": 1},
        {"top_k": 7},
        {"top_k": 700},  # selected by partition, not by heap
        {"top_k": 5000},
        {"top_p": 0.5},
        {"top_p": 0.97},  # more tokens than the first selection holds
        {"top_p": 1e-9},
        {"min_p": 0.2},
        {"min_p": 1.0},
        {"top_k": 20, "top_p": 0.8},  # the mass is that of the twenty
        {"top_k": 20, "min_p": 0.3},
        {"top_k": 30, "top_p": 0.9, "min_p": 0.1},
        {"top_p": 0.9, "min_p": 0.05},
    ],
    ids=str,
)
def test_filters(given: Given, filters: dict[str, Any]) -> None:
    expected = keep(softmax(given.logits(), 1.3), **filters)
    out = given.draw(many(8000, temperature=1.3, **filters))
    check_distribution(out["token"], expected)
    likely = np.flatnonzero(expected * 8000 > 30)
    assert set(likely) <= set(out["token"].tolist())  # nothing likely is cut off


def test_ties_at_the_edge_of_top_k_go_to_the_lower_ids(given: Given) -> None:
    out = given.draw(many(3000, temperature=1.0, top_k=10), row=1)
    assert set(out["token"].tolist()) == set(range(10))


def test_history_penalties(given: Given) -> None:
    """Repetition counts the whole history once a token, presence and frequency the generated part."""
    logits = given.logits()
    best = np.argsort(-logits)
    prompt, generated = [int(best[0]), int(best[0]), int(best[-1])], [int(best[1])] * 3 + [int(best[2])]
    fields = {"repetition": 1.4, "presence": 0.3, "frequency": 0.2, "history": prompt + generated, "history_prompt": 3}
    for token in {*prompt, *generated}:
        logits[token] = logits[token] / 1.4 if logits[token] > 0 else logits[token] * 1.4
    logits[best[1]] -= 0.3 + 3 * 0.2
    logits[best[2]] -= 0.3 + 0.2
    out = given.draw(many(20_000, temperature=1.0, **fields))
    check_distribution(out["token"], softmax(logits))
    again = given.draw(many(20_000, temperature=1.0))  # the penalties of one draw do not stay for the next
    check_distribution(again["token"], softmax(given.logits()))


def test_extreme_penalties_stay_finite(given: Given) -> None:
    best = int(given.logits().argmax())
    out = given.draw(
        [
            {"repetition": 1e-38, "history": list(range(1000)), "temperature": 1.0},
            {"repetition": 1e-38, "history": [best]},
            {"temperature": 1e-40, "seed": 3},
        ]
    )
    assert all(0 <= token < 1000 for token in out["token"])
    assert out["token"][1] == out["token"][2] == best


def test_bias_and_bans(given: Given) -> None:
    logits = given.logits()
    best = np.argsort(-logits)
    bias = [(int(best[500]), 12.0), (int(best[0]), -100.0)]
    banned = [int(best[1]), int(best[2])]
    for token, value in bias:
        logits[token] += value
    logits[banned] = -np.inf
    out = given.draw([{"bias": bias, "banned": banned}, *many(8000, temperature=1.0, bias=bias, banned=banned)])
    assert out["token"][0] == logits.argmax()
    check_distribution(out["token"][1:], softmax(logits))
    out = given.draw(many(4000, temperature=1.0, banned=banned, top_k=3, position=7))
    assert not set(out["token"].tolist()) & set(banned)
    assert given.draw([{"banned": list(range(1000))}])["token"][0] == -1


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", [0, 63, 999])
def test_logits_that_are_not_finite(helpers: Any, bad: float, place: int) -> None:
    """C4: no token, for every kind of draw; the other rows are as ever."""
    rows = np.random.default_rng(0).normal(0, 2, (2, 1000))
    rows[0, place] = bad
    given = Given(helpers, np.concatenate([rows]))
    kinds = [{}, {"temperature": 1.0}, {"temperature": 1.0, "top_k": 5}, {"forced": 3, "num_logprobs": 2}]
    out = given.draw(kinds, row=0)
    assert out["token"].tolist() == [-1] * 4
    assert np.all(np.isfinite(out["logprob"]))
    # 0 * inf makes the good row's logit NaN as well in a matrix product, so the good row comes from a clean matrix.
    rows[0, place] = 0.0
    assert Given(helpers, rows).draw([{}], row=1)["token"][0] == rows[1].argmax()


def test_noise_depends_on_seed_index_and_position_alone(given: Given, helpers: Any) -> None:
    """C2: neither the order of the draws nor other draws nor threads matter."""
    draws = [
        {"seed": seed, "index": index, "position": position, "temperature": 1.0, "num_logprobs": 0}
        for seed in (0, 1, 2**64 - 1)
        for index in (0, 1, 127)
        for position in (1, 2, 8000)
    ]
    together = given.draw(draws, row=1)["token"].tolist()
    assert [int(given.draw([draw], row=1)["token"][0]) for draw in draws] == together
    assert given.draw(draws[::-1], row=1)["token"].tolist() == together[::-1]
    other = Given(helpers, np.zeros((2, 1000)), threads=1)
    assert other.draw(draws, row=1)["token"].tolist() == together
    assert len(set(together)) > 20


def test_noise_is_uniform_and_independent(given: Given) -> None:
    """Neighbouring seeds, indices and positions give unrelated draws."""
    for field in ("seed", "index", "position"):
        fields = {"seed": 5, "index": 2, "position": 9, "temperature": 1.0, "top_k": 16}
        draws = [fields | {field: i} for i in range(20_000)]
        tokens = given.draw(draws, row=1)["token"]
        check_distribution(tokens, np.full(16, 1 / 16))
        pairs = tokens[:-1] * 16 + tokens[1:]
        check_distribution(pairs, np.full(256, 1 / 256))
    by_index = given.draw(many(10_000, temperature=1.0, top_k=16, index=0), row=1)["token"]
    next_index = given.draw(many(10_000, temperature=1.0, top_k=16, index=1), row=1)["token"]
    check_distribution(by_index * 16 + next_index, np.full(256, 1 / 256))


def test_a_tiny_vocabulary(helpers: Any) -> None:
    given = Given(helpers, np.array([[0.0, 2.0, 1.0] + [0.5] * 30])[:, :33])
    out = given.draw([{"num_logprobs": 1000}, *many(500, temperature=1.0, top_p=0.9)])
    assert out["top_ids"][0, :33].tolist()[:2] == [1, 2]
    assert out["top_ids"][0, 33:].tolist() == [-1] * 967
    assert set(out["token"].tolist()) <= set(range(33))
