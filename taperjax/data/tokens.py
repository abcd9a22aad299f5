"""Token files: text tokenized once, read in place, never silently stale."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import itertools
import json
import os
import pathlib
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from taperjax.data import files, text
from taperjax.data.tokenizer import Tokenizer
from taperjax.errors import UserError

FORMAT = 1
BATCH_CHARS = 1 << 20  # text that is tokenized at a time


class Stream:
  """Ids in a file, read where a slice asks for them; slices only, of step 1.

  A memory map would keep all pages that a window has touched (1 GB after 16,000
  windows of a large file), and kill the process where the file is cut short.

  Attributes:
    path: of the file. dtype: of the ids.
  """

  def __init__(self, path: pathlib.Path, dtype: np.dtype):
    self.path, self.dtype = path, dtype
    self._file = os.open(path, os.O_RDONLY)
    weakref.finalize(self, os.close, self._file)
    self._length = os.fstat(self._file).st_size // dtype.itemsize

  def __len__(self) -> int:
    return self._length

  def __getitem__(self, part: slice) -> np.ndarray:
    if not isinstance(part, slice) or part.step not in (None, 1):
      raise TypeError(f"{part} is no slice of step 1")
    start, stop, _ = part.indices(self._length)
    size = self.dtype.itemsize
    wanted = max(0, stop - start) * size
    blocks, found = [], 0
    while found < wanted:  # a call gives at most 2 GB
      block = os.pread(self._file, wanted - found, start * size + found)
      if not block:
        raise UserError(
          f"tokens={self.path} ends early: it was shortened while a run reads "
          "it; start again, and it is made anew"
        )
      blocks.append(block)
      found += len(block)
    data = blocks[0] if len(blocks) == 1 else b"".join(blocks)
    return np.frombuffer(data, self.dtype)

  def __array__(self, dtype=None, copy=None) -> np.ndarray:
    if copy is False:
      raise ValueError("the ids lie in a file: an array of them is a copy")
    return self[:].astype(dtype or self.dtype, copy=False)


@dataclasses.dataclass(frozen=True)
class TokenFile:
  """A stream of ids on disk, with the JSON that says where it came from."""

  tokens: Stream  # [num_tokens] uint16 or uint32
  path: pathlib.Path
  meta: dict[str, Any]

  @property
  def hashes(self) -> dict[str, str]:
    """What a resumed run compares: source, tokenizer and ids."""
    keys = ("source_sha256", "tokenizer_fingerprint", "tokens_sha256")
    return {key: self.meta[key] for key in keys}


def prepare(
  source: str | os.PathLike | text.Source,
  tokenizer: Tokenizer,
  folder: str | os.PathLike,
  *,
  name: str,
  log: Callable[[str], object] = print,
  expect: dict[str, str] | None = None,
) -> TokenFile:
  """Tokenizes a source into <folder>/<name>.bin and .json, or reuses these.

  The file holds the ids of each document followed by eos_id. It is reused
  only if the source (by sha256, or by size and modification time where both
  are as recorded), the tokenizer, and the file itself are as its JSON says;
  otherwise one line to `log` names what changed, and it is built anew.

  Args:
    source: a file path, or a `text.Source`.
    tokenizer: gives the ids.
    folder: where token files live; made if missing.
    name: file name without suffix.
    log: takes one line.
    expect: `TokenFile.hashes` of an earlier run that this one continues.

  Raises:
    UserError: the data differ from `expect`, or the source is unreadable.
  """
  if not isinstance(source, text.Source):
    source = text.file_source(source)
  folder = pathlib.Path(folder)
  found, reason = open_tokens(folder, name)
  meta = found.meta if found else {}
  identity = source.identity(meta)
  expect = expect or {}
  check_expected(
    source,
    expect,
    {**identity, "tokenizer_fingerprint": tokenizer.fingerprint},
  )
  if found:
    reason = _difference(meta, source, identity, tokenizer)
  if reason:
    log(f"Tokens {folder / name}.bin are made anew: {reason}.")
  if reason or not found:
    _build(source, identity, tokenizer, folder, name)
    found, reason = open_tokens(folder, name)
    if not found:
      raise UserError(
        f"tokens={folder / name}.bin cannot be read back ({reason}); check the "
        "disk, then start again."
      )
  elif identity["source_mtimes_ns"] != meta["source_mtimes_ns"]:
    _write_meta(folder, name, {**meta, **identity})  # hash no more next time
  check_expected(source, expect, found.hashes)
  return found


def open_tokens(
  folder: pathlib.Path, name: str
) -> tuple[TokenFile | None, str | None]:
  """The token file, or None and what is wrong (None if there is nothing)."""
  path, meta_path = folder / f"{name}.bin", folder / f"{name}.json"
  try:
    meta = json.loads(meta_path.read_bytes())
    size = path.stat().st_size
    if meta["format"] != FORMAT:
      return None, f"its format is {meta['format']!r}, not {FORMAT}"
    if meta["dtype"] not in ("uint16", "uint32"):
      return None, f"its ids are said to be {meta['dtype']!r}"
    dtype = np.dtype(meta["dtype"]).newbyteorder("<")
    if size != meta["num_tokens"] * dtype.itemsize:
      return None, f"the file has {size} bytes, another size than recorded"
    if files.sha256_of_files([path]) != meta["tokens_sha256"]:
      return None, "the file was changed since it was written (sha256)"
    found = TokenFile(Stream(path, dtype), path, meta)
    sums = found.hashes.values()
    _ = meta["source_size"], meta["source_mtimes_ns"]  # are there
    if not all(isinstance(told, str) for told in sums):
      return None, f"{meta_path.name} is damaged"
  except FileNotFoundError as error:
    missing = pathlib.Path(error.filename)
    other = path if missing == meta_path else meta_path
    return None, f"{missing.name} is missing" if other.exists() else None
  except (OSError, ValueError, LookupError, TypeError, RecursionError):
    return None, f"{meta_path.name} is damaged"
  return found, None


def _difference(
  meta: dict[str, Any],
  source: text.Source,
  identity: dict[str, Any],
  tokenizer: Tokenizer,
) -> str | None:
  if meta["source_sha256"] != identity["source_sha256"]:
    return f"the source {source.name} changed"
  if meta["tokenizer_fingerprint"] != tokenizer.fingerprint:
    return "the tokenizer changed"
  return None


def check_expected(
  source: text.Source, expect: dict[str, str], actual: dict[str, Any]
) -> None:
  """Raises a UserError if a hash in both differs: the run had other data."""
  for key, what in (
    ("source_sha256", "another text"),
    ("tokenizer_fingerprint", "another tokenizer"),
    ("tokens_sha256", "other tokens"),
  ):
    now, then = actual.get(key), expect.get(key)
    if now and then and now != then:
      raise UserError(
        f"data={source.name} gives {what} than the run was started with "
        f"({key} {now[:8]}, was {then[:8]}); put the old data back, or start "
        "a new run."
      )


def _build(
  source: text.Source,
  identity: dict[str, Any],
  tokenizer: Tokenizer,
  folder: pathlib.Path,
  name: str,
) -> None:
  """Streams documents into the .bin; the .json comes last, then it counts."""
  import tqdm

  dtype = np.dtype("<u2" if tokenizer.vocab_size <= 1 << 16 else "<u4")
  digest = hashlib.sha256()
  num_tokens = num_documents = num_bytes = 0
  with contextlib.ExitStack() as stack:
    file = stack.enter_context(files.atomic_write(folder / f"{name}.bin"))
    progress = stack.enter_context(
      tqdm.tqdm(
        desc=f"tokenizing {name}",
        total=identity["source_size"],
        unit="B",
        unit_scale=True,
        delay=2,
        leave=False,
        disable=None,  # no bar where standard error is no terminal
      )
    )
    for batch in _batches(source.documents()):
      if not num_documents:
        _check_lossless(tokenizer, batch[0][:10_000])
      encoded = tokenizer.encode_batch(batch)
      ids = np.fromiter(
        itertools.chain.from_iterable(
          itertools.chain(row, (tokenizer.eos_id,)) for row in encoded
        ),
        dtype,
      )
      file.write(ids.data)
      digest.update(ids.data)
      size = sum(len(document.encode()) for document in batch)
      num_tokens += len(ids)
      num_documents += len(batch)
      num_bytes += size
      progress.update(size)
    if source.identity(identity) != identity:
      raise UserError(
        f"data={source.name} changed while it was read; start again when it "
        "is complete."
      )
  meta = {
    "format": FORMAT,
    **identity,
    "tokenizer_fingerprint": tokenizer.fingerprint,
    "vocab_size": tokenizer.vocab_size,
    "dtype": dtype.name,
    "num_tokens": num_tokens,
    "num_documents": num_documents,
    "num_bytes": num_bytes,
    "tokens_sha256": digest.hexdigest(),
  }
  _write_meta(folder, name, meta)


def _check_lossless(tokenizer: Tokenizer, document: str) -> None:
  """Bits per byte count the bytes of the text that was given, not of another.

  One document is enough for what changes all of them, such as lower case.
  """
  back = tokenizer.decode(tokenizer.encode(document))
  if back != document:
    place = len(os.path.commonprefix([document, back]))
    part = slice(max(0, place - 10), place + 20)
    raise UserError(
      f"data.tokenizer, of kind {tokenizer.kind}, does not keep the text: "
      f"{document[part]!r} comes back as {back[part]!r}; use one without a "
      "normalizer, for example sentencepiece or bytes."
    )


def _write_meta(folder: pathlib.Path, name: str, meta: dict[str, Any]) -> None:
  with files.atomic_write(folder / f"{name}.json") as file:
    file.write(json.dumps(meta, indent=2).encode())


def _batches(documents: Iterable[str]) -> Iterator[list[str]]:
  """Groups of documents of about BATCH_CHARS characters."""
  batch, size = [], 0
  for document in documents:
    batch.append(document)
    size += len(document)
    if size >= BATCH_CHARS:
      yield batch
      batch, size = [], 0
  if batch:
    yield batch
