"""Metrics: exact, strict JSON that survives kill and resume; progress."""

import io
import json
import math
import pathlib
import struct
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

from taperjax import metrics
from taperjax.errors import UserError
from taperjax.metrics import MetricsWriter, Progress, finite, read_metrics


def write_run(workdir, steps, resume_step=None) -> None:
  writer = MetricsWriter(workdir, resume_step=resume_step)
  for step in steps:
    writer.write(step, {"loss": 1 / step, "lr": 1e-3 * step})
    if step % 2 == 0:
      writer.write(step, {"loss": 2 / step}, kind="eval")
  writer.close()


def read_events(workdir) -> list[tuple[str, int, float]]:
  """Tag, step and value of each event, by the TFRecord format itself."""
  from tensorboardX.proto.event_pb2 import Event

  (path,) = (pathlib.Path(workdir) / "tensorboard").iterdir()
  data, found = path.read_bytes(), []
  while data:
    (size,) = struct.unpack("<Q", data[:8])
    event = Event.FromString(data[12 : 12 + size])
    found += [
      (value.tag, event.step, value.simple_value)
      for value in event.summary.value
    ]
    data = data[12 + size + 4 :]
  return found


def strict(constant):
  raise AssertionError(f"{constant} is not JSON")


def test_floats_come_back_exactly(tmp_path):
  """Loss curves are compared bit by bit after a resume."""
  values = {
    "tenths": 0.1 + 0.2,
    "tiny": 5e-324,
    "third": np.float32(1 / 3),
    "jax": jnp.float32(2 / 3),
    "list": [1 / 3, np.float32(0.1)],
    "array": np.array([0.1, 0.7], np.float32),
    "count": 12345678901234567890,
    "text": "Zoë said\nhi",
    "absent": None,
  }
  writer = MetricsWriter(tmp_path, resume_step=None)
  writer.write(4, values, kind="eval")
  (record,) = read_metrics(tmp_path / "metrics.jsonl")  # flushed, not closed
  writer.close()
  assert record == {
    "step": 4,
    "kind": "eval",
    "tenths": 0.1 + 0.2,
    "tiny": 5e-324,
    "third": float(np.float32(1 / 3)),
    "jax": float(np.float32(2 / 3)),
    "list": [1 / 3, float(np.float32(0.1))],
    "array": [float(np.float32(x)) for x in (0.1, 0.7)],
    "count": 12345678901234567890,
    "text": "Zoë said\nhi",
    "absent": None,
  }


def test_every_line_is_strict_json(tmp_path):
  """NaN is no JSON: other readers would stop at the step that matters."""
  writer = MetricsWriter(tmp_path, resume_step=None)
  values = {"loss": math.nan, "c": [1.0, -math.inf], "b": np.float32("inf")}
  writer.write(1, values | {"ok": 2.5})
  writer.close()
  (line,) = (tmp_path / "metrics.jsonl").read_text().splitlines()
  assert json.loads(line, parse_constant=strict) == {
    "step": 1,
    "kind": "train",
    "loss": None,
    "c": [1.0, None],
    "b": None,
    "ok": 2.5,
    "nonfinite": {"loss": "nan", "c": "[1.0, -inf]", "b": "inf"},
  }
  events = read_events(tmp_path)
  assert events == [("train/c/0", 1, 1.0), ("train/ok", 1, 2.5)]


