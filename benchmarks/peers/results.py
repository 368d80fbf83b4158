"""Medians, ratios and verdicts, as a table and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

from peers.figures import FIGURES, Figure
from peers.limit import Work

CHAIRLIFT = "chairlift"  # the row that the targets are for


@dataclass(frozen=True, slots=True)
class Row:
    """An engine as the table shows it: see `engines.Engine`."""

    name: str
    setting: str = ""
    own: bool = False
    exact: bool = True


@dataclass(frozen=True, slots=True)
class Run:
    """One measurement: an engine on a workload in a round. ``shares``: see `machine.shares`."""

    engine: str
    workload: str
    round: int
    figures: dict[str, float]
    shares: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Verdict:
    """One figure of all engines.

    Fields:
        medians: by engine; None where it was not measured.
        best: the best peer that computes exactly; "" if none was measured.
        ratio: of Chairlift to it, as the figure defines it; None if either is missing.
        ratio_to_all: the same with the peers that compute in bf16.
    """

    figure: Figure
    medians: dict[str, float | None]
    best: str
    ratio: float | None
    ratio_to_all: float | None

    @property
    def met(self) -> bool | None:
        return None if self.ratio is None else self.figure.met(self.ratio)


@dataclass(slots=True)
class Results:
    """Everything that was found out so far.

    Fields:
        problems: what could not be installed, started or run, as (engine, workload or "", reason).
        agreement: by engine, how its text compares.
        setting: of the whole comparison: date, machine, rounds, scale and the like.
        limits: of the machine, before and after.
        works: by workload, what it cannot do without.
    """

    rows: list[Row]
    workloads: list[str]
    setting: dict[str, Any] = field(default_factory=dict)
    runs: list[Run] = field(default_factory=list)
    problems: list[tuple[str, str, str]] = field(default_factory=list)
    agreement: dict[str, str] = field(default_factory=dict)
    limits: list[dict[str, float] | str] = field(default_factory=list)
    works: dict[str, Work] = field(default_factory=dict)

    def median(self, engine: str, figure: Figure) -> float | None:
        values = [
            run.figures[figure.key]
            for run in self.runs
            if (run.engine, run.workload) == (engine, figure.workload) and figure.key in run.figures
        ]
        return median(values) if values else None

    def verdicts(self) -> list[Verdict]:
        return [self.verdict(figure) for figure in FIGURES if figure.workload in self.workloads]

    def verdict(self, figure: Figure) -> Verdict:
        medians = {row.name: self.median(row.name, figure) for row in self.rows}
        own = medians.get(CHAIRLIFT)

        def against(peers: Sequence[Row]) -> tuple[str, float | None]:
            found = {row.name: value for row in peers if (value := medians[row.name]) is not None}
            if not found:
                return "", None
            best = figure.best(list(found.values()))
            name = next(name for name, value in found.items() if value == best)
            return name, None if own is None else figure.ratio(own, best)

        peers = [row for row in self.rows if not row.own]
        best, ratio = against([row for row in peers if row.exact])
        return Verdict(figure, medians, best, ratio, against(peers)[1])

    def share_of_limit(self, workload: str) -> tuple[float, str] | None:
        """The least time that the machine's limits leave, as a share of Chairlift's, and which limit that is.

        None if either is not known, or if the workload waits for its requests' arrivals.
        """
        seconds = self.median(CHAIRLIFT, Figure(workload, "seconds", "s", lower=True, target=1.0))
        limits = self._best_limits()
        if seconds is None or not limits or workload not in self.works:
            return None
        least, limit = self.works[workload].least_seconds(limits)
        return least / seconds, limit

    def as_json(self) -> dict[str, Any]:
        return {
            **self.setting,
            "limits": self.limits,
            "works": {name: asdict(work) for name, work in self.works.items()},
            "engines": [
                {"name": row.name, "setting": row.setting, "agreement": self.agreement.get(row.name)}
                for row in self.rows
            ],
            "problems": [
                dict(zip(("engine", "workload", "reason"), problem, strict=True)) for problem in self.problems
            ],
            "table": [
                {
                    "workload": verdict.figure.workload,
                    "figure": verdict.figure.key,
                    "medians": verdict.medians,
                    "best_peer": verdict.best,
                    "ratio": verdict.ratio,
                    "ratio_with_bf16": verdict.ratio_to_all,
                    "target": verdict.figure.target,
                    "met": verdict.met,
                    "share_of_limit": list(self.share_of_limit(verdict.figure.workload) or ()),
                }
                for verdict in self.verdicts()
            ],
            "runs": [
                {"engine": r.engine, "workload": r.workload, "round": r.round, "shares": r.shares, **r.figures}
                for r in self.runs
            ],
        }

    def as_markdown(self) -> str:
        head = ["", *(row.name for row in self.rows), "Chairlift to best", "with bf16", "target", "", "of the limit"]
        table = _aligned([head, *(self._cells(verdict) for verdict in self.verdicts())])
        engines = [f"- **{row.name}**: {self._about(row)}" for row in self.rows]
        return "\n".join([self._caption(), "", *table, "", *engines, "", self._limits()]) + "\n"

    # -- inside

    def _caption(self) -> str:
        about = {"machine": {}, "date": "", "rounds": "", "model": ""} | self.setting
        cpu, cores = about["machine"].get("cpu", ""), about["machine"].get("cores", "")
        scaled = f", a share of {about['scale']:g} of each workload" if about.get("scale", 1.0) != 1.0 else ""
        return f"{about['model']}; {cpu}, {cores} cores; {about['date']}; medians of {about['rounds']} rounds{scaled}."

    def _cells(self, verdict: Verdict) -> list[str]:
        figure = verdict.figure
        values = [
            "-" if value is None else f"**{_number(value)}**" if name == verdict.best else _number(value)
            for name, value in verdict.medians.items()
        ]
        sign = "at most " if figure.as_share else "at least "
        met = {True: "met", False: "not met", None: "-"}[verdict.met]
        ratios = [_number(verdict.ratio), _number(verdict.ratio_to_all)]
        share = self.share_of_limit(figure.workload)
        of_limit = "" if share is None else f"{share[1]} {share[0]:.0%}"
        return [f"{figure.workload}, {figure.title}", *values, *ratios, f"{sign}{figure.target:g}", met, of_limit]

    def _about(self, row: Row) -> str:
        problems = [
            f"{workload or 'not measured'}: {reason}"
            for engine, workload, reason in self.problems
            if engine == row.name
        ]
        return ". ".join(filter(None, [row.setting, self.agreement.get(row.name), *problems])) + "."

    def _best_limits(self) -> dict[str, float]:
        """The better of those before and after: on a busy machine still too low."""
        found = [limits for limits in self.limits if isinstance(limits, dict)]
        return {name: max(limits[name] for limits in found) for name in found[0]} if found else {}

    def _limits(self) -> str:
        best = {name: value / 1e9 for name, value in self._best_limits().items()}
        if not best:
            return f"Limits of the machine: {'; '.join(map(str, self.limits)) or 'not measured'}."
        streaming = best.pop("stream", 0.0)
        arithmetic = ", ".join(f"{name} {value:.0f}" for name, value in best.items())
        return f"Limits of the machine: {arithmetic} G multiply-adds/s; reading memory {streaming:.1f} GB/s."


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _aligned(lines: list[list[str]]) -> list[str]:
    """A Markdown table that can be read as it is."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    rows = ["| " + " | ".join(map(str.ljust, line, widths)) + " |" for line in lines]
    return [rows[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *rows[1:]]
