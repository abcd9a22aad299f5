"""Files that are whole or not there: atomic writes, and content hashes."""

from __future__ import annotations

import contextlib
import hashlib
import os
import pathlib
import re
import secrets
import shutil
import signal
from collections.abc import Callable, Iterable, Iterator
from typing import BinaryIO

from taperjax.errors import UserError


@contextlib.contextmanager
def atomic_write(path: str | os.PathLike) -> Iterator[BinaryIO]:
  """Opens a temporary neighbour of `path` that takes its name at the end.

  The temporary name is unique, so that two processes cannot mix their bytes;
  after an exception nothing is left.
  """
  path = pathlib.Path(path)
  path.parent.mkdir(parents=True, exist_ok=True)
  temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
  try:
    with temporary.open("xb") as file:
      yield file
      file.flush()
      os.fsync(file.fileno())
    os.replace(temporary, path)
  finally:
    temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def whole_folder(folder: pathlib.Path, what: str) -> Iterator[pathlib.Path]:
  """The name of a neighbour, for the caller to make, that becomes `folder`.

  Whatever stops it, an earlier `folder` is back, and no folder made for it
  stays; what a process left that was killed outright goes the next time.

  Raises:
    UserError: the system refuses; `what`, such as "the export", is named.
  """
  _clear_killed(folder)
  token = f"{machine()}-{os.getpid()}-{secrets.token_hex(4)}"
  part = folder.with_name(f"{folder.name}.part-{token}")
  old = folder.with_name(f"{folder.name}.part-old-{token}")
  made = [parent for parent in folder.parents if not parent.exists()]
  try:
    yield part
    if folder.exists():  # whole until its name is free
      folder.rename(old)
    part.rename(folder)
  except OSError as error:
    raise UserError(
      f"{what} cannot be written to {folder} ({error.strerror}); choose a "
      "writable folder"
    ) from error
  finally:
    if old.exists() and not folder.exists():  # stopped between the two renames
      old.rename(folder)
    for left in (part, old):
      shutil.rmtree(left, ignore_errors=True)
    if not folder.exists():
      for parent in made:
        with contextlib.suppress(OSError):
          parent.rmdir()


def _clear_killed(folder: pathlib.Path) -> None:
  """Undoes `whole_folder` for processes of this machine that are no more."""
  name = re.compile(
    re.escape(folder.name)
    + rf"\.part-(old-)?{machine()}-(\d+)-[0-9a-f]{{8}}(-\w+)?"
  )
  there = []
  with contextlib.suppress(OSError):
    there = sorted(folder.parent.iterdir())
  for path in there:
    found = name.fullmatch(path.name)
    if not found or path.is_symlink() or _is_running(int(found[2])):
      continue
    if found[1] and not folder.exists():  # killed between the two renames
      with contextlib.suppress(OSError):
        path.rename(folder)
    shutil.rmtree(path, ignore_errors=True)


def machine() -> str:
  """Six letters for this machine: process numbers of others mean nothing."""
  return hashlib.sha256(os.uname().nodename.encode()).hexdigest()[:6]


def _is_running(process: int) -> bool:
  try:
    os.kill(process, 0)
  except (ProcessLookupError, OverflowError):
    return False
  except OSError:  # somebody else's
    return True
  return True


@contextlib.contextmanager
def noted_signals() -> Iterator[Callable[[], None]]:
  """A function that raises what Ctrl-C or SIGTERM raised, if it got lost.

  Python drops an exception that a handler raises in a callback, such as the
  one of a weak reference in the middle of an import. Here the handlers work as
  before and take a note as well, so that the caller can ask at each stage.
  """
  noted = []

  def note(number, frame):
    noted.append(number)
    before[number](number, frame)

  def raise_noted():
    for number in noted:
      before[number](number, None)

  before = {
    number: signal.getsignal(number)
    for number in (signal.SIGINT, signal.SIGTERM)
    if callable(signal.getsignal(number))  # else the system ends the process
  }
  try:
    for number in before:
      signal.signal(number, note)
  except ValueError:  # not in the main thread: the caller handles signals
    yield raise_noted
    return
  try:
    yield raise_noted
  finally:
    for number, handler in before.items():
      signal.signal(number, handler)


@contextlib.contextmanager
def lock(
  folder: pathlib.Path, log: Callable[[str], object]
) -> Iterator[None]:
  """Lets one process at a time work in the folder, where the system can.

  Only to save work: without it (no flock, a read-only folder) atomic writes
  still keep every file whole. Before it waits, one line goes to `log`.
  """
  with contextlib.ExitStack() as stack:
    with contextlib.suppress(ImportError, OSError):
      import fcntl

      file = stack.enter_context((folder / ".lock").open("ab"))
      try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
      except BlockingIOError:
        log(f"Waiting for another run that prepares {folder}.")
        fcntl.flock(file, fcntl.LOCK_EX)
    yield


def sha256_of_files(paths: Iterable[pathlib.Path]) -> str:
  """Hex sha256 of the contents of the files, one after another."""
  import tqdm

  paths, digest = list(paths), hashlib.sha256()
  progress = tqdm.tqdm(
    desc=f"checking {paths[0].name}" if paths else None,
    total=sum(path.stat().st_size for path in paths),
    unit="B",
    unit_scale=True,
    delay=2,
    leave=False,
    disable=None,  # no bar where standard error is no terminal
  )
  with progress:
    for path in paths:
      with path.open("rb") as file:
        while block := file.read(1 << 20):
          digest.update(block)
          progress.update(len(block))
  return digest.hexdigest()