@pytest.mark.parametrize(
  "tail", ["", '{"step": 8, "ki', '{"step": 3, "kind": "train", "lo', "\0\0"]
)
def test_resume_equals_never_stopping(tmp_path, tail):
  """Killed after step 7, resumed from the checkpoint at step 4."""
  write_run(tmp_path / "whole", range(1, 10))
  write_run(tmp_path / "cut", range(1, 8))
  with (tmp_path / "cut" / "metrics.jsonl").open("a") as file:
    file.write(tail)
  write_run(tmp_path / "cut", range(5, 10), resume_step=4)
  whole = (tmp_path / "whole" / "metrics.jsonl").read_bytes()
  assert (tmp_path / "cut" / "metrics.jsonl").read_bytes() == whole
  events = read_events(tmp_path / "cut")
  assert events == read_events(tmp_path / "whole")
  assert len(events) == 9 * 2 + 4
  assert events[2] == ("train/loss", 2, 0.5)
  assert sorted(p.name for p in (tmp_path / "cut").iterdir()) == [
    "metrics.jsonl",
    "tensorboard",
  ]


def test_resumed_events_are_there_before_the_first_write(tmp_path):
  write_run(tmp_path, range(1, 6))
  old = tmp_path / "tensorboard" / "events.out.tfevents.1234567890.host"
  old.write_bytes(b"of the run that was killed")
  writer = MetricsWriter(tmp_path, resume_step=3)
  assert len(read_events(tmp_path)) == 3 * 2 + 1
  writer.close()
  records = read_metrics(tmp_path / "metrics.jsonl")
  assert [(r["step"], r["kind"]) for r in records] == [
    (1, "train"),
    (2, "train"),
    (2, "eval"),
    (3, "train"),
  ]


def test_without_resume_both_start_afresh(tmp_path):
  write_run(tmp_path, range(1, 6))
  note = tmp_path / "tensorboard" / "note.txt"
  note.write_text("mine")
  MetricsWriter(tmp_path, resume_step=None).close()
  assert note.read_text() == "mine"
  note.unlink()
  assert read_metrics(tmp_path / "metrics.jsonl") == []
  assert read_events(tmp_path) == []


def test_resume_without_metrics_starts_them(tmp_path):
  write_run(tmp_path, [6], resume_step=5)
  assert len(read_metrics(tmp_path / "metrics.jsonl")) == 2


def test_broken_line_in_the_middle_is_named(tmp_path):
  """Only the last line can be half-written; another one is damage."""
  path = tmp_path / "metrics.jsonl"
  path.write_text('{"step": 1, "kind": "eval"}\n{"st\n{"step": 3}\n')
  with pytest.raises(UserError, match="metrics.jsonl line 2 is not a JSON"):
    read_metrics(path)
  with pytest.raises(UserError, match="line 2"):
    MetricsWriter(tmp_path, resume_step=3)
  with pytest.raises(UserError, match="absent.jsonl cannot be read"):
    read_metrics(tmp_path / "absent.jsonl")


def test_unwritable_workdir_is_named(tmp_path):
  (tmp_path / "file").write_text("")
  with pytest.raises(UserError, match="file/run cannot be written .*folder"):
    MetricsWriter(tmp_path / "file" / "run", resume_step=None)


def test_full_disk_is_one_line(tmp_path):
  resource = pytest.importorskip("resource")
  writer = MetricsWriter(tmp_path, resume_step=None)
  soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
  resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
  try:
    with pytest.raises(UserError, match="cannot be written .*; make room"):
      writer.write(1, {"text": "x" * 2000})
  finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
  writer.close()


@pytest.mark.parametrize("name", ["step", "kind", "nonfinite"])
def test_reserved_names_are_refused(tmp_path, name):
  writer = MetricsWriter(tmp_path, resume_step=None)
  with pytest.raises(ValueError, match=f"'{name}' is no name for a metric"):
    writer.write(1, {name: 1.0})
  writer.close()


@pytest.mark.parametrize(
  "scalars, name",
  [
    ({}, None),
    ({"a": 1.0, "b": "nan", "c": None, "d": [1, 2.0], "e": True}, None),
    ({"a": 1.0, "b": math.nan, "c": math.inf}, "b"),
    ({"a": [0.0, -math.inf]}, "a"),
    ({"a": np.float32(1), "b": np.array([1, np.nan], np.float32)}, "b"),
    ({"a": jnp.float32("inf")}, "a"),
    ({"a": jnp.array(jnp.nan, jnp.bfloat16)}, "a"),
  ],
)
def test_finite_names_the_first_bad_scalar(scalars, name):
  assert finite(scalars) == name


