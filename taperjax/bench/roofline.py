"""What a decoding step must read, how fast memory is, and what is compiled."""

from __future__ import annotations

import concurrent.futures
import os
import re
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from taperjax import hlo, model, packing
from taperjax.config import ModelConfig

TEST_BYTES = 2**28  # for each core: more than any cache
# Instructions that name values and do no work.
_FREE = {
  "parameter", "get-tuple-element", "tuple", "bitcast", "constant",
  "after-all",
}
_REDUCE = {"reduce", "reduce-window"}


def cores() -> int:
  """Cores that this process may use."""
  try:
    return len(os.sched_getaffinity(0))
  except AttributeError:  # not on every system
    return os.cpu_count() or 1


def read_bandwidth(
  threads: int, repeats: int = 5, size: int = TEST_BYTES
) -> float:
  """Bytes a second, the best of some reads of a large array.

  On a CPU every thread reads an array of `size` bytes of its own, all at once;
  elsewhere the device sums one array.
  """
  best = 0.0
  if jax.default_backend() != "cpu":
    x = jnp.ones((size // 4,), jnp.float32)
    total = jax.jit(jnp.sum)
    total(x).block_until_ready()
    for _ in range(repeats):
      begin = time.perf_counter()
      total(x).block_until_ready()
      best = max(best, x.nbytes / (time.perf_counter() - begin))
    return best
  arrays = [np.ones(size // 4, np.float32) for _ in range(threads)]
  with concurrent.futures.ThreadPoolExecutor(threads) as pool:
    for _ in range(repeats):
      begin = time.perf_counter()
      list(pool.map(lambda x: float(np.dot(x, x)), arrays))
      seconds = time.perf_counter() - begin
      best = max(best, threads * arrays[0].nbytes / seconds)
  return best


def step_bytes(
  packed: dict[str, Any],
  config: ModelConfig,
  batch: int,
  prompt: int,
  new: int,
) -> int:
  """Bytes that a step must move, on average over `new` steps.

  Every weight once (int8 with its scales), of the embedding tables one row for
  each row of the batch, and the filled part of the cache with the slot that is
  written. Where the head is the embedding table too, it is read once.
  """
  leaves = jax.tree.leaves(packed)
  tables = [packed[k] for k in ("embed", "position_embed") if k in packed]
  weights = sum(x.nbytes for x in leaves) - sum(x.nbytes for x in tables)
  rows = sum(batch * x.nbytes // x.shape[0] for x in tables)
  slot = (
    2 * config.num_layers * config.num_kv_heads * config.head_dim
    * jnp.dtype(config.compute_dtype).itemsize
  )
  filled = prompt + (new - 1) / 2  # read, the new slot among them
  return round(weights + rows + batch * slot * (filled + 1))


def reductions(
  packed: dict[str, Any], config: ModelConfig, batch: int, gate: float, c: Any
) -> int:
  """Reductions in the program of one step, as it is traced.

  Softmax has two for each layer. A live RMSNorm adds one for each site, so
  folding all of N layers takes 2 N + 1 away.
  """
  ints = jax.ShapeDtypeStruct((batch,), jnp.int32)
  cache = jax.eval_shape(
    lambda place_B: packing.enter(
      model.init_cache(config, batch, length=8), place_B
    ), ints
  )
  program = jax.make_jaxpr(
    lambda packed, token_B, place_B, cache: packing.step(
      packed, config, token_B, place_B, cache, gate=gate, c=c
    )[0]
  )(packed, ints, ints, cache)
  # `slot`, the largest position, is bookkeeping: one over integers.
  return _count_reductions(program.jaxpr)


def _count_reductions(jaxpr) -> int:
  found = 0
  for equation in jaxpr.eqns:
    floats = any(
      jnp.issubdtype(x.aval.dtype, jnp.floating) for x in equation.invars
    )
    found += floats and equation.primitive.name.startswith("reduce_")
    for value in equation.params.values():  # a function that is called
      inner = getattr(value, "jaxpr", value)
      found += _count_reductions(inner) if hasattr(inner, "eqns") else 0
  return found


def compiled_counts(text: str) -> dict[str, int]:
  """Kernels and reductions of the largest loop body of an optimized program.

  Args:
    text: optimized HLO, `compiled.as_text()`.

  Returns:
    kernels: instructions of the body that do work (a fusion is one);
    compiled_reductions: reduce and reduce-window in it and in its fusions.
  """
  computations = {
    name: list(lines.values()) for name, lines in hlo.computations(text).items()
  }
  bodies = set(re.findall(r"body=%?([\w.\-]+)", text))
  if not bodies:
    return {"kernels": 0, "compiled_reductions": 0}
  opcode = lambda line: re.search(r" ([a-z][a-z\-]*)\(", " " + line)[1]
  body = max(bodies, key=lambda name: len(computations[name]))
  reduced = 0
  for line in computations[body]:
    called = re.findall(r"calls=%?([\w.\-]+)", line)
    lines = [line, *(x for name in called for x in computations[name])]
    reduced += sum(opcode(x) in _REDUCE for x in lines)
  kernels = sum(opcode(line) not in _FREE for line in computations[body])
  return {"kernels": kernels, "compiled_reductions": reduced}
