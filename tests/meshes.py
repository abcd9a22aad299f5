"""Whole runs on many devices, for the tests; as a program:

    python -m tests.meshes eight ROOT           8 virtual devices, all meshes
    python -m tests.meshes two ROOT PORT I      process I of two
"""

from __future__ import annotations

import os
import pathlib
import shutil
import sys

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
MIXED = {"mesh__data": 2, "mesh__fsdp": 2, "mesh__tensor": 2}


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
  from taperjax import sharding

  sharding.connect(f"127.0.0.1:{port}", 2, int(process))
  train(root, "two", **MIXED)


def eight(root: pathlib.Path) -> None:
  devices(1)
  train(root, "one")
  devices(8)
  train(root, "mixed", **MIXED)


if __name__ == "__main__":
  kind, folder, *rest = sys.argv[1:]
  os.environ["JAX_PLATFORMS"] = "cpu"
  os.environ["JAX_CPU_COLLECTIVES_IMPLEMENTATION"] = "gloo"
  count = {"eight": 8, "two": 4}[kind]
  flag = f"--xla_force_host_platform_device_count={count}"
  os.environ["XLA_FLAGS"] = flag
  {"eight": eight, "two": two}[kind](pathlib.Path(folder), *rest)
