"""Tiny whole runs for the tests, made once and shared by all of them.

As a program it is the other process of a test:

    python -m tests.runs halves ROOT first|second   stop runs, or end them
    python -m tests.runs train ROOT ARGUMENT...     train.py, held at a step
    python -m tests.runs cases ROOT                 train.py, many mistakes
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import json
import math
import os
import pathlib
import runpy
import subprocess
import sys
import time

import jax
import numpy as np

from taperjax import (
  checkpoint,
  config as config_lib,
  folding,
  loop,
  metrics,
  saved,
)
from taperjax.data import windows
from tests import tiny

REPOSITORY = pathlib.Path(__file__).parents[1]
LIMIT = 900  # seconds; only for a process that hangs
STEPS, START, END = 10, 4, 8  # k_s and k_e: gate 1 to step 4, 0 from step 8
STOPS = (START - 1, START, START + 1, START + 3, END + 1)
BASELINE = {"variant": "baseline", "model__num_layers": 1}
HOLD = 8  # step before which a held run waits
CONFIG_FILE = """
from ml_collections import config_dict
from tests import runs

def get_config(variant="all_aux"):
  size = config_dict.placeholder(int)  # None, but may be set
  return config_dict.ConfigDict(
    runs.fields(data__vocab_size=size, variant=variant)
  )
