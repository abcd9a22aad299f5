"""`python -m tests.faults`, short and long: nothing may be lost."""

from __future__ import annotations

import collections
import json
import os
import random
import subprocess
import sys

import pytest

from tests import faults, runs


@pytest.mark.parametrize(
  "arguments",
  [
    ["--kills=5"],
    pytest.param(["--kills=56", "--each"], marks=pytest.mark.long),
  ],
  ids=["short", "long"],
)
def test_disturbed_runs_end_the_same_or_say_why(tmp_path, arguments):
  """Kills, a signal, damaged files, the clock, a second run, and NaN; in a
  process of its own, for it forks before jax starts.
  """
  out = tmp_path / "found.json"
  done = subprocess.run(
    [sys.executable, "-m", "tests.faults", *arguments, f"--json={out}"],
    cwd=runs.REPOSITORY,
    capture_output=True,
    text=True,
    timeout=20 * runs.LIMIT,
    env=os.environ | {"TMPDIR": str(tmp_path)},
  )
  assert done.returncode == 0, done.stderr
  found = [tuple(row) for row in json.loads(out.read_text())]
  assert not [row for row in found if row[1] == faults.LOST]
  fell = collections.Counter(
    fault.removeprefix("SIGKILL, ") for fault, _ in found
    if fault.startswith("SIGKILL") and "processes" not in fault
  )
  count = int(arguments[0].removeprefix("--kills="))
  if "--each" in arguments:
    assert fell.total() >= count
    assert min(fell[stage] for stage in faults.STAGES) >= 5
  else:  # where short stages are killed a moment late, others get two
    assert fell.total() == count
    assert len(fell.keys() & {*faults.STAGES}) >= 3
  names = " ".join(fault for fault, _ in found)
  for what in (
    "SIGTERM", "checkpoint file", "tokens file", "clock", "second", "NaN"
  ):
    assert what in names


def test_a_kill_that_missed_its_stage_is_tried_again(tmp_path, monkeypatch):
  """With `each`; one that came after the end, in any case."""
  def named(fell, each):
    falls = iter(fell)
    monkeypatch.setattr(faults, "kill_in", lambda *_: next(falls))
    found = [*faults.kills(tmp_path, 2, each, random.Random(0))]
    assert not [*falls]
    return [fault.removeprefix("SIGKILL, ") for fault, _ in found]

  monkeypatch.setattr(faults, "again", lambda *_: faults.SAME)
  late, missed = "ended before its SIGKILL", "between stages"
  first, second = faults.STAGES[:2]
  assert named([faults.LATE, None, second], False) == [late, missed, second]
  assert named([None, first, first, None, faults.LATE], True) == [
    missed, first, first, missed, late
  ]


def test_the_table_counts_what_was_found():
  lines = faults.table([
    ("b", faults.SAME), ("a", faults.TOLD), ("b", faults.LOST)
  ])
  assert lines[2:] == [
    "| a | 1 | 0 | 1 | 0 |", "| b | 2 | 1 | 0 | 1 |", "| all | 3 | 1 | 1 | 1 |"
  ]
