"""Whole runs on many devices, for the tests; as a program:

    python -m tests.meshes two ROOT PORT I      process I of two
    python -m tests.meshes eight ROOT           8 virtual devices; after `two`
    python -m tests.meshes others ROOT          adapters, FakeLN, seeds
    python -m tests.meshes axes ROOT            each axis of the mesh alone
    python -m tests.meshes plan ROOT            `plan`, and a step of that run
"""

from __future__ import annotations

import functools
import json
import math
import os
import pathlib
import re
import shutil
import sys
import time

import numpy as np

KEY_BIAS = "attn/k/bias"  # its gradient is zero in theory: see seeds_test
STEPS, START, END = 20, 6, 14  # k_s and k_e
SHAPE = {
  "steps": STEPS,
  "taper__start": START / STEPS,
  "taper__end": END / STEPS,
  "norm": "layer",
  "batch_size": 8,
  "context_len": 12,
  "model__num_layers": 1,
  "model__embed_dim": 16,
  "model__num_heads": 4,
  "model__mlp_dim": 24,
  "model__mlp": "gelu",
  "model__biases": ("k", "up"),
  "eval__every": 10,
  "eval__batch_size": 8,
  "eval__max_windows": 13,  # three rows of the last batch are padding
  "checkpoint__every": 10,
}
# Temporary memory is far above what a process gains by itself in a step.
PLANNED = {
  "batch_size": 16, "context_len": 256, "eval__batch_size": 16,
  "model__embed_dim": 64, "model__mlp_dim": 1024, "model__biases": (),
  "variant": "all",
}
PAIR = {"mesh__fsdp": 2}  # a device each: no process has the whole state
MIXED = {"mesh__data": 2, "mesh__fsdp": 2, "mesh__tensor": 2}
SEEDS = {"seeds": (0, 1)}


def train(root: pathlib.Path, name: str, stop_after=None, **changes):
  """loop.train; the summary, or None."""
  from tests import runs

  return runs.train(root, name, stop_after, **{**SHAPE, **changes})


def continued(root: pathlib.Path, source: str, name: str, **changes) -> None:
  """A run to the end from step 10 of another one."""
  shutil.copytree(root / source, root / name)
  shutil.rmtree(root / name / "checkpoints" / str(STEPS))
  train(root, name, **changes)


def devices(count: int) -> None:
  """Only these are there from now on."""
  import jax

  jax.devices = lambda *_: jax.local_devices()[:count]


def two(root: pathlib.Path, port: str, process: str) -> None:
  from taperjax import cli, sharding

  with cli.ends_alone(), cli.report_errors("train.py", debug=False):
    sharding.connect(f"127.0.0.1:{port}", 2, int(process))
    train(root, "two", **PAIR)


def eight(root: pathlib.Path) -> None:
  devices(8)
  train(root, "mixed", **MIXED)
  devices(1)
  train(root, "one")
  continued(root, "mixed", "mixed-on-one")
  continued(root, "two", "two-on-one")
  devices(8)
  continued(root, "one", "one-on-mixed", **MIXED)


def others(root: pathlib.Path) -> None:
  """Adapters, FakeLN and several seeds; two of them from a checkpoint."""
  from tests import runs

  devices(1)
  train(root, "base", variant="baseline")
  start = functools.partial(runs.started, root / "base", batch_size=8)
  cases = {
    "lora": start(lora__rank=2, lora__targets=("q", "down")),
    "fakeln": start(variant="fakeln"),
    "seeds": SEEDS,
  }
  for name, changes in cases.items():
    train(root, f"{name}-one", **changes)
  devices(8)
  for name, changes in cases.items():
    mesh = MIXED if name != "seeds" else {
      "mesh__seed": 2, "mesh__data": 2, "mesh__fsdp": 2
    }
    train(root, f"{name}-mixed", **changes, **mesh)


def axes(root: pathlib.Path) -> None:
  """Each axis alone, and seeds: prints differences from one device."""
  del root
  for changes in (
    {"mesh__data": 8},
    {"mesh__fsdp": 8},
    {"mesh__tensor": 4},
    MIXED,
  ):
    _print_difference(changes, {})
  _print_difference({"mesh__seed": 2, **SEEDS}, SEEDS)
  _print_difference({"mesh__seed": 2, **MIXED, **SEEDS, "mesh__data": 1}, SEEDS)


