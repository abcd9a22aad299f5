"""Low-rank adapters: train a few parameters of a model, then merge them.

While a run trains, its tree holds one more branch, `lora`, with a and b for
each adapted kernel; the model itself only ever sees merged kernels, so
calibration, folding and exports know nothing of adapters.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from taperjax.config import LoraConfig

BRANCH = "lora"
_MODULE = {"q": "attn", "k": "attn", "v": "attn", "o": "attn"}  # else mlp


def init(params: dict, config: LoraConfig, key: jax.Array) -> dict:
  """Adapters with a ~ N(0, 1 / in) and b = 0, so that nothing changes yet.

  Args:
    params: of a model, one tree for each layer.
    config: rank above 0, and the projections that get adapters.

  Returns:
    {block_n: {module: {name: {a (in, R), b (R, out)}}}}.
  """
  adapters = {}
  blocks = sorted(name for name in params if name.startswith("block_"))
  for i, block in enumerate(blocks):
    for j, name in enumerate(config.targets):
      module = _MODULE.get(name, "mlp")
      shape = params[block][module][name]["kernel"].shape
      inputs = math.prod(shape[:2] if name == "o" else shape[:1])
      outputs = math.prod(shape) // inputs
      draw = jax.random.fold_in(jax.random.fold_in(key, i), j)
      a = jax.random.normal(draw, (inputs, config.rank)) * inputs**-0.5
      b = jnp.zeros((config.rank, outputs), jnp.float32)
      adapted = adapters.setdefault(block, {}).setdefault(module, {})
      adapted[name] = {"a": a, "b": b}
  return adapters


def merge(params: dict, config: LoraConfig) -> dict:
  """The plain tree: W + alpha / rank a b for each adapted kernel."""
  if BRANCH not in params:
    return params
  scale = config.alpha / config.rank

  def add(plain, adapted):
    if "a" in adapted:
      kernel = plain["kernel"]
      delta = (adapted["a"] @ adapted["b"]).reshape(kernel.shape)
      return {**plain, "kernel": kernel + scale * delta}
    merged = {k: add(plain[k], v) for k, v in adapted.items()}
    return {**plain, **merged}

  plain = {k: v for k, v in params.items() if k != BRANCH}
  return add(plain, params[BRANCH])


def split(params: dict) -> tuple[dict, dict]:
  """(what trains, what is frozen): all, or adapters and gamma~ alone."""
  if BRANCH not in params:
    return params, {}

  def pick(tree, tapers):
    found = {}
    for name, value in tree.items():
      if isinstance(value, dict):
        if inner := pick(value, tapers):
          found[name] = inner
      elif (name == "taper_scale") == tapers:
        found[name] = value
    return found

  plain = {k: v for k, v in params.items() if k != BRANCH}
  trained = {**pick(plain, True), BRANCH: params[BRANCH]}
  return trained, pick(plain, False)


def join(trained: dict, frozen: dict) -> dict:
  """The inverse of `split`."""
  joined = dict(frozen)
  for name, value in trained.items():
    if name in frozen:
      value = join(value, frozen[name])
    joined[name] = value
  return joined
