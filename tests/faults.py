"""Faults that a run must survive, and a table of what became of it.

    python -m tests.faults [--kills 56] [--each] [--json FILE]

A run of ten steps is disturbed, and the same command is given again. It must
end with the bits of the run that nobody disturbed ("same"), or with one line
that names what is lost and how to go on ("told"); anything else is "lost", and
the exit code is 1. Kills fall into each stage in turn, at a random moment.
`--each` damages every file in every way, fills disks and kills one of two
processes; else a few damages do. The full disk and the read-only folder need
the right to mount a tmpfs.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import os
import pathlib
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator

from taperjax import checkpoint, data as data_lib, gate, loop, saved
from taperjax.data import windows
from taperjax.errors import UserError
from tests import runs

STAGES = (
  "tokenizing", "norm", "calibration", "taper", "scale", "evaluation",
  "checkpoint", "fold",
)
# Seconds within which a stage is killed; longer than most of them take.
_WINDOW = {"checkpoint": 0.1, "fold": 1.5, "evaluation": 0.01}
SAME, TOLD, LOST = "same", "told", "lost"
LATE = "late"  # a run that had ended before its kill
_CODES = {0: SAME, 2: TOLD}
_TAPER = gate.TaperSteps(runs.START, runs.END, "cosine")


class Marks:
  """Tells the parent, through a pipe, which stage begins and which ends."""

  def __init__(self, pipe: int):
    self.pipe = pipe

  def tell(self, text: str) -> None:
    os.write(self.pipe, f"{text}\n".encode())

  def around(self, owner, name: str, stage: str) -> None:
    """Marks every call of owner.name."""
    call = getattr(owner, name)

    def marked(*args, **options):
      self.tell(stage)
      result = call(*args, **options)
      self.tell("-")
      return result

    setattr(owner, name, marked)

  def install(self) -> None:
    self.around(data_lib, "load_data", "tokenizing")
    self.around(loop.Run, "_calibrate", "calibration")
    self.around(loop.Run, "_evaluate", "evaluation")
    self.around(checkpoint.Checkpoints, "save", "checkpoint")
    self.around(saved, "write_folded", "fold")
    train_batch = windows.train_batch

    def batch(*args, step, **options):
      self.tell(gate.phase(step, _TAPER))
      return train_batch(*args, step=step, **options)

    windows.train_batch = batch


def child(
  root: pathlib.Path,
  workdir: pathlib.Path,
  *,
  pipe: int | None = None,
  before: Callable[[], object] = lambda: None,
  stop_after: int | None = None,
  reference: str | None = "whole",
  **changes,
) -> int:
  """Forks a process that runs, and compares with an undisturbed run.

  Exit codes: 0 the same bits, 2 one line of ours, 1 anything else; what it says
  is appended to a log in `root`, which is never on a small disk.
  """
  sys.stdout.flush()
  number = os.fork()
  if number:
    return number
  code = 1
  name = "_".join(workdir.relative_to(root).parts)
  with (root / f"{name}.log").open("ab", buffering=0) as log:
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    try:
      if pipe is not None:
        Marks(pipe).install()
      before()
      done = runs.train(root, workdir.absolute(), stop_after, **changes)
      if done is not None and reference:
        runs.assert_same_run(workdir, root / reference)
      code = 0
    except UserError as error:
      print(f"UserError: {error}")
      code = 2 if "\n" not in str(error) else 1
    except BaseException:
      import traceback

      traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def ended(number: int, limit: float = runs.LIMIT) -> int:
  """The exit code of a child; -9 where it had to be killed."""
  end = time.monotonic() + limit
  while time.monotonic() < end:
    done, status = os.waitpid(number, os.WNOHANG)
    if done:
      return os.waitstatus_to_exitcode(status)
    time.sleep(0.01)
  os.kill(number, signal.SIGKILL)
  os.waitpid(number, 0)
  return -9


def outcome(code: int) -> str:
  return _CODES.get(code, LOST)


def again(root: pathlib.Path, workdir: pathlib.Path, **options) -> str:
  """The same command once more, to its end."""
  return outcome(ended(child(root, workdir, **options)))


def kill_in(
  stage: str, root: pathlib.Path, workdir: pathlib.Path, rng: random.Random
) -> str | None:
  """SIGKILL within a stage: the stage it really fell into, None between them,
  or LATE after the end.
  """
  read, write = os.pipe()
  number = child(root, workdir, pipe=write)
  os.close(write)
  now, wanted, seen = None, rng.choice((1, 2)), 0
  with os.fdopen(read) as marks:
    for line in marks:
      now = line.strip()
      seen += now == stage
      # What comes once only is killed at its first time.
      often = stage in ("norm", "taper", "scale", "evaluation", "checkpoint")
      if now == stage and seen >= (wanted if often else 1):
        time.sleep(rng.uniform(0.0, _WINDOW.get(stage, 0.03)))
        break
    with contextlib.suppress(ProcessLookupError):
      os.kill(number, signal.SIGKILL)
    _, status = os.waitpid(number, 0)
    for line in marks:  # what it had told before it died
      now = line.strip()
  if not os.WIFSIGNALED(status):
    return LATE
  return now if now in STAGES else None


def kills(
  root: pathlib.Path, count: int, each: bool, rng: random.Random
) -> Iterator:
  """(fault, outcome) of at least `count` kills, aimed at each stage in turn.

  All count where they fell. With `each`, one that missed its stage is tried
  twice more; one that came after the end is so in any case, and is no kill.
  """
  for i in range(count):
    stage = STAGES[i % len(STAGES)]
    for attempt in range(3):
      workdir = root / f"kill{i}-{attempt}"
      fell = kill_in(stage, root, workdir, rng)
      fault = f"SIGKILL, {fell or 'between stages'}"
      if fell == LATE:
        fault = "ended before its SIGKILL"
      yield fault, again(root, workdir)
      if fell == stage or (fell != LATE and not each):
        break


def terms(root: pathlib.Path, count: int, rng: random.Random) -> Iterator:
  """SIGTERM saves and exits with 0 within a minute."""
  for i in range(count):
    workdir = root / f"term{i}"
    read, write = os.pipe()
    number = child(root, workdir, pipe=write, reference=None)
    os.close(write)
    with os.fdopen(read) as marks:
      for line in marks:
        if line.strip() == STAGES[1 + i % 4 if i % 4 else 3]:
          time.sleep(rng.uniform(0.0, 0.05))
          break
      with contextlib.suppress(ProcessLookupError):
        os.kill(number, signal.SIGTERM)
      marks.read()
    code = ended(number, 60)
    found = again(root, workdir)
    yield "SIGTERM", found if code == 0 else LOST


def _flip(path: pathlib.Path, rng: random.Random) -> None:
  data = bytearray(path.read_bytes())
  if data:
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
  path.write_bytes(bytes(data))


def _truncate(path: pathlib.Path, rng: random.Random) -> None:
  os.truncate(path, rng.randrange(max(1, path.stat().st_size)))


def _delete(path: pathlib.Path, rng: random.Random) -> None:
  del rng
  path.unlink()


DAMAGES = {"bit flipped": _flip, "truncated": _truncate, "deleted": _delete}


def damages(
  root: pathlib.Path, each: bool, rng: random.Random, part: str
) -> Iterator:
  """Files of the newest checkpoint, or of the tokens, damaged one by one.

  A told error must leave a way on: the file is put back, and the run ends the
  same.
  """
  stopped = root / "stopped"
  if not stopped.exists():
    stop = runs.START + 3
    code = ended(child(root, stopped, stop_after=stop, reference=None))
    if code:
      raise RuntimeError(f"the run that is damaged ended with {code}")
  folder = "data" if part == "tokens" else f"checkpoints/{runs.START + 3}"
  files = [p for p in sorted((stopped / folder).rglob("*")) if p.is_file()]
  trials = [(f, name) for f in files for name in DAMAGES]
  if not each:
    trials = rng.sample(trials, min(2, len(trials)))
  for i, (file, name) in enumerate(trials):
    workdir = root / f"{part}{i}"
    shutil.copytree(stopped, workdir)
    target = workdir / file.relative_to(stopped)
    DAMAGES[name](target, rng)
    found = again(root, workdir)
    if found == TOLD:
      target.parent.mkdir(parents=True, exist_ok=True)
      shutil.copy2(file, target)
      found = TOLD if again(root, workdir) == SAME else LOST
    yield f"{part} file {name}", found


@contextlib.contextmanager
def tmpfs(folder: pathlib.Path, size: int) -> Iterator[Callable[[str], None]]:
  """A small disk; gives a function that mounts it anew with other options."""
  folder.mkdir()

  def mount(options: str) -> None:
    subprocess.run(
      ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)],
      check=True,
      capture_output=True,
    )

  mount(f"size={size}")
  try:
    yield lambda options: mount(f"remount,{options}")
  finally:
    subprocess.run(["umount", str(folder)], check=False, capture_output=True)


def disks(root: pathlib.Path) -> Iterator:
  """A disk that fills up at some point, and a folder that is read-only."""
  whole = sum(p.stat().st_size for p in (root / "whole").rglob("*"))
  # From too small for the tokens to too small for the last files.
  for i, share in enumerate((0.02, 0.15, 0.3, 0.5, 0.7, 0.9)):
    with tmpfs(root / f"full{i}", max(4096, int(whole * share))) as remount:
      workdir = root / f"full{i}" / "run"
      first = again(root, workdir)
      remount("size=1g")
      second = again(root, workdir)
      told = first in (TOLD, SAME) and second == SAME
      yield f"full disk, {share:.0%} of what it needs", (
        first if told else LOST
      )
  with tmpfs(root / "readonly", 2**26) as remount:
    workdir = root / "readonly" / "run"
    ended(child(root, workdir, stop_after=runs.START + 1, reference=None))
    remount("ro")
    first = again(root, workdir)
    remount("rw")
    second = again(root, workdir)
    yield "read-only workdir", first if second == SAME else LOST


def _clock_back() -> None:
  """From step 6 on, the clock is a day behind."""
  train_batch, clock = windows.train_batch, time.time

  def batch(*args, step, **options):
    if step == runs.START + 2:
      time.time = lambda: clock() - 86_400.0
    return train_batch(*args, step=step, **options)

  windows.train_batch = batch


def others(root: pathlib.Path) -> Iterator:
  """The clock, and a second run in the same folder."""
  yield "clock set back a day", again(root, root / "clock", before=_clock_back)
  workdir = root / "twice"
  read, write = os.pipe()
  number = child(root, workdir, pipe=write)
  os.close(write)
  with os.fdopen(read) as marks:
    for line in marks:
      if line.strip() == "norm":
        os.kill(number, signal.SIGSTOP)
        break
    second = again(root, workdir, reference=None)
    os.kill(number, signal.SIGCONT)
    marks.read()
  first = outcome(ended(number))
  yield "second run in one workdir", second if first == SAME else LOST


def _nan_at_step_6() -> None:
  """Loss and gradient of one step are not finite."""
  loop.step_lib.make_train_step = runs.with_bad_steps({runs.START + 2})


def nans(root: pathlib.Path) -> Iterator:
  """NaN gradients: the run stops, or skips the step and records it."""
  workdir = root / "nan"
  first = again(root, workdir, before=_nan_at_step_6)
  second = again(root, workdir)
  yield "NaN gradient, stops", first if second == SAME else LOST
  skip = {"before": _nan_at_step_6, "nonfinite": "skip"}
  again(root, root / "skips", reference=None, **skip)
  summary = json.loads((root / "skips" / "summary.json").read_text())
  workdir = root / "skips-in-two"
  again(root, workdir, stop_after=runs.START + 3, **skip)
  second = again(root, workdir, reference="skips", **skip)
  recorded = summary["skipped_steps"] == 1
  yield "NaN gradient, skips", second if recorded else LOST


def pairs(root: pathlib.Path) -> Iterator:
  """One of two processes is stopped: the other ends within a minute."""

  def start(folder):
    folder.mkdir(exist_ok=True)
    with socket.socket() as probe:
      probe.bind(("127.0.0.1", 0))
      port = str(probe.getsockname()[1])
    return [
      subprocess.Popen(
        [sys.executable, "-m", "tests.meshes", "two", folder, port, str(i)],
        stderr=(root / f"{folder.name}-{i}.log").open("ab"),
        stdout=subprocess.DEVNULL,
      )
      for i in (0, 1)
    ]

  def end(both):
    return [process.wait(runs.LIMIT) for process in both]

  if end(start(root / "pair")) != [0, 0]:
    raise RuntimeError("two undisturbed processes did not end their run")
  for victim, number in ((0, "SIGKILL"), (1, "SIGKILL"), (1, "SIGTERM")):
    folder = root / f"pair-{number}-{victim}"
    both = start(folder)
    half = folder / "two" / "checkpoints" / "10"
    runs.wait_for(half.exists, "the checkpoint of step 10")
    both[victim].send_signal(getattr(signal, number))
    try:
      code = both[1 - victim].wait(60)
    except subprocess.TimeoutExpired:
      both[1 - victim].kill()
      code = None
    both[victim].wait()
    ends = end(start(folder)) == [0, 0]
    same = ends and _same(folder / "two", root / "pair" / "two")
    if number == "SIGTERM":  # both stop, and have saved
      found = SAME if code == both[victim].returncode == 0 else LOST
    else:
      # Where process 0 is gone, jax itself may abort the other, with a message.
      told = code == 2 or (victim == 0 and code == -signal.SIGABRT)
      found = TOLD if told else LOST
    yield f"{number}, one of two processes", found if same else LOST


def _same(workdir: pathlib.Path, reference: pathlib.Path) -> bool:
  """Compares in a process of its own, for reading starts jax."""
  number = os.fork()
  if number:
    return ended(number) == 0
  code = 1
  try:
    runs.assert_same_run(workdir, reference)
    code = 0
  except BaseException:
    import traceback

    traceback.print_exc()
  sys.stderr.flush()
  os._exit(code)


def can_mount() -> bool:
  with tempfile.TemporaryDirectory() as folder:
    done = subprocess.run(
      ["mount", "-t", "tmpfs", "-o", "size=4k", "tmpfs", folder],
      check=False,
      capture_output=True,
    ).returncode
    if not done:
      subprocess.run(["umount", folder], check=False, capture_output=True)
  return not done


def suite(
  root: pathlib.Path, *, kills_count: int, each: bool, seed: int = 0
) -> Iterator[tuple[str, str]]:
  """(fault, outcome) one after another; `root` gets all that is written."""
  rng = random.Random(seed)
  code = ended(child(root, root / "whole", reference=None))
  if code:
    log = (root / "whole.log").read_text(errors="replace")
    raise RuntimeError(f"the undisturbed run ended with {code}: {log[-2000:]}")
  yield from kills(root, kills_count, each, rng)
  yield from terms(root, 8 if each else 1, rng)
  yield from damages(root, each, rng, "checkpoint")
  yield from damages(root, each, rng, "tokens")
  if each and can_mount():
    yield from disks(root)
  yield from others(root)
  yield from nans(root)
  if each:
    yield from pairs(root)


def table(found: list[tuple[str, str]]) -> list[str]:
  """Rows of Markdown: fault, tried, same bits, told, lost."""
  rows: dict[str, collections.Counter] = {}
  for fault, result in found:
    rows.setdefault(fault, collections.Counter())[result] += 1
  total = collections.Counter(result for _, result in found)
  lines = [
    "| fault | tried | ended with the same bits | told in one line | lost |",
    "| --- | --- | --- | --- | --- |",
  ]
  for name, row in [*sorted(rows.items()), ("all", total)]:
    cells = (row.total(), row[SAME], row[TOLD], row[LOST])
    lines.append(f"| {name} | " + " | ".join(map(str, cells)) + " |")
  return lines


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
  parser.add_argument("--kills", type=int, default=56)
  parser.add_argument("--each", action="store_true", help="every file and disk")
  parser.add_argument("--json", metavar="FILE")
  parser.add_argument("--seed", type=int, default=0)
  args = parser.parse_args()
  os.environ.update(runs.environment())
  found = []
  with tempfile.TemporaryDirectory() as folder:
    root = pathlib.Path(folder)
    for fault, result in suite(
      root, kills_count=args.kills, each=args.each, seed=args.seed
    ):
      found.append((fault, result))
      print(f"{len(found):4d} {result:5s} {fault}", file=sys.stderr)
      if result == LOST:
        keep = pathlib.Path(tempfile.mkdtemp(prefix="fault-"))
        for log in root.glob("*.log"):
          shutil.copy(log, keep)
        print(f"     logs in {keep}", file=sys.stderr)
  print("\n".join(table(found)))
  if args.json:
    pathlib.Path(args.json).write_text(json.dumps(found))
  sys.exit(any(result == LOST for _, result in found))


if __name__ == "__main__":
  main()
