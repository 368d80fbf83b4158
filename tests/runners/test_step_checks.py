"""Arrays that do not add up raise ValueError before anything is read or written."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from chairlift.core.plan import TokenLogprob
from chairlift.core.request import SamplingParams, SequenceInfo

BIG = 2**31 - 1


@pytest.fixture(scope="module")
def tiny(build: Any) -> Any:
    return build("llama", num_blocks=8, max_rows=40)


@pytest.fixture
def arrays(tiny: Any, item: Any) -> dict[str, Any]:
    """A good step: a chunk of 20 tokens at 4 and a decode at 17, with one draw each."""
    draw = {"history": [1, 2, 3], "history_prompt": 2, "bias": [(5, 1.0)], "banned": [6]}
    return tiny.arrays([item(list(range(20)), 4, [0, 1], [draw]), item([9], 17, [2, 3], [draw])])


def put(name: str, index: Any, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(arrays: dict[str, Any]) -> None:
        target = arrays["sampling"] if name in arrays["sampling"] else arrays
        target[name][index] = value

    return change


def replace(name: str, make: Callable[[Any], Any]) -> Callable[[dict[str, Any]], None]:
    def change(arrays: dict[str, Any]) -> None:
        target = arrays["sampling"] if name in arrays["sampling"] else arrays
        target[name] = make(target[name])

    return change


BAD = {
    **{f"token {value}": put("tokens", 3, value) for value in (-1, 259, BIG, -BIG - 1)},
    **{f"position {value}": put("positions", 20, value) for value in (-1, 32, 256, BIG)},
    "position gap": put("positions", 5, 10),
    "position falls": put("positions", 5, 8),
    "first position far off": replace("positions", lambda a: a - 100),
    "table too short": put("table_offsets", 1, 1),
    **{f"block {value}": put("block_tables", 1, value) for value in (-1, 8, BIG)},
    "item rows fall": put("item_rows", 1, 22),
    "item rows below 0": put("item_rows", 0, -1),
    "item without rows": put("item_rows", 1, 0),
    "item rows end early": put("item_rows", 2, 20),
    "item rows end late": put("item_rows", 2, BIG),
    "no item rows": replace("item_rows", lambda a: a[:0].copy()),
    "table offsets fall": put("table_offsets", 1, 5),
    "table offsets too few": replace("table_offsets", lambda a: a[:2].copy()),
    "table offsets end late": put("table_offsets", 2, 100),
    "positions shorter": replace("positions", lambda a: a[:-1].copy()),
    **{f"row {value}": put("row", 1, value) for value in (-1, 21, BIG)},
    **{f"forced {value}": put("forced", 0, value) for value in (-2, 259, BIG)},
    **{f"num_logprobs {value}": put("num_logprobs", 0, value) for value in (-2, 1025, BIG)},
    **{f"temperature {value}": put("temperature", 0, value) for value in (-1, np.nan, np.inf)},
    **{f"top_p {value}": put("top_p", 0, value) for value in (-1, np.nan)},
    **{f"min_p {value}": put("min_p", 0, value) for value in (-1, 1.5, np.nan)},
    **{f"repetition {value}": put("repetition", 0, value) for value in (0, -1, np.nan, np.inf)},
    "presence": put("presence", 0, np.nan),
    "frequency": put("frequency", 0, np.inf),
    "history prompt": put("history_prompt", 0, 4),
    "history prompt below 0": put("history_prompt", 0, -1),
    **{f"history {value}": put("history", 4, value) for value in (-1, 259, BIG)},
    **{f"bias id {value}": put("bias_ids", 1, value) for value in (-1, 259, BIG)},
    "bias value": put("bias_values", 1, np.nan),
    "bias values longer": replace("bias_values", lambda a: np.append(a, np.float32(1))),
    **{f"banned {value}": put("banned", 1, value) for value in (-1, 259, BIG)},
    **{
        f"{name} {change}": put(name, at, value)
        for name in ("history_offsets", "bias_offsets", "banned_offsets")
        for change, at, value in (("falls", 1, 100), ("below 0", 0, -3), ("ends late", 2, BIG), ("ends early", 2, 0))
    },
    "seed shorter": replace("seed", lambda a: a[:1].copy()),
    "seed of another type": replace("seed", lambda a: a.astype(np.int64)),
    "history of another type": replace("history", lambda a: a.astype(np.int64)),
    "top_p not contiguous": replace("top_p", lambda a: np.repeat(a, 2)[::2]),
    "no seed": lambda arrays: arrays["sampling"].pop("seed"),
    "seed is a list": replace("seed", list),
}


def test_the_step_is_good(tiny: Any, arrays: dict[str, Any]) -> None:
    assert tiny.model.step(**arrays)["token"].shape == (2,)


@pytest.mark.parametrize("name", BAD)
def test_bad_step(tiny: Any, arrays: dict[str, Any], name: str) -> None:
    before = copy.deepcopy(arrays)
    BAD[name](arrays)
    with pytest.raises(ValueError):
        tiny.model.step(**arrays)
    tiny.model.step(**before)  # the model lives on


@pytest.mark.parametrize("name", ["tokens", "positions", "item_rows", "block_tables", "table_offsets"])
def test_arrays_of_a_wrong_type(tiny: Any, arrays: dict[str, Any], name: str) -> None:
    arrays[name] = arrays[name].astype(np.float32)
    with pytest.raises(TypeError):
        tiny.model.step(**arrays)


@pytest.fixture(scope="module")
def windowed(build: Any) -> Any:
    """Groups of windows 0, 5, 7 and 40 over blocks of 4 positions."""
    return build("gemma", block_size=4, num_blocks=40)


def test_blocks_that_a_window_has_passed_need_not_be(windowed: Any, item: Any) -> None:
    """At position 50 the window of 5 begins at 46, that of 7 at 44, that of 40 at 11."""
    groups = windowed.groups.windows
    table = list(range(13 * len(groups)))
    needed = {0: 0, 5: 46 // 4, 7: 44 // 4, 40: 11 // 4}
    for at in range(len(table)):
        missing = [*table[:at], -1, *table[at + 1 :]]
        step = item([1, 2], 50, missing, whole=True)
        if at // len(groups) >= needed[groups[at % len(groups)]]:
            with pytest.raises(ValueError, match="block -1 is not in"):
                windowed.step([step])
        else:
            windowed.step([step])


def test_table_of_some_of_the_groups(windowed: Any, item: Any) -> None:
    with pytest.raises(ValueError, match="7 entries, which is no multiple of the 4 groups"):
        windowed.step([item([1], 0, range(7), whole=True)])
    with pytest.raises(ValueError, match="holds 4 positions, and position 4 is computed"):
        windowed.step([item([1], 4, range(4), whole=True)])


BAD_ITEMS = {
    "a token of another type": (TypeError, {"token_ids": (1.0,)}),
    "a token of numpy's": (TypeError, {"token_ids": (np.int32(1),)}),
    "tokens in a list": (TypeError, {"token_ids": [1]}),
    "a table of another type": (TypeError, {"block_table": None}),
    "a number too large": (ValueError, {"token_ids": (BIG + 1,)}),
    "a number too small": (ValueError, {"block_table": (-BIG - 2,)}),
    "a number far too large": (ValueError, {"start": 2**80}),
    "a token past the vocabulary": (ValueError, {"token_ids": (259,)}),
    "no tokens": (ValueError, {"token_ids": ()}),
    "a table too short": (ValueError, {"start": 300}),
    "history past the vocabulary": (ValueError, {"history": (259,)}),
    "a draw that was never made": (ValueError, {"token_ids": (-3,)}),
    "samples below 0": (ValueError, {"num_samples": -1}),
    "samples without end": (ValueError, {"num_samples": BIG}),
    "logprobs without end": (ValueError, {"sequence": SequenceInfo("a", 0, SamplingParams(), 0, 1, num_logprobs=BIG)}),
    "the last position there is": (ValueError, {"start": BIG, "token_ids": (1, 2)}),
    "drafts below 0": (ValueError, {"num_drafts": -1}),
    "drafts alone": (ValueError, {"num_drafts": 1}),
    "drafts of a chunk": (ValueError, {"token_ids": (1, 2), "num_drafts": 1, "num_samples": 0}),
    "drafts of two samples": (ValueError, {"token_ids": (1, 2), "num_drafts": 1, "num_samples": 2}),
    "a forced token past the vocabulary": (ValueError, {"prompt_targets": (259,)}),
    "a forced token below 0": (ValueError, {"prompt_targets": (-1,)}),
    "more forced tokens than rows": (ValueError, {"prompt_targets": (1, 2)}),
    "a prompt shorter than nothing": (ValueError, {"sequence": SequenceInfo("a", 0, SamplingParams(), 0, -1)}),
    "no params": (AttributeError, {"sequence": None}),
}


def test_numbers_that_mean_nothing(tiny: Any, step_item: Any) -> None:
    """Fewer tokens than none before a stop token do no harm, and after the last index comes the first there is."""

    def draws(num_samples: int, min_tokens: int = 0, index: int = 0) -> Any:
        params = SamplingParams(temperature=2.0)
        object.__setattr__(params, "min_tokens", min_tokens)  # SamplingParams itself refuses some
        given = {"num_prompt": 40, "stop_ids": frozenset([3]), "index": index, "block_table": (0,)}
        item = step_item((1, 2), params=params, num_samples=num_samples, **given)
        return tiny.model.run((item,), (), TokenLogprob)[0][0]

    assert draws(3, min_tokens=-5) == draws(3)
    assert draws(3, index=BIG)[1:] == draws(2, index=-BIG - 1)


@pytest.mark.parametrize("name", BAD_ITEMS)
def test_bad_item(tiny: Any, step_item: Any, name: str) -> None:
    """What comes from Python is not trusted either, and the model lives on."""
    error, change = BAD_ITEMS[name]
    good = step_item((1,), block_table=(0, 1))
    bad = good._replace(**change)
    for items in ((good, bad), (bad, good)):
        with pytest.raises(error):
            tiny.model.run(items, ((4,), (5,)), TokenLogprob)
    tokens, logprobs, scores = tiny.model.run((good,), (), TokenLogprob)
    assert [len(row) for row in tokens] == [1] and logprobs == ((),) and scores == ()


def test_what_is_no_item(tiny: Any) -> None:
    for item in ((1, 2), [1], None, (None,) * 9):
        with pytest.raises((TypeError, AttributeError)):
            tiny.model.run((item,), (), TokenLogprob)


def test_more_than_was_reserved(tiny: Any, item: Any) -> None:
    with pytest.raises(ValueError, match="41 tokens, and room for 40"):
        tiny.step([item([1] * 41, 0, [0, 1, 2])])
    with pytest.raises(ValueError, match="draws"):
        tiny.step([item([1], 0, [0], [{}] * 81)])


def test_sizes_that_cannot_be(build: Any) -> None:
    model = build("llama").model
    for blocks, block_size, kv, rows, samples in [
        (0, 16, "f16", 8, 8),
        (4, 0, "f16", 8, 8),
        (4, -5, "f16", 8, 8),
        (4, 16, "f8", 8, 8),
        (4, 16, "f16", 0, 8),
        (4, 16, "f16", 8, -1),
    ]:
        with pytest.raises(ValueError):
            model.reserve(blocks, block_size, kv, [[0, 1]], rows, samples)
    for groups in ([], [[0]], [[0, 1], [1]], [[0, 1, 2]], [[0, -1]], [[0], [0]]):
        with pytest.raises(ValueError, match="groups must name each layer once"):
            model.reserve(4, 16, "f16", groups, 8, 8)
        with pytest.raises(ValueError, match="groups must name each layer once"):
            model.kv_block_bytes(16, "f16", groups)


def test_step_before_reserve(build: Any, specs: Any, arrays: dict[str, Any]) -> None:
    model = build("llama").model
    with pytest.raises(MemoryError):
        model.reserve(2**31 - 1, 65536, "f32", [[0, 1]], 8, 8)
    with pytest.raises((ValueError, RuntimeError)):  # the failed reserve left nothing behind
        model.step(**arrays)
    model.reserve(8, 16, "f32", [[0, 1]], 40, 8)
    model.step(**arrays)


def test_one_step_at_a_time(build: Any, item: Any) -> None:
    """Two threads of Python on one model: one of them is told, neither crashes."""
    tiny = build("gemma")
    errors: list[Exception] = []

    def work() -> None:
        for _ in range(20):
            try:
                tiny.step([item([1] * 200, 0, list(range(13)))])
            except RuntimeError as error:
                errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all("at work" in str(error) for error in errors)
    assert tiny.step([item([1], 0, [0])])["token"].shape == (1,)
