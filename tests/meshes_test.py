"""One device, eight and two processes: the same run, the same model.

Float32 sums in another order differ in the last digit. Twenty steps of Adam
leave 1.2e-7 of it in the parameters, which is one digit of a gain near 1, and
2e-7 of a loss or of c (seen on all meshes of `tests.meshes`); the bounds are
ten times that. A row that is dropped, counted twice or not summed over the
devices moves the loss by 1e-3.
"""

from __future__ import annotations

import json
import pathlib
import re
import socket
import subprocess
import sys
import time

import numpy as np
import pytest

from taperjax import metrics
from tests import meshes, runs

NAMES = ("mixed", "two", "mixed-on-one", "two-on-one", "one-on-mixed")
OTHERS = ("lora-mixed", "fakeln-mixed", "seeds-mixed")
ALL = [*NAMES, *(pytest.param(x, marks=pytest.mark.long) for x in OTHERS)]
KILLED = 9  # exit code of SIGKILL, negative


def start(*arguments) -> subprocess.Popen:
  return subprocess.Popen(
    [sys.executable, "-m", "tests.meshes", *map(str, arguments)],
    cwd=runs.REPOSITORY,
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    text=True,
    env={**runs.environment(), "OMP_NUM_THREADS": "1"},
  )


def finish(process: subprocess.Popen) -> str:
  try:
    out, _ = process.communicate(timeout=2 * runs.LIMIT)
  except subprocess.TimeoutExpired:
    process.kill()
    process.communicate()
    raise
  assert process.returncode == 0, out[-4000:]
  return out


@pytest.fixture(scope="module")
def outputs(tmp_path_factory) -> dict[str, str | pathlib.Path]:
  root = tmp_path_factory.mktemp("meshes")
  with socket.socket() as probe:
    probe.bind(("127.0.0.1", 0))
    port = probe.getsockname()[1]
  pair = [start("two", root, port, i) for i in (0, 1)]
  half = root / "two" / "checkpoints" / "10"
  runs.wait_for(half.exists, "the checkpoint of step 10")
  pair[1].kill()
  begin = time.monotonic()
  found = {f"killed-{i}": p.communicate()[0] for i, p in enumerate(pair)}
  found |= {"codes": [p.returncode for p in pair]}
  found |= {"seconds": time.monotonic() - begin}
  pair = [start("two", root, port, i) for i in (0, 1)]
  found |= {f"two-{i}": finish(p) for i, p in enumerate(pair)}
  return {"root": root, "eight": finish(start("eight", root)), **found}


@pytest.fixture(scope="module")
def others(tmp_path_factory) -> pathlib.Path:
  root = tmp_path_factory.mktemp("others")
  finish(start("others", root))
  return root


@pytest.fixture
def pair(request, name) -> tuple[pathlib.Path, pathlib.Path]:
  """A run on a mesh, and the run on one device that it must be."""
  if name in OTHERS:
    root = request.getfixturevalue("others")
    return root / name, root / name.replace("mixed", "one")
  root = request.getfixturevalue("outputs")["root"]
  return root / name, root / "one"


def test_a_process_that_is_killed_ends_the_other_and_the_pair_goes_on(outputs):
  """Sums with it would never come. `two` is what the pair made of the rest."""
  assert outputs["codes"] == [2, -KILLED]
  (line,) = [x for x in outputs["killed-0"].splitlines() if "error" in x]
  assert re.search(r"train.py: error: another process .* start all", line)
  assert outputs["seconds"] < 60  # jax alone would wait for over a minute
  assert "resuming at step 10 of 20" in outputs["two-0"]


@pytest.mark.parametrize("name", ALL)
def test_parameters_are_those_of_one_device_to_rounding(pair, name):
  """Optimizer state, statistics and c too, before and after a restore."""
  steps = (10, meshes.STEPS)
  for step in steps:
    (_, got, _), (_, want, _) = (
      runs.state(folder / "checkpoints", step) for folder in pair
    )
    assert got.keys() == want.keys()
    assert len(got) > 30
    for leaf, array in want.items():
      if leaf.endswith(meshes.KEY_BIAS):
        np.testing.assert_allclose(got[leaf], array, 0, 1e-4, err_msg=leaf)
      else:
        np.testing.assert_allclose(got[leaf], array, 2e-6, 2e-6, err_msg=leaf)


@pytest.mark.parametrize("name", ALL)
def test_losses_and_measures_are_those_of_one_device(pair, name):
  """Training, validation with a padded batch, the anchor, and the story."""
  got, want = (
    metrics.read_metrics(folder / "metrics.jsonl") for folder in pair
  )
  assert len(got) == len(want) > 8
  count = 0
  for ours, theirs in zip(got, want, strict=True):
    assert ours.keys() == theirs.keys()
    for key, value in theirs.items():
      if key == "tokens_per_s":
        continue
      if isinstance(np.ravel(value)[0], float):  # of several seeds a list
        assert ours[key] == pytest.approx(value, rel=1e-5, abs=1e-6), key
        count += 1
      else:
        assert ours[key] == value, key
  assert count > 80


@pytest.mark.parametrize("name", ALL)
def test_the_folded_model_is_that_of_one_device(pair, name):
  """Fold, decode and the summary."""
  got, want = (
    json.loads((folder / "summary.json").read_text()) for folder in pair
  )
  for field in ("valid_loss", "valid_loss_folded", "mean_scale", "logit_norm"):
    assert got[field] == pytest.approx(want[field], rel=2e-6), field
  for field in ("params", "params_folded", "valid_tokens", "sample", "gate"):
    assert got[field] == want[field], field
  assert np.all(np.array(got["fold"]["top1_f32"]) == 1.0)


def test_process_0_alone_speaks_and_writes(outputs):
  """Two writers would tear each other's files."""
  assert "validation loss" in outputs["two-0"]
  said = [
    line
    for line in outputs["two-1"].splitlines()
    if line.strip() and "Gloo" not in line
  ]
  assert said == []


def test_the_meshes_were_not_one_device(outputs):
  """Sums in the same order would agree in every bit."""
  for name in ("mixed", "two"):
    (_, got, _), (_, want, _) = (
      runs.state(outputs["root"] / run / "checkpoints", meshes.STEPS)
      for run in (name, "one")
    )
    assert any(np.any(got[leaf] != array) for leaf, array in want.items())
    config = json.loads((outputs["root"] / name / "config.json").read_text())
    assert max(config["mesh"].values()) == 2