def plan(root: pathlib.Path) -> None:
  """Prints what `plan` says, what a step takes, and what a known program does.

  The first line is of `taperjax plan`, which must set the devices itself.
  """
  from taperjax import cli

  file = root / "planned.py"
  file.write_text(
    "from ml_collections import config_dict\n"
    "from tests import meshes, runs\n"
    "def get_config():\n"
    "  fields = runs.fields(**{**meshes.SHAPE, **meshes.PLANNED})\n"
    "  return config_dict.ConfigDict(fields)\n"
  )
  cli.main(["plan", "--config", str(file), "--mesh=data=2,fsdp=2,tensor=2",
            "--device=a100", "--json"])
  print(json.dumps(_taken()))
  print(json.dumps(_known_program()))


def _taken() -> dict:
  """Bytes as planned for this machine, and as a step really takes them."""
  import jax

  from taperjax import config as config_lib, planning, sharding, state
  from tests import runs

  fields = runs.fields(**{**SHAPE, **PLANNED, **MIXED})
  config = config_lib.parse(fields).with_vocab(257)
  mesh = sharding.make_mesh(config.mesh, jax.devices())
  shapes, compiled = planning.compile_step(config, mesh, as_here=True)
  rows, shape = sharding.batch_sharding(mesh), (16, 256)
  tokens = np.random.default_rng(0).integers(0, 257, (16, 257), np.int32)
  batch = tuple(
    sharding.place(x, rows) for x in (tokens, np.ones(shape, np.float32))
  )
  now = jax.block_until_ready(state.start(config, mesh=mesh))

  def held(tree):
    """Of each device."""
    found = [0] * 8
    for leaf in jax.tree.leaves(tree):
      for part in leaf.addressable_shards:
        found[part.device.id] += part.data.nbytes
    return found

  before = {
    "parameters": held(now.params), "optimizer": held(now.opt_state),
    "arguments": held((now, batch)), "unread": now.gate.nbytes,
  }
  now, peak = _peak(lambda: jax.block_until_ready(compiled(now, *batch))[0])
  return {
    "planned": planning.memory(shapes, compiled), **before, "peak": peak,
    "parameters_after": held(now.params),
    "optimizer_after": held(now.opt_state),
  }


def _peak(run):
  """(result, bytes that the process gains at most meanwhile); Linux alone."""
  import ctypes

  def size(name):
    text = pathlib.Path("/proc/self/status").read_text()
    return 1024 * int(re.search(rf"{name}:\s+(\d+) kB", text)[1])

  clear = pathlib.Path("/proc/self/clear_refs")
  if not clear.exists():
    return run(), None
  ctypes.CDLL(None).malloc_trim(0)  # what is free would be taken again unseen
  before = size("VmRSS")
  clear.write_text("5")  # the peak starts anew
  return run(), size("VmHWM") - before


def _known_program() -> dict:
  """FLOPs and collectives that are found in a program written out here."""
  import jax
  import jax.numpy as jnp
  from jax.sharding import AxisType, PartitionSpec as Spec

  from taperjax import hlo

  auto = (AxisType.Auto,) * 2
  mesh = jax.make_mesh((2, 4), ("a", "b"), auto)

  def program(x_RC):  # (8, 16) of (64, 16)
    def body(x_RC, _):
      all_SC = jax.lax.all_gather(x_RC, "b", tiled=True)
      return jnp.sin(x_RC @ all_SC.T) @ all_SC, None

    x_RC, _ = jax.lax.scan(body, x_RC, length=5)
    ring = [(i, (i + 1) % 4) for i in range(4)]
    return (
      jax.lax.psum(jnp.cos(x_RC), "a"),
      jax.lax.psum_scatter(jnp.exp(x_RC), "b", tiled=True),
      jax.lax.ppermute(jnp.tanh(x_RC), "b", ring),
      jax.lax.all_to_all(jnp.abs(x_RC), "b", 0, 0, tiled=True),
    )

  rows = Spec(("a", "b"))
  run = jax.jit(jax.shard_map(
    program, mesh=mesh, in_specs=rows, out_specs=rows, check_vma=False
  ))
  x = jax.ShapeDtypeStruct((64, 16), jnp.float32)
  found = hlo.work(run.lower(x).compile().as_text())
  return {"flops": found.flops, "collectives": {
    each.kind: [each.times, each.sent, each.groups.tolist()]
    for each in found.collectives
  }}


