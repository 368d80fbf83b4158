"""The time that a workload takes at least, by its model and by the limits of the machine."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from peers.workloads import Workload


@dataclass(frozen=True, slots=True)
class ModelCosts:
    """See `inside/model.py`."""

    row_products: int
    draw_products: int
    weight_bytes: int


@dataclass(frozen=True, slots=True)
class Work:
    """What a workload cannot do without, attention not counted: multiply-adds, and bytes of weights to be read."""

    products: int
    bytes: int

    @classmethod
    def of(cls, workload: Workload, model: ModelCosts) -> Work:
        """Each token but the last one is a row, and each output is drawn from one. A request draws a token a step."""
        rows = sum(len(request.ids) + request.output - 1 for request in workload.requests)
        draws = [request.output for request in workload.requests]
        steps = max(*draws, math.ceil(sum(draws) / workload.slots))
        return cls(rows * model.row_products + sum(draws) * model.draw_products, steps * model.weight_bytes)

    def least_seconds(self, limits: Mapping[str, float]) -> tuple[float, str]:
        """And which limit it is: "vpmaddubsw" (of products of bytes, multiply-adds/s) or "reading" (bytes/s)."""
        return max((self.products / limits["int8"], "vpmaddubsw"), (self.bytes / limits["stream"], "reading"))
