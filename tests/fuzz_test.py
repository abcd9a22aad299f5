"""The short form of `python -m tests.fuzz`: nothing but loaded or one line."""

from __future__ import annotations

import json
import os
import pathlib
import pickle
import subprocess
import sys

import pytest

from tests import fuzz, runs


@pytest.mark.skipif(
  not pathlib.Path("/proc/self/clear_refs").exists(),
  reason="the memory of a trial is read from /proc",
)
def test_hostile_files_load_or_are_told_in_one_line(tmp_path):
  """In a process of its own, which forks before jax starts."""
  out = tmp_path / "found.json"
  done = subprocess.run(
    [sys.executable, "-m", "tests.fuzz", "--count=400", f"--json={out}"],
    cwd=runs.REPOSITORY,
    capture_output=True,
    text=True,
    timeout=runs.LIMIT,
    env=os.environ | {"TMPDIR": str(tmp_path), "JAX_PLATFORMS": "cpu"},
  )
  assert done.returncode == 0, done.stderr
  found = json.loads(out.read_text())
  assert len(found) >= 400 and {row[0] for row in found} == {*fuzz.FORMATS}
  outcomes = [row[3] for row in found]
  assert {*outcomes} == {fuzz.LOADED, fuzz.REFUSED}
  assert min(map(outcomes.count, {*outcomes})) > 50
  assert sum(row[2] for row in found) >= 0.3 * len(found)  # header passed


def test_the_watch_sees_writes_and_code(tmp_path):
  """Else nothing found would mean nothing."""
  watch = fuzz.Watch()
  inside = tmp_path / "in"
  for harm, fault in (
    (lambda: (tmp_path / "out").write_text("x"), "open writes"),
    ((tmp_path / "folder").mkdir, "os.mkdir writes"),
    (lambda: eval("1"), "exec of <string>"),
    (lambda: pickle.loads(b"cos\nsystem\n."), "pickle.find_class"),
  ):
    with watch.over(tmp_path, inside):
      harm()
    assert watch.faults[0].startswith(fault), watch.faults
  with watch.over(tmp_path, inside):
    inside.mkdir()
    (inside / "a").write_text("x")
  assert watch.faults == []


def test_the_table_counts_what_was_found():
  lines = fuzz.table([
    ("b", 0, True, fuzz.LOADED, 1), ("a", 0, False, fuzz.REFUSED, 1),
    ("b", 1, True, "ValueError", 1),
  ])
  assert lines[2:] == [
    "| b | 2 | 2 | 1 | 0 | 1 |", "| a | 1 | 0 | 0 | 1 | 0 |",
    "| all | 3 | 2 | 1 | 1 | 1 |",
  ]
