"""The folder of a run: whose it is, who may use it, what may be removed."""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import os
import pathlib
import shutil
import signal
from collections.abc import Iterator

import jax
from jax.experimental.compilation_cache import compilation_cache as jax_cache

from taperjax.errors import UserError
from taperjax.summary import say

# Made first in every workdir: it marks the folder as ours, and its lock says
# that a run is in it.
MARK = ".taperjax"
# What --overwrite removes; tokens in data/ and programs in cache/ stay, both
# are checked before they are used again.
RESULTS = (
  "config.json",
  "import.json",
  "tokenizer",
  "checkpoints",
  "folded",
  "metrics.jsonl",
  "tensorboard",
  "summary.json",
)


def open_workdir(
  workdir: str | os.PathLike[str] | None, label: str
) -> pathlib.Path:
  """Makes the folder of a run, or finds it; no other folder is touched.

  Args:
    workdir: None makes a dated folder under runs/, with the label in its name.
    label: what the run is.

  Raises:
    UserError: it cannot be written, or holds something that is no run of ours.
  """
  if workdir is None:
    now = datetime.datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
    workdir = f"runs/{now}_{label}"
  if not os.fspath(workdir):
    raise UserError(
      "workdir='' is empty; name a folder, . for the current one, or leave it "
      "out"
    )
  path = pathlib.Path(workdir)
  try:
    path.mkdir(parents=True, exist_ok=True)
    there = sorted(p.name for p in path.iterdir())
    if there and MARK not in there:
      raise UserError(
        f"workdir={path} holds {there[0]!r} and no run of taperjax; choose an "
        "empty or a new folder"
      )
    (path / MARK).touch()
  except OSError as error:
    raise UserError(
      f"workdir={path} cannot be written ({error.strerror}); choose a "
      "writable folder"
    ) from error
  return path


@contextlib.contextmanager
def lock(workdir: pathlib.Path) -> Iterator[None]:
  """One run at a time in a workdir; the system frees it when a run dies."""
  with contextlib.ExitStack() as stack:
    try:
      file = stack.enter_context((workdir / MARK).open("a"))
      fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
      raise UserError(
        f"workdir={workdir} is in use by another run; wait for it or choose "
        "another folder"
      ) from error
    except OSError as error:
      raise UserError(
        f"workdir={workdir} cannot be locked ({error.strerror}); choose a "
        "folder on a local disk"
      ) from error
    yield


def clean(workdir: pathlib.Path, results: bool) -> None:
  """Removes what a killed run left half-written, and the results if told."""
  targets = list(workdir.glob("*.part-*"))
  if results:
    targets += [workdir / name for name in RESULTS]
  try:
    for target in targets:
      if target.is_dir() and not target.is_symlink():
        shutil.rmtree(target)
      else:
        target.unlink(missing_ok=True)
  except OSError as error:
    raise UserError(
      f"workdir={workdir}: {target.name} cannot be removed ({error.strerror}); "
      "choose a writable folder"
    ) from error


def check_unused(workdir: pathlib.Path) -> None:
  """Raises where the results of a run or of an import lie already."""
  # The checkpoints come last: an import without them was killed.
  leftover = {"import.json", "tokenizer"}
  for name in RESULTS:
    if name not in leftover and (workdir / name).exists():
      raise UserError(
        f"workdir={workdir} holds {name!r} already; choose an empty or a new "
        "folder"
      )


def check_there(workdir: pathlib.Path) -> None:
  """Raises when somebody removed the folder under the run."""
  if not (workdir / MARK).exists():
    raise UserError(
      f"workdir={workdir} was removed while the run was in it; start again"
    )


@contextlib.contextmanager
def compilation_cache(folder: pathlib.Path) -> Iterator[None]:
  """Compiled programs lie in the folder during this run, and only then."""
  options = {
    "jax_compilation_cache_dir": str(folder),
    "jax_persistent_cache_min_compile_time_secs": 0,
  }
  before = {name: getattr(jax.config, name) for name in options}

  def use(options):
    for name, value in options.items():
      jax.config.update(name, value)
    jax_cache.reset_cache()  # jax asks for the folder only once

  use(options)
  try:
    yield
  finally:
    use(before)


_ASKED: list[list[str]] = []  # what each open `signals` yields


@contextlib.contextmanager
def signals() -> Iterator[list[str]]:
  """SIGTERM and Ctrl-C ask the loop to save and stop; a second one insists.

  A grid and its run may both wait: what one has heard, the other knows.
  """
  names: list[str] = list(_ASKED[-1]) if _ASKED else []

  def note(number, frame):
    del frame
    if names:
      raise KeyboardInterrupt
    for asked in _ASKED:
      asked.append(signal.Signals(number).name)
    say("stopping after this step; once more to stop at once")

  try:
    before = {
      s: signal.signal(s, note) for s in (signal.SIGTERM, signal.SIGINT)
    }
  except ValueError:  # not in the main thread: the caller handles signals
    before = {}
  _ASKED.append(names)
  try:
    yield names
  finally:
    _ASKED.pop()
    for number, handler in before.items():
      signal.signal(number, handler)