def _print_difference(changes: dict, reference: dict) -> None:
  begin = time.process_time()
  got, want = (steps(**both) for both in (changes, reference))
  worst = difference(got[1].params, want[1].params)
  line = {
    "mesh": {n[6:]: v for n, v in changes.items() if n.startswith("mesh__")},
    "loss": max(
      float(np.max(np.abs(a - b))) for a, b in zip(got[0], want[0], strict=True)
    ),
    "key bias": max(v for n, v in worst.items() if n.endswith(KEY_BIAS)),
    "other parameters": max(
      v for n, v in worst.items() if not n.endswith(KEY_BIAS)
    ),
    "c": float(np.max(np.abs(got[1].taper.c / want[1].taper.c - 1))),
    "collectives": got[2],
    "cpu_s": round(time.process_time() - begin),
  }
  print(json.dumps(line), flush=True)


def difference(got, want) -> dict[str, float]:
  """Largest difference of each leaf, by name."""
  import jax

  return {
    jax.tree_util.keystr(path, simple=True, separator="/"): float(
      np.max(np.abs(np.float64(a) - b))
    )
    for (path, a), b in zip(
      jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want),
      strict=True,
    )
  }


def steps(**changes):
  """(losses, state, collectives of a step) of a run without files."""
  import jax

  from taperjax import config as config_lib, gate, sharding, state, step
  from tests import runs

  fields = runs.fields(**{**SHAPE, **changes})
  config = config_lib.parse(fields).with_vocab(257)
  count = math.prod(fields["mesh"].values())
  mesh = sharding.make_mesh(config.mesh, jax.local_devices()[:count])
  many, found, losses = len(config.seeds) > 1, {}, []
  mask = np.ones((8, 12), np.float32)
  mask[:, 7:] = mask[3:, 4:] = 0  # an unequal share of padding in each part

  def put(array, many=False):
    if mesh is None:
      return array
    return sharding.place(array, sharding.batch_sharding(mesh, many))

  mask, now, seen = put(mask), state.start(config, mesh=mesh), ""
  for k in range(1, STEPS + 1):
    rng = np.random.default_rng(k)
    shape = (len(config.seeds), 8, 13) if many else (8, 13)
    tokens = put(rng.integers(0, 257, shape, np.int32), many)
    phase = gate.phase(k, config.taper_steps)
    if phase not in found:
      found[phase] = step.make_train_step(config, phase, mesh)
      if mesh is not None and phase == gate.TAPER:
        seen = collectives(found[phase].lower(now, tokens, mask).compile())
    now, metrics = found[phase](now, tokens, mask)
    losses.append(jax.device_get(metrics["loss"]))
    if k == config.taper_steps.start:
      now = step.make_calibrate(config, mesh)(now)
  return losses, jax.device_get(now), seen


def collectives(compiled) -> dict[str, int]:
  """How often each kind stands in a compiled program."""
  kinds = re.findall(
    r" (all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)"
    r"(?:-start)?\(",
    compiled.as_text(),
  )
  return {kind: kinds.count(kind) for kind in sorted(set(kinds))}


if __name__ == "__main__":
  kind, folder, *rest = sys.argv[1:]
  os.environ["JAX_PLATFORMS"] = "cpu"
  os.environ["JAX_CPU_COLLECTIVES_IMPLEMENTATION"] = "gloo"
  run, count = {
    "eight": (eight, 8), "others": (others, 8), "axes": (axes, 8),
    "two": (two, 1), "plan": (plan, 1),
  }[kind]
  flag = f"--xla_force_host_platform_device_count={count}"
  os.environ["XLA_FLAGS"] = flag
  run(pathlib.Path(folder), *rest)
