"""Weights in 8 bits: a symmetric scale for each output of a matrix.

    s_f = max_d |W_df| / 127    q_df = round(W_df / s_f)    W_df ~ s_f q_df

A scale stands at an output, so a factor there, or one of the whole matrix (c of
a folded norm), goes into it and costs nothing. A factor of an input does not:
gains that are folded in, W' = diag(gamma~) W, widen the range that the numbers
of one output share, and make the error larger. It is measured, not assumed, in
`tests/int8_test.py`; quantise what is decoded, the folded model after folding.

Axes: D inputs, F outputs, N layers, V vocabulary.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from taperjax.config import ModelConfig
from taperjax.errors import UserError

WEIGHTS = ("float", "int8")
_LARGEST = 127  # -128 has no mirror image


def check(weights: str, config: ModelConfig) -> None:
  """Raises UserError where a model cannot be decoded with these weights."""
  if weights not in WEIGHTS:
    raise UserError(f"weights={weights!r} must be one of {', '.join(WEIGHTS)}")
  if weights == "int8" and config.internal_norm == "fake":
    raise UserError(
      "weights=int8 needs one input for q, k and v, and the norms of this "
      "FakeLN run (internal_norm=fake) are cut one by one; finish the run"
    )


def quantize(
  w: jax.Array, axes: tuple[int, ...]
) -> tuple[jax.Array, jax.Array]:
  """(q int8, s float32), s with size 1 at the input `axes`; w ~ s q.

  A column of zeros stays one: its scale is the smallest normal number.
  """
  w = w.astype(jnp.float32)
  most = jnp.max(jnp.abs(w), axis=axes, keepdims=True)
  scale = jnp.maximum(most / _LARGEST, jnp.finfo(jnp.float32).tiny)
  return jnp.round(w / scale).astype(jnp.int8), scale


@functools.partial(jax.jit, static_argnums=1)
def rounded(params: dict, config: ModelConfig) -> dict[str, Any]:
  """The parameters as int8 decoding sees them: quantised and back.

  The matrices q, k, v, o, gate, up and down, and the head; of a tied model
  the embedding, a scale for each token, also where tokens are looked up.
  Norms, biases and position embeddings stay; so does an embedding that is only
  looked up. Decoding computes s (q x) with q exact in any compute dtype; with
  these parameters a bfloat16 model rounds s q once more.

  Args:
    params, config: a model that `check` lets through, scanned or not.

  Returns:
    A tree as params, float32 where it was rounded.
  """

  def leaf(path, w):
    axes = _input_axes([part.key for part in path], config)
    if axes is None:
      return w
    q, scale = quantize(w, axes)
    return q.astype(jnp.float32) * scale

  return jax.tree_util.tree_map_with_path(leaf, params)


def _input_axes(
  names: list[str], config: ModelConfig
) -> tuple[int, ...] | None:
  """The axes of a leaf that its product sums over; None of one that stays."""
  if names == ["embed", "embedding"]:
    return (1,) if config.tied else None
  if names[-1] != "kernel":
    return None
  first = 1 if names[0] == "blocks" else 0  # stacked: behind the layers
  return (first, first + 1) if names[-2] == "o" else (first,)
