"""Rotary embedding settings to `RopeSpec`: each kind of scaling reduces to one divisor per inverse frequency.

Kinds: linear (position interpolation), dynamic (NTK, which does nothing up to the model's own length), llama3, and
yarn (https://arxiv.org/abs/2309.00071). Each agrees with what Hugging Face transformers computes.
"""

from __future__ import annotations

import math
from typing import Literal

import numpy as np

from chairlift.models.fields import Fields
from chairlift.models.spec import RopeSpec

Style = Literal["half", "interleaved"]
SCALINGS = ("default", "linear", "dynamic", "llama3", "yarn")


def rope_from_config(scaling: Fields, theta: float, dims: int, style: Style, max_positions: int) -> RopeSpec:
    """A rope from the keys of a Hugging Face ``rope_scaling`` or ``rope_parameters`` object.

    With dynamic scaling the base grows with sequences beyond ``max_positions``; the model is used only up to there,
    where it has the plain base.
    """
    kind = scaling.text("rope_type", scaling.text("type", "default"))
    theta = positive(scaling, "rope_theta", theta)
    if scaling.real("partial_rotary_factor", 1.0) != 1.0:
        raise scaling.fail("partial_rotary_factor other than 1 is not supported")
    if kind in ("default", "dynamic"):
        return RopeSpec(theta=theta, dims=dims, style=style)
    if kind == "linear":
        return linear(theta, dims, style, positive(scaling, "factor"))
    original = scaling.whole("original_max_position_embeddings", max_positions, low=1)
    if kind == "llama3":
        return _llama3(scaling, theta, dims, style, original)
    if kind == "yarn":
        factor = positive(scaling, "factor", max_positions / original)
        return yarn(
            theta,
            dims,
            style,
            factor=factor,
            original=original,
            beta_fast=positive(scaling, "beta_fast", 32.0),
            beta_slow=positive(scaling, "beta_slow", 1.0),
            truncate=scaling.flag("truncate", True),
            attention_factor=positive(scaling, "attention_factor", _yarn_attention(scaling, factor)),
        )
    raise scaling.fail(f"rope type {kind!r:.60} is not supported (supported: {', '.join(SCALINGS)})")


def rope_from_gguf(fields: Fields, dims: int, style: Style, theta: float, max_positions: int) -> RopeSpec:
    """A rope from the ``rope.*`` keys of an architecture's GGUF metadata."""
    theta = positive(fields, "rope.freq_base", theta)
    kind = fields.text("rope.scaling.type", "linear" if "rope.scaling.factor" in fields else "none")
    if kind == "none":
        factor = positive(fields, "rope.scale_linear", 1.0)  # the key of early files
        return linear(theta, dims, style, factor)
    factor = positive(fields, "rope.scaling.factor", 1.0)
    if kind == "linear":
        return linear(theta, dims, style, factor)
    if kind == "yarn":
        return yarn(
            theta,
            dims,
            style,
            factor=factor,
            original=fields.whole("rope.scaling.original_context_length", max_positions, low=1),
            beta_fast=positive(fields, "rope.scaling.yarn_beta_fast", 32.0),
            beta_slow=positive(fields, "rope.scaling.yarn_beta_slow", 1.0),
            truncate=True,
            attention_factor=positive(fields, "rope.scaling.attn_factor", 1.0) * _magnitude(factor),
        )
    raise fields.fail(f"rope.scaling.type {kind!r:.60} is not supported (supported: none, linear, yarn)")


def positive(fields: Fields, key: str, default: float | None = None) -> float:
    """A number above 0."""
    value = fields.real(key) if default is None else fields.real(key, default)
    if value <= 0:
        raise fields.wrong(key, value, "above 0")
    return value


def linear(theta: float, dims: int, style: Style, factor: float) -> RopeSpec:
    """Positions divided by ``factor``."""
    scale = () if factor == 1.0 else (factor,) * (dims // 2)
    return RopeSpec(theta=theta, dims=dims, style=style, inv_freq_scale=scale)


def yarn(
    theta: float,
    dims: int,
    style: Style,
    *,
    factor: float,
    original: int,
    beta_fast: float,
    beta_slow: float,
    truncate: bool,
    attention_factor: float,
) -> RopeSpec:
    """YaRN: dimensions that turn more than ``beta_fast`` times within the ``original`` length keep their frequency,
    those that turn less than ``beta_slow`` times are divided by ``factor``, and a ramp joins the two."""

    def dimension(turns: float) -> float:
        return dims * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta)) if theta > 1 else 0.0

    low, high = dimension(beta_fast), dimension(beta_slow)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dims - 1)
    if low == high:
        high += 0.001
    ramp = np.clip((np.arange(dims // 2) - low) / (high - low), 0.0, 1.0)
    scale = 1.0 / (ramp / factor + (1.0 - ramp))
    return RopeSpec(
        theta=theta, dims=dims, style=style, inv_freq_scale=tuple(scale.tolist()), attention_factor=attention_factor
    )


def _magnitude(factor: float, scale: float = 1.0) -> float:
    return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0


def _yarn_attention(scaling: Fields, factor: float) -> float:
    mscale, mscale_all_dim = scaling.real("mscale", 0.0), scaling.real("mscale_all_dim", 0.0)
    if mscale and mscale_all_dim:
        return _magnitude(factor, mscale) / _magnitude(factor, mscale_all_dim)
    return _magnitude(factor)


def _llama3(scaling: Fields, theta: float, dims: int, style: Style, original: int) -> RopeSpec:
    """Llama 3.1's: long wavelengths are divided by ``factor``, short ones kept, a ramp between the two."""
    factor = positive(scaling, "factor")
    low, high = positive(scaling, "low_freq_factor"), positive(scaling, "high_freq_factor")
    if not low < high:
        raise scaling.fail(f"low_freq_factor ({low:g}) must be below high_freq_factor ({high:g})")
    with np.errstate(over="ignore"):
        wavelength = 2 * math.pi * np.power(theta, np.arange(0, dims, 2) / dims)
    smooth = np.clip((original / wavelength - low) / (high - low), 0.0, 1.0)
    scale = 1.0 / ((1.0 - smooth) / factor + smooth)
    return RopeSpec(theta=theta, dims=dims, style=style, inv_freq_scale=tuple(scale.tolist()))
