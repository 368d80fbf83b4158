"""What an operator may decide about scheduling."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What an operator may decide. Times in seconds.

    Fields:
        max_num_seqs: most sequences that run at once.
        max_num_batched_tokens: most tokens of a step.
        enable_prefix_caching: find the KV of equal beginnings.
        preemption_mode: recompute, swap, or auto: the cheaper by measured rates.
        max_preemptions: who was preempted so often boards with all its memory promised, and stays.
        slo_itl: target for the time of a step that decodes; None for none.
        num_speculative_tokens: most tokens that are guessed for a sequence in a step; 0 for no speculation.
        max_batch_delay: an idle engine waits so long for more requests.
        check: verify the invariants after each plan and commit (slow).
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    enable_prefix_caching: bool = True
    preemption_mode: str = "auto"
    max_preemptions: int = 3
    slo_itl: float | None = None
    num_speculative_tokens: int = 0
    max_batch_delay: float = 0.0
    check: bool = False
