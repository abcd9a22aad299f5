"""A run on devices that are not here: what it holds, does and sends.

The train step of the run is compiled ahead of time, partitioned over as many
virtual CPU devices as the mesh has, with nothing allocated. The compiled
program gives the memory of a device, the FLOPs of its products and the bytes of
its collectives; a data sheet turns them into a time.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from taperjax import (
  attention,
  gate,
  hlo,
  model,
  sharding,
  state as state_lib,
  step,
)
from taperjax.config import Config
from taperjax.errors import UserError

USABLE = 0.9  # of the memory; the rest is the runtime's, and fragments
REACHED = 0.6  # of the peak, by products
STREAMED = 0.8  # of a bandwidth


@dataclasses.dataclass(frozen=True)
class Device:
  """An accelerator by its data sheet; bytes and seconds, bandwidths one way.

  Attributes:
    memory: bytes.
    flops: peak of bfloat16 products a second, dense.
    bandwidth: of the memory.
    link: of a device to the others of its island.
    island: devices that links join.
    network: of a device to other islands.
  """

  memory: float
  flops: float
  bandwidth: float
  link: float
  island: int
  network: float


# NVIDIA: data sheets of A100 80GB SXM, H100 SXM and H200 SXM, with FLOPs halved
# where they are stated with sparsity, and NVLink to one way; for each GPU one
# network adapter of 200 (A100) or 400 Gbit/s, as in the DGX of its generation.
# Google: Cloud TPU documentation, pages "TPU v5e" and "TPU v5p", interconnect
# halved to one way, and the chip's share of the data center network.
DEVICES = {
  "a100": Device(80e9, 312e12, 2.039e12, 300e9, 8, 25e9),
  "h100": Device(80e9, 989e12, 3.35e12, 450e9, 8, 50e9),
  "h200": Device(141e9, 989e12, 4.8e12, 450e9, 8, 50e9),
  "v5e": Device(16e9, 197e12, 819e9, 200e9, 256, 3.125e9),
  "v5p": Device(95e9, 459e12, 2.765e12, 600e9, 8960, 6.25e9),
}
ASSUMES = (
  f"products reach {REACHED:g} of the bfloat16 peak, in float32 of half of it",
  f"transfers reach {STREAMED:g} of their bandwidth",
  "all state is read and written once a step, temporary memory once in each "
  "micro-batch",
  "a collective goes around a ring; where that leaves an island, it has the "
  "network of its devices there",
  "the program is one for a CPU, which sums gradients whole where an "
  "accelerator may scatter them at half the bytes, and which widens and fuses "
  "in its own way: temporary memory is an estimate",
)


def plan(config: Config, name: str) -> dict[str, Any]:
  """Memory, work and time of a step of a run, on its mesh of a device.

  The step is that of the taper phase, which has both branches of each norm;
  without tapers that of the only phase.

  Args:
    config: of the run, its vocabulary known.
    name: of DEVICES.

  Returns:
    device, devices, mesh, phase, params, params_taper, tokens, compile_s;
    `memory` of a device, bytes: see `memory`, and total, usable, fits, why;
    `flops`: model, of a step, and device, of what each device is to compute;
    `collectives`: per kind times, and bytes that a device sends; `seconds`:
    compute, memory, collectives, step (collectives after the rest) and
    step_overlapped (the longest of the three alone); mfu and mfu_overlapped,
    model FLOPs as a share of the peak in these times; assumes.

  Raises:
    UserError: no such device, an axis that splits nothing evenly, or jax has
      started with too few devices.
  """
  device = find(name)
  count = math.prod(dataclasses.astuple(config.mesh))
  mesh = sharding.make_mesh(config.mesh, virtual_devices(count))
  begin = time.perf_counter()
  state, compiled = compile_step(config, mesh)
  compile_s = time.perf_counter() - begin
  parts = memory(state, compiled)
  done = hlo.work(compiled.as_text())
  flops = {"model": model_flops(config), "device": done.flops}
  peak = device.flops / (2 if config.compute_dtype == "float32" else 1)
  seconds = _seconds(config, device, peak, parts, done)
  params, params_taper = model.count_params(state.params)
  seeds = len(config.seeds)
  return {
    "device": name,
    "devices": count,
    "mesh": dataclasses.asdict(config.mesh),
    "phase": _phase(config),
    "params": params // seeds,
    "params_taper": params_taper // seeds,
    "tokens": seeds * config.batch_size * config.context_len,
    "compile_s": compile_s,
    "memory": parts | _fit(config, device, parts),
    "flops": flops,
    "collectives": _by_kind(done.collectives),
    "seconds": seconds,
    "mfu": flops["model"] / (count * peak * seconds["step"]),
    "mfu_overlapped": (
      flops["model"] / (count * peak * seconds["step_overlapped"])
    ),
    "assumes": list(ASSUMES),
  }


def find(name: str) -> Device:
  """The data sheet of a device.

  Raises:
    UserError: there is none.
  """
  if name not in DEVICES:
    raise UserError(
      f"--device={name} is not known; use one of {', '.join(DEVICES)}"
    )
  return DEVICES[name]


def virtual_devices(count: int) -> list[jax.Device]:
  """CPU devices that compute nothing; before anything asks for a device.

  Raises:
    UserError: jax has started with fewer.
  """
  with contextlib.suppress(RuntimeError):  # it has started
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", count)
  devices = jax.devices("cpu")
  if len(devices) < count:
    raise UserError(
      f"the mesh has {count} devices, and jax has started with {len(devices)}; "
      "plan in a process of its own"
    )
  return devices[:count]


def compile_step(
  config: Config, mesh: Mesh | None, as_here: bool = False
) -> tuple[state_lib.TrainState, jax.stages.Compiled]:
  """The state of a run as shapes that know where they lie, and its step.

  Args:
    config: of the run. mesh: or None for one device.
    as_here: compile what would run on this CPU, not on an accelerator.
  """
  state = state_lib.abstract(config)
  shape = (config.batch_size, config.context_len)
  many = len(config.seeds) > 1
  tokens = (shape[0], shape[1] + 1)
  tokens = jax.ShapeDtypeStruct(
    (len(config.seeds), *tokens) if many else tokens, jnp.int32
  )
  mask = jax.ShapeDtypeStruct(shape, jnp.float32)
  if mesh is not None:
    put = lambda leaf, where: leaf.update(sharding=where)
    state = jax.tree.map(put, state, state_lib.shardings(config, mesh))
    tokens = put(tokens, sharding.batch_sharding(mesh, many))
    mask = put(mask, sharding.batch_sharding(mesh))
  context = contextlib.nullcontext()
  if not as_here:
    context = attention.replaced(_accelerator_attention)
    if config.compute_dtype == "bfloat16":
      # A CPU makes all bfloat16 float32 before it sends it, but not float16.
      cfg = config.model.replace(compute_dtype="float16")
      config = dataclasses.replace(config, model=cfg)
  train_step = step.make_train_step(config, _phase(config), mesh)
  with context:
    lowered = train_step.lower(state, tokens, mask)
  return state, lowered.compile()


def _accelerator_attention(q_BLHK, k_BLGK, v_BLGK):
  """That of `attention` elsewhere; on a CPU it takes no float16."""
  dtype, wide = q_BLHK.dtype, q_BLHK.dtype
  if dtype == jnp.float16:
    wide = jnp.bfloat16
  out_BLHK = jax.nn.dot_product_attention(
    *(x.astype(wide) for x in (q_BLHK, k_BLGK, v_BLGK)), is_causal=True
  )
  return out_BLHK.astype(dtype)


def _phase(config):
  return gate.TAPER if config.tapers else gate.NORM


def memory(state: state_lib.TrainState, compiled: Any) -> dict[str, int]:
  """Bytes of a device during a step.

  Returns:
    parameters; optimizer; rest: the batch, statistics and counters; temporary:
    gradients, activations and what else is gone after the step.
  """
  found = compiled.memory_analysis()
  parts = {
    "parameters": _held(state.params),
    "optimizer": _held(state.opt_state),
  }
  return parts | {
    "rest": found.argument_size_in_bytes - sum(parts.values()),
    "temporary": (
      found.temp_size_in_bytes
      + found.output_size_in_bytes
      - found.alias_size_in_bytes
    ),
  }


def _held(tree):
  """Bytes of a device in a tree of shapes."""
  total = 0
  for leaf in jax.tree.leaves(tree):
    where, shape = leaf.sharding, leaf.shape
    shape = shape if where is None else where.shard_shape(shape)
    total += math.prod(shape) * leaf.dtype.itemsize
  return total


def _fit(config, device, parts):
  """total, usable, fits and, where it does not, why and what would help."""
  total, usable = sum(parts.values()), USABLE * device.memory
  if total <= usable:
    return {"total": total, "usable": usable, "fits": True, "why": None}
  mesh = config.mesh
  rows = config.batch_size // config.micro_batches // (mesh.data * mesh.fsdp)
  lasting = 2 * parts["parameters"] + parts["optimizer"]  # and gradients
  if lasting > total / 2:
    remedy = "raise mesh.fsdp or mesh.tensor, which split the state"
  elif not config.model.remat:
    remedy = "set model.remat=True"
  elif rows > 1:
    remedy = f"raise micro_batches: a device has {rows} windows at a time"
  else:
    remedy = "raise mesh.tensor, or lower context_len"
  sizes = ", ".join(f"{name} {size / 1e9:.1f}" for name, size in parts.items())
  why = f"{total / 1e9:.1f} GB of {usable / 1e9:.1f} usable ({sizes}); {remedy}"
  return {"total": total, "usable": usable, "fits": False, "why": why}


def model_flops(config: Config) -> float:
  """FLOPs that a step of the run needs, however it is computed.

  6 for each token and each weight of a product (the head is one, a look-up is
  none), and 6 H K L for each token and layer: scores and values of the half of
  the window that a query sees on average. 2 of each 6 are forward.
  """
  cfg = config.model
  params = jax.eval_shape(lambda: model.init_params(cfg, jax.random.key(0)))
  weights = sum(
    leaf.size
    for path, leaf in jax.tree_util.tree_leaves_with_path(params)
    if path[-1].key == "kernel"
  )
  if cfg.tied:
    weights += params["embed"]["embedding"].size
  seen = cfg.num_layers * cfg.num_heads * cfg.head_dim * config.context_len
  tokens = len(config.seeds) * config.batch_size * config.context_len
  return 6.0 * tokens * (weights + seen)


def _seconds(config, device, peak, parts, done):
  passes = config.micro_batches - 1  # beyond the first
  moved = 2 * (sum(parts.values()) + passes * parts["temporary"])
  alone = {
    "compute": done.flops / (REACHED * peak),
    "memory": moved / (STREAMED * device.bandwidth),
    "collectives": sum(
      each.times * each.sent / (STREAMED * _rate(device, each.groups))
      for each in done.collectives
    ),
  }
  return alone | {
    "step": max(alone["compute"], alone["memory"]) + alone["collectives"],
    "step_overlapped": max(alone.values()),
  }


def _rate(device: Device, groups: np.ndarray) -> float:
  """Bytes a second that a device can send in the slowest group."""
  members = min(
    len(group) / len(np.unique(group // device.island)) for group in groups
  )
  if members == groups.shape[1]:
    return device.link
  return min(device.link, members * device.network)


def _by_kind(collectives):
  found = {}
  for each in collectives:
    kind = found.setdefault(each.kind, {"times": 0, "bytes": 0.0})
    kind["times"] += each.times
    kind["bytes"] += each.times * each.sent
  return dict(sorted(found.items()))
