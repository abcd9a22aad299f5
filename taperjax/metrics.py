"""Metrics as JSON lines and TensorBoard events, and the progress on stderr.

`metrics.jsonl` is the one source of truth: strict JSON, one record per line,
floats exact. The event files only mirror its scalars and are made anew from it
whenever a run resumes.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import pathlib
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any

from taperjax.errors import UserError

_RESERVED = ("step", "kind", "nonfinite")
_LINE_SECONDS = 5.0  # plain progress: no more often than this


@contextlib.contextmanager
def _without_torch() -> Iterator[None]:
  """tensorboardX loads PyTorch where it is installed: seconds, for nothing."""
  hidden = "torch" not in sys.modules
  if hidden:
    sys.modules["torch"] = None
  try:
    yield
  finally:
    if hidden:
      del sys.modules["torch"]


class MetricsWriter:
  """Writes WORKDIR/metrics.jsonl and event files in WORKDIR/tensorboard.

  Args:
    workdir: made if it is not there.
    resume_step: None starts both afresh. A step keeps the records up to it
      and drops the later ones, which the resumed run will write again; its
      events get the time of the resumption.

  Raises:
    UserError: the files cannot be written, or a record cannot be read.
  """

  def __init__(
    self, workdir: str | os.PathLike[str], *, resume_step: int | None
  ):
    self.path = pathlib.Path(workdir) / "metrics.jsonl"
    try:
      events_folder = self.path.parent / "tensorboard"
      events_folder.mkdir(parents=True, exist_ok=True)
      kept = []
      if resume_step is not None and self.path.exists():
        kept = [r for r in read_metrics(self.path) if r["step"] <= resume_step]
      part = self.path.with_suffix(".jsonl.part")
      part.write_text("".join(map(_line, kept)), encoding="utf-8")
      part.replace(self.path)
      self._file = self.path.open("a", encoding="utf-8")
      for old in events_folder.glob("events.out.tfevents.*"):
        old.unlink()
      # Not SummaryWriter: its queue and thread are of no use here.
      with _without_torch():
        from tensorboardX.event_file_writer import EventsWriter

      self._events = EventsWriter(str(events_folder / "events"))
      for record in kept:
        self._write_events(record)
      self._events.flush()
    except OSError as error:
      raise self._unwritable(error) from error

  def write(
    self, step: int, scalars: Mapping[str, Any], kind: str = "train"
  ) -> None:
    """Appends one record and flushes it.

    Args:
      step: the step that the values belong to.
      scalars: numbers, lists of numbers, strings or None. A non-finite number
        becomes null, and the record gets `"nonfinite": {name: "nan"}`.
      kind: train, eval, calibration, ...; TensorBoard shows KIND/NAME.
    """
    for name in _RESERVED:
      if name in scalars:
        raise ValueError(f"{name!r} is no name for a metric: it is reserved")
    record: dict[str, Any] = {"step": int(step), "kind": kind}
    plain = {name: _plain(value) for name, value in scalars.items()}
    record |= {name: _strict(value) for name, value in plain.items()}
    if bad := {n: str(v) for n, v in plain.items() if not _is_finite(v)}:
      record["nonfinite"] = bad
    try:
      self._file.write(_line(record))
      self._file.flush()
      self._write_events(record)
      self._events.flush()
    except OSError as error:
      raise self._unwritable(error) from error

  def close(self) -> None:
    """Closes both files."""
    try:
      self._file.close()
      self._events.close()
    except OSError as error:
      raise self._unwritable(error) from error

  def _write_events(self, record: dict[str, Any]) -> None:
    from tensorboardX.proto.event_pb2 import Event
    from tensorboardX.summary import scalar

    for name, value in record.items():
      tags = {name: value}
      if isinstance(value, list):
        tags = {f"{name}/{i}": item for i, item in enumerate(value)}
      for tag, item in tags.items():
        if name not in _RESERVED and _is_number(item):
          summary = scalar(f"{record['kind']}/{tag}", item)
          self._events.write_event(
            Event(wall_time=time.time(), step=record["step"], summary=summary)
          )

  def _unwritable(self, error: OSError) -> UserError:
    return UserError(
      f"metrics in {self.path.parent} cannot be written ({error.strerror}); "
      f"make room, or choose a writable folder"
    )


def read_metrics(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
  """Records of a metrics.jsonl; a half-written last line is left out.

  Raises:
    UserError: there is no such file, or a line before the last is no record.
  """
  try:
    lines = pathlib.Path(path).read_bytes().splitlines()
  except OSError as error:
    raise UserError(
      f"metrics {path} cannot be read ({error.strerror}); give the "
      f"metrics.jsonl of a run"
    ) from error
  records = []
  for number, line in enumerate(lines, 1):
    try:
      record = json.loads(line)
      if not isinstance(record["step"], int):
        raise TypeError(record["step"])
      str(record["kind"])
    except (ValueError, TypeError, KeyError) as error:
      if number == len(lines):
        break
      raise UserError(
        f"metrics {path} line {number} is not a JSON record with step "
        f"and kind; remove that line"
      ) from error
    records.append(record)
  return records


def finite(scalars: Mapping[str, Any]) -> str | None:
  """Name of the first value that is or holds NaN or infinity, or None."""
  for name, value in scalars.items():
    if not _is_finite(_plain(value)):
      return name
  return None


class Progress:
  """A bar on a terminal, plain lines elsewhere; all of it on stderr.

  Plain lines come first, at every tenth of the way, every 5 seconds (less often
  in long runs) and last, and hold no control characters.

  Args:
    total_steps: steps of the whole run.
    start_step: steps done before, for a resumed run.
    console: a rich console; stderr unless given.
  """

  def __init__(
    self, total_steps: int, start_step: int, *, console: Any = None
  ):
    if console is None:
      from rich.console import Console

      console = Console(stderr=True)
    self._console = console
    self._total = total_steps
    self._start = self._step = start_step
    self._bar = None
    self._began = self._printed_at = time.monotonic()
    self._printed_step: int | None = None
    self._text = ""

  def __enter__(self) -> Progress:
    self._began = time.monotonic()
    terminal = self._console.is_terminal and not self._console.is_dumb_terminal
    if terminal:
      from rich import progress

      self._bar = progress.Progress(
        progress.MofNCompleteColumn(),
        progress.BarColumn(None),
        progress.TextColumn("{task.description}"),
        progress.TimeElapsedColumn(),
        progress.TextColumn("left"),
        progress.TimeRemainingColumn(),
        console=self._console,
        refresh_per_second=4,
        redirect_stdout=False,  # stdout may be a JSON object for a script
      )
      self._task = self._bar.add_task(
        "", total=self._total, completed=self._start
      )
      self._bar.start()
    return self

  def __exit__(self, *exc_info: object) -> None:
    if self._bar is not None:
      self._bar.stop()
      self._bar = None
    elif self._printed_step not in (None, self._step):
      self._print_plain()

  def update(
    self,
    step: int,
    *,
    loss: float | None = None,
    gate: float | None = None,
    tokens_per_s: float | None = None,
  ) -> None:
    """Shows that `step` is done; None leaves a value out."""
    parts = [
      None if loss is None else f"loss {loss:.4f}",
      None if gate is None else f"gate {gate:.3f}",
      None if tokens_per_s is None else f"tok/s {tokens_per_s:,.0f}",
    ]
    self._text = "  ".join(filter(None, parts))
    last, self._step = self._step, step
    if self._bar is not None:
      self._bar.update(self._task, completed=step, description=self._text)
    else:
      now = time.monotonic()
      pause = max(_LINE_SECONDS, 0.02 * (now - self._began))
      tenths = [10 * s // max(self._total, 1) for s in (last, step)]
      if (
        self._printed_step is None
        or tenths[0] < tenths[1]
        or now - self._printed_at >= pause
      ):
        self._print_plain()

  def line(self, text: str) -> None:
    """Prints a full line, above the bar if there is one."""
    text = "".join(c if c.isprintable() or c in "\n\t" else "�" for c in text)
    if self._bar is not None:
      self._console.print(text, markup=False, highlight=False, soft_wrap=True)
    else:
      print(text, file=self._console.file, flush=True)

  def _print_plain(self) -> None:
    self._printed_at, self._printed_step = time.monotonic(), self._step
    elapsed = self._printed_at - self._began
    done = self._step - self._start
    left = elapsed / done * (self._total - self._step) if done > 0 else 0.0
    self.line(
      f"step {self._step}/{self._total}  {self._text}  "
      f"elapsed {_clock(elapsed)}  left {_clock(left)}"
    )


def _line(record: dict[str, Any]) -> str:
  return json.dumps(record, allow_nan=False, ensure_ascii=False) + "\n"


def _plain(value: Any) -> Any:
  """Python numbers for numpy and jax ones; float32 to float is exact."""
  if isinstance(value, (list, tuple)):
    return [_plain(item) for item in value]
  return value.tolist() if hasattr(value, "tolist") else value


def _strict(value: Any) -> Any:
  """None for what JSON cannot hold."""
  if isinstance(value, list):
    return [_strict(item) for item in value]
  return value if _is_finite(value) else None


def _is_finite(value: Any) -> bool:
  if isinstance(value, list):
    return all(map(_is_finite, value))
  return not isinstance(value, float) or math.isfinite(value)


def _is_number(value: Any) -> bool:
  return isinstance(value, (int, float)) and not isinstance(value, bool)


def _clock(seconds: float) -> str:
  minutes, seconds = divmod(round(seconds), 60)
  hours, minutes = divmod(minutes, 60)
  return f"{hours}:{minutes:02}:{seconds:02}"
