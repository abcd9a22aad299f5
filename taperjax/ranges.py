"""How large the residual stream grows, for dtypes of small range."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from taperjax import model
from taperjax.config import ModelConfig

MAX_FLOAT16 = 65_504.0


def largest_residuals(
  params: dict, c: Any, gate: float, config: ModelConfig, tokens_BL: Any
) -> list[float]:
  """Largest |h| in float32 behind each block, N values.

  Args:
    params, c, gate, config: a model. gate 0.0 or 1.0.
    tokens_BL: int32 ids. Rows run one at a time.
  """
  config = config.replace(compute_dtype="float32")
  found = [
    _row(params, jnp.asarray(c), float(gate), config, row_L)
    for row_L in np.asarray(tokens_BL, np.int32)
  ]
  return np.max(jax.device_get(found), axis=0).tolist()


def float16_margin(largest: list[float]) -> float:
  """By which factor the stream could grow before float16 overflows.

  0 where the stream is infinite, NaN where it is NaN, infinite where it is 0.
  """
  with np.errstate(divide="ignore"):
    return float(MAX_FLOAT16 / np.max(largest))


def hidden_and_residuals(
  params: dict,
  c: jax.Array,
  gate: float | jax.Array,
  config: ModelConfig,
  tokens_BL: jax.Array,
  mask_BL: jax.Array,
) -> tuple[jax.Array, dict[str, Any], jax.Array]:
  """The input of the head, and the largest |h| behind each block.

  Returns:
    hidden_BLD and aux as the model gives them, and largest_N, float32, over
    positions with a mask above 0. In one jitted program nothing else is kept.
  """
  params, config = model.unstack_layers(params, config)
  (hidden_BLD, aux), state = model.Transformer(config).apply(
    {"params": params},
    tokens_BL,
    gate=gate,
    c=c,
    output="hidden",
    capture_intermediates=lambda module, _: isinstance(module, model.Block),
    mutable="intermediates",
  )
  seen_BL1 = mask_BL[:, :, None] > 0

  def largest(n):
    h_BLD = state["intermediates"][f"block_{n}"]["__call__"][0][0]
    return jnp.max(jnp.where(seen_BL1, jnp.abs(h_BLD.astype(jnp.float32)), 0.0))

  largest_N = jnp.stack([largest(n) for n in range(config.num_layers)])
  return hidden_BLD, aux, largest_N


@functools.partial(jax.jit, static_argnames=("gate", "config"))
def _row(params, c, gate, config, tokens_L):
  tokens_BL = tokens_L[None, :]
  return hidden_and_residuals(
    params, c, gate, config, tokens_BL, jnp.ones(tokens_BL.shape)
  )[2]