"""


def fields(**changes) -> dict:
  """A run of ten steps on 20 stories as bytes; see tiny.fields.

  log_every does not divide the stops, so a stop falls between two records.
  """
  return tiny.fields(**{
    "context_len": 24,
    "log_every": 3,
    "optimizer__learning_rate": 3e-3,
    "data__tokenizer": "bytes",
    "data__vocab_size": None,
    "eval__max_windows": 7,
    **changes,
  })


def config(**changes) -> config_lib.Config:
  return saved.read_config(fields(**changes))


def train(
  root: pathlib.Path,
  workdir: str | pathlib.Path,
  stop_after: int | None = None,
  overwrite: bool = False,
  **changes,
):
  """loop.train in root/workdir, with programs that all tests share.

  Nothing is gained from fast programs here, and they take twice as long to
  make; the subprocesses do likewise, so all runs are comparable.
  """
  before = jax.config.read("jax_disable_most_optimizations")
  jax.config.update("jax_disable_most_optimizations", True)
  # jax does not ask how a program in memory was optimized: one that another
  # test made of the same shapes would differ in its last digits.
  folding._compare_row.clear_cache()
  try:
    return loop.train(
      config(**changes),
      root / workdir,
      overwrite=overwrite,
      stop_after=stop_after,
      compilation_cache=root / "cache",
    )
  finally:
    jax.config.update("jax_disable_most_optimizations", before)
    folding._compare_row.clear_cache()


def shared_root(tmp_path_factory) -> pathlib.Path:
  """One folder for all workers of a session."""
  base = tmp_path_factory.getbasetemp()
  if os.environ.get("PYTEST_XDIST_WORKER"):
    base = base.parent
  root = base / "runs"
  root.mkdir(exist_ok=True)
  return root


def finished(root: pathlib.Path, name: str, **changes) -> pathlib.Path:
  """The workdir of a run that never stopped; never write to it."""
  with (root / f"{name}.lock").open("w") as file:
    fcntl.flock(file, fcntl.LOCK_EX)
    if not (root / name / "summary.json").exists():
      train(root, name, **changes)
  return root / name


def started(checkpoint: pathlib.Path, **changes) -> dict:
  """Changes for a run that starts from a checkpoint, with its shape."""
  group = fields()["model"]
  return {
    **{f"model__{name}": None for name in group},
    "norm": None,
    "init__checkpoint": str(checkpoint),
    "data__tokenizer": "init",
    "variant": "all",
    **changes,
  }


def tapered(root: pathlib.Path) -> pathlib.Path:
  return finished(root, "tapered")


def baseline(root: pathlib.Path) -> pathlib.Path:
  return finished(root, "baseline", **BASELINE)


def state(folder: pathlib.Path, step: int | None = None):
  """(step, arrays by name, meta) of a whole checkpoint, from its bytes."""
  step, tree, meta = checkpoint.load_arrays(folder, step, ())
  return step, checkpoint._flatten(tree), meta


def assert_same_run(workdir: pathlib.Path, reference: pathlib.Path) -> None:
  """Everything but times is identical, bit by bit."""
  for part in ("checkpoints", "folded"):
    if not (reference / part).exists():
      assert not (workdir / part).exists()
      continue
    (step, arrays, meta), (want_step, want, want_meta) = (
      state(path / part) for path in (workdir, reference)
    )
    assert step == want_step
    assert arrays.keys() == want.keys()
    assert len(arrays) > 5
    for name, array in arrays.items():
      assert array.dtype == want[name].dtype, name
      assert array.tobytes() == want[name].tobytes(), f"{part}: {name}"
    # The source may be committed between two runs of a test.
    for name in ("wall_s", "commit"):
      meta.pop(name), want_meta.pop(name)
    assert meta == want_meta
  assert records(workdir) == records(reference)
  assert untimed_summary(workdir) == untimed_summary(reference)


def records(workdir: pathlib.Path) -> list[dict]:
  found = metrics.read_metrics(workdir / "metrics.jsonl")
  for record in found:
    record.pop("tokens_per_s", None)
  return found


def untimed_summary(workdir: pathlib.Path) -> dict:
  summary = json.loads((workdir / "summary.json").read_text())
  for name in ("wall_s", "commit"):
    summary.pop(name)
  for name in ("unfolded_tokens_per_s", "folded_tokens_per_s"):
    summary["decode"].pop(name)
  return summary


def damage(workdir: pathlib.Path, step: int) -> None:
  """Truncates every data file of a checkpoint, as a full disk would."""
  paths = list((workdir / "checkpoints" / str(step) / "state").rglob("d/*"))
  assert paths
  for path in paths:
    path.write_bytes(path.read_bytes()[:-40])


def assert_finite(folder: pathlib.Path) -> None:
  """No checkpoint of a folder holds a NaN or an infinity."""
  for step in checkpoint.Checkpoints(folder, read_only=True).steps():
    for name, array in state(folder, step)[1].items():
      assert np.all(np.isfinite(array)), f"step {step}: {name}"


def with_bad_steps(bad: set[int]):
  """`make_train_step` where every weight of these steps is NaN, and so is all
  that comes of them.
  """
  make_train_step = loop.step_lib.make_train_step

  def broken(*args):
    step = make_train_step(*args)

    def call(state, tokens, mask):
      worse = math.nan if int(state.step) + 1 in bad else 1.0
      return step(state, tokens, mask * worse)

    return call

  return broken


def process(*arguments) -> subprocess.CompletedProcess:
  """This module as a program; its output as text."""
  return subprocess.run(
    command(*arguments),
    cwd=REPOSITORY,
    capture_output=True,
    text=True,
    timeout=LIMIT,
    env=environment(),
  )


def environment() -> dict[str, str]:
  """Of the other processes: see `train`."""
  return {**os.environ, "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}


def command(*arguments) -> list[str]:
  return [sys.executable, "-m", "tests.runs", *map(str, arguments)]


def wait_for(done, what: str) -> None:
  """Polls until done(); a slow machine only takes longer."""
  end = time.monotonic() + LIMIT
  while not done():
    assert time.monotonic() < end, f"waited in vain for {what}"
    time.sleep(0.02)


def _halves(root: pathlib.Path, half: str) -> None:
  for stop in STOPS:
    print(f"run {stop}", file=sys.stderr)
    train(root, f"stop{stop}", stop if half == "first" else None)
  loaded = [name for name in ("tensorflow", "torch") if name in sys.modules]
  (root / f"loaded-{half}.json").write_text(json.dumps(loaded))


def _train(root: pathlib.Path, arguments: list[str]) -> None:
  """train.py, which waits before step HOLD until root/go is there."""
  train_batch = windows.train_batch

  def held(*args, step, **options):
    while step == HOLD and not (root / "go").exists():
      time.sleep(0.01)
    return train_batch(*args, step=step, **options)

  windows.train_batch = held
  _run_train(arguments)


def _run_train(arguments: list[str]) -> None:
  sys.argv = ["train.py", *arguments]
  runpy.run_path("train.py", run_name="__main__")


def _cases(root: pathlib.Path) -> None:
  """Runs train.py once for each list of arguments in root/cases.json.

  All is imported before the forks, so that a case costs no import.
  """
  found = []
  for arguments in json.loads((root / "cases.json").read_text()):
    streams = [root / name for name in ("stdout", "stderr")]
    child = os.fork()
    if not child:
      code = 0
      with contextlib.ExitStack() as stack:
        for path, number in zip(streams, (1, 2), strict=True):
          file = stack.enter_context(path.open("wb"))
          os.dup2(file.fileno(), number)
        try:
          _run_train(arguments)
        except SystemExit as error:
          code = error.code or 0
        except BaseException:
          import traceback

          traceback.print_exc()
          code = 1
        sys.stdout.flush()
        sys.stderr.flush()
      os._exit(code)
    _, status = os.waitpid(child, 0)
    texts = [path.read_text() for path in streams]
    found.append([os.waitstatus_to_exitcode(status), *texts])
  (root / "found.json").write_text(json.dumps(found))


def quiet(function, *args, **options):
  """(result, standard output, standard error) of a call."""
  out, err = io.StringIO(), io.StringIO()
  with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
    result = function(*args, **options)
  return result, out.getvalue(), err.getvalue()


if __name__ == "__main__":
  os.environ.setdefault("JAX_PLATFORMS", "cpu")
  kind, folder, *rest = sys.argv[1:]
  if kind == "halves":
    _halves(pathlib.Path(folder), *rest)
  elif kind == "train":
    _train(pathlib.Path(folder), rest)
  else:
    _cases(pathlib.Path(folder))
