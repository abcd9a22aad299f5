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
    params, c, gate, config: a model, layers not stacked. gate 0.0 or 1.0.
    tokens_BL: int32 ids. Rows run one at a time.
  """
  config = config.replace(compute_dtype="float32")
  found = [
    _row(params, jnp.asarray(c), float(gate), config, row_L)
    for row_L in np.asarray(tokens_BL, np.int32)
  ]
  return np.max(jax.device_get(found), axis=0).tolist()


def float16_margin(largest: list[float]) -> float:
  """By which factor the stream could grow before float16 overflows."""
  return MAX_FLOAT16 / max(largest)


@functools.partial(jax.jit, static_argnames=("gate", "config"))
def _row(params, c, gate, config, tokens_L):
  _, state = model.Transformer(config).apply(
    {"params": params},
    tokens_L[None, :],
    gate=gate,
    c=c,
    output="hidden",
    capture_intermediates=lambda module, _: isinstance(module, model.Block),
    mutable="intermediates",
  )
  outputs = [
    state["intermediates"][f"block_{n}"]["__call__"][0][0]
    for n in range(config.num_layers)
  ]
  return jnp.stack([jnp.max(jnp.abs(h_BLD)) for h_BLD in outputs])
