"""Files that are whole or not there: atomic writes, and content hashes."""

from __future__ import annotations

import contextlib
import hashlib
import os
import pathlib
import secrets
from collections.abc import Callable, Iterable, Iterator
from typing import BinaryIO


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
  digest = hashlib.sha256()
  for path in paths:
    with path.open("rb") as file:
      while block := file.read(1 << 20):
        digest.update(block)
  return digest.hexdigest()