def test_plain_lines_are_few_and_plain(capsys, monkeypatch):
  """A log file must not fill with 4 redraws a second or escape codes."""
  clock = [100.0]
  monkeypatch.setattr(metrics.time, "monotonic", lambda: clock[0])
  with Progress(1000, 0) as progress:
    for step in range(1, 1001):
      clock[0] += 0.02
      values = {"loss": 9.8765, "gate": 0.25, "tokens_per_s": 1234.5}
      progress.update(step, **values)
      if step == 500:
        progress.line("story: [bold]\x1b[31mred\a")
  out, err = capsys.readouterr()
  assert out == ""
  assert all(c.isprintable() or c == "\n" for c in err)
  lines = err.splitlines()
  first = "step 1/1000  loss 9.8765  gate 0.250  tok/s 1,234  "
  assert lines[0] == first + "elapsed 0:00:00  left 0:00:20"
  assert [line.split("/")[0] for line in lines if "step" in line] == [
    f"step {step}" for step in (1, *range(100, 1001, 100))
  ]
  assert "story: [bold]\ufffd[31mred\ufffd" in lines


def test_plain_lines_by_the_clock_from_a_resumed_step(capsys, monkeypatch):
  """Slow steps: a line each 5 s; time left counts only this process."""
  clock = [100.0]
  monkeypatch.setattr(metrics.time, "monotonic", lambda: clock[0])
  with Progress(10_000, 5000) as progress:
    for step in range(5001, 5008):
      clock[0] += 3
      progress.update(step, loss=1.0)
  lines = capsys.readouterr().err.splitlines()
  assert [line.split("/")[0] for line in lines] == [
    "step 5001",
    "step 5003",
    "step 5005",
    "step 5007",
  ]
  assert lines[-1].endswith("loss 1.0000  elapsed 0:00:21  left 4:09:39")


def test_the_last_line_is_printed_when_a_run_stops(capsys):
  with pytest.raises(KeyboardInterrupt), Progress(1000, 0) as progress:
    for step in range(1, 8):
      progress.update(step, loss=float(step))
    raise KeyboardInterrupt
  lines = capsys.readouterr().err.splitlines()
  assert [line.split("  ")[1] for line in lines] == [
    "loss 1.0000",
    "loss 7.0000",
  ]


@pytest.mark.parametrize("terminal", ["xterm", "dumb"])
def test_bar_on_a_terminal_and_lines_on_a_dumb_one(monkeypatch, terminal):
  monkeypatch.setenv("TERM", terminal)
  monkeypatch.delenv("NO_COLOR", raising=False)
  file = io.StringIO()
  console = Console(file=file, force_terminal=True, width=100)
  with Progress(20, 4, console=console) as progress:
    for step in range(5, 21):
      progress.update(step, loss=3.21, gate=0.125, tokens_per_s=9876)
    progress.line("a [story]")
  text = file.getvalue()
  assert "loss 3.2100" in text and "gate 0.125" in text and "9,876" in text
  assert "20/20" in text and "a [story]\n" in text
  assert "left" in text
  assert ("\x1b" in text) == (terminal == "xterm")
  assert (" 4/20" in text) == (terminal == "xterm")  # resumed, not at 0
  assert ("step 5/20" in text) == (terminal == "dumb")


def test_import_is_light():
  """Every command imports this module; rich and tensorboardX can wait."""
  code = (
    "import sys, taperjax.metrics as m;"
    "print([n for n in ('jax', 'rich', 'tensorboardX') if n in sys.modules])"
  )
  command = [sys.executable, "-c", code]
  done = subprocess.run(command, capture_output=True, text=True, check=True)
  assert done.stdout == "[]\n"
