"""Documents from .txt, .jsonl and .parquet files, or a folder of these."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

from taperjax.data import files
from taperjax.errors import UserError

SEPARATOR = "<|endoftext|>"


@dataclasses.dataclass(frozen=True)
class Source:
  """Text with a name, the files that decide it, and a way to read it anew."""

  name: str
  files: tuple[pathlib.Path, ...]
  documents: Callable[[], Iterator[str]]

  def identity(self, known: dict[str, Any]) -> dict[str, Any]:
    """Name, size, times and sha256 of the source, as a JSON object.

    The hash is taken over from `known`, an earlier answer, if all else in it
    is as before: large files are not read at each start.
    """
    stats = [path.stat() for path in self.files]
    identity = {
      "source": self.name,
      "source_size": sum(stat.st_size for stat in stats),
      "source_mtimes_ns": [stat.st_mtime_ns for stat in stats],
    }
    if all(known.get(key) == value for key, value in identity.items()):
      return {**identity, "source_sha256": known["source_sha256"]}
    return {**identity, "source_sha256": files.sha256_of_files(self.files)}


def file_source(path: str | os.PathLike) -> Source:
  """The source that is one local file or folder."""
  path = pathlib.Path(path)
  return Source(str(path), files_of(path), lambda: iter_documents(path))


def files_of(path: pathlib.Path) -> tuple[pathlib.Path, ...]:
  """The file itself, or the files of a folder in the order of their names.

  A folder is one that `datasets` has saved (`save_to_disk`: .arrow files), or
  one with .txt, .jsonl or .parquet files of one kind.

  Raises:
    UserError: as `iter_documents`.
  """
  if not path.is_dir():
    _reader(path)
    return (path,)
  if (path / "dataset_dict.json").exists():
    parts = sorted(p.name for p in path.iterdir() if p.is_dir())
    raise UserError(
      f"data={path} holds the splits {', '.join(parts)}; give one of them, for "
      f"example {path / 'train'}"
    )
  found = sorted(p for p in path.iterdir() if p.suffix in _READERS)
  kinds = sorted({p.suffix for p in found})
  if len(kinds) != 1:
    fault = f"files of {' and '.join(kinds)}" if kinds else "no text files"
    raise UserError(
      f"data={path} is a folder with {fault}; give one with files of one kind, "
      f"of {', '.join(_READERS)}"
    )
  return tuple(found)


def iter_documents(path: str | os.PathLike) -> Iterator[str]:
  """Yields the documents of a file in its order; empty ones are left out.

  .txt: documents are separated by `<|endoftext|>`, and line breaks next to
  the separator or the ends of the file belong to neither; a file without a
  separator is one document. .jsonl: the field "text" of each line. .parquet
  and .arrow (of a folder that `datasets` has saved): the column "text". The
  files of a folder follow one another by name.

  Raises:
    UserError: no such file, unknown suffix, no documents, a binary file, or
      a record without text.
  """
  path = pathlib.Path(path)
  found = False
  try:
    for part in files_of(path):
      for document in _reader(part)(part):
        if document:
          found = True
          yield document
  except OSError as error:
    raise UserError(
      f"data={str(path)[:200]} cannot be read ({error.strerror}); give a file "
      "that can be."
    ) from error
  if not found:
    raise UserError(
      f"data={path} holds no documents; give a file with text in it."
    )


def _reader(path: pathlib.Path) -> Callable[[pathlib.Path], Iterator[str]]:
  if not path.exists():
    raise UserError(
      f"data={path} does not exist; give the path of a .txt, .jsonl or "
      ".parquet file."
    )
  if path.suffix not in _READERS or not path.is_file():
    raise UserError(
      f"data={path} is not a .txt, .jsonl or .parquet file; convert it to one "
      "of these."
    )
  return _READERS[path.suffix]


def _decode(path: pathlib.Path, raw: bytes, offset: int) -> str:
  """UTF-8 text of `raw`, which begins at byte `offset` of the file."""
  bad = raw.find(b"\0")
  try:
    text = raw.decode("utf-8")
  except UnicodeDecodeError as error:
    bad = error.start if bad < 0 else min(bad, error.start)
  if bad >= 0:
    raise UserError(
      f"data={path} is not UTF-8 text: byte {raw[bad]:#04x} at offset "
      f"{offset + bad}; give a text file, or convert it to UTF-8."
    )
  return text.removeprefix("\ufeff") if offset == 0 else text


def _read_txt(path: pathlib.Path) -> Iterator[str]:
  separator = SEPARATOR.encode()
  keep = len(separator) - 1  # so much of one may end a block, cut in two
  rest, offset = [], 0  # pieces since the last separator; where they begin
  with path.open("rb") as file:
    while block := file.read(1 << 20):
      tail = rest.pop() if rest else b""
      *done, last = (tail + block).split(separator)
      for raw in done:
        raw = b"".join([*rest, raw])
        yield _decode(path, raw, offset).strip("\r\n")
        offset += len(raw) + len(separator)
        rest = []
      rest += [last[:-keep], last[-keep:]]
  yield _decode(path, b"".join(rest), offset).strip("\r\n")


def _read_jsonl(path: pathlib.Path) -> Iterator[str]:
  offset = 0
  with path.open("rb") as file:
    for number, raw in enumerate(file, start=1):
      line = _decode(path, raw, offset)
      offset += len(raw)
      if not line.strip():
        continue
      try:
        text = json.loads(line)["text"]
        text.encode()  # half of a surrogate pair is no text
      except (ValueError, LookupError, TypeError, AttributeError,
              RecursionError):
        text = None
      if not isinstance(text, str):
        raise UserError(
          f'data={path} line {number} is not an object with a string "text"; '
          'write each line as {"text": "..."}.'
        )
      yield text


def _read_parquet(path: pathlib.Path) -> Iterator[str]:
  import pyarrow
  import pyarrow.parquet

  try:
    file = pyarrow.parquet.ParquetFile(path)
  except (pyarrow.ArrowException, OSError) as error:
    raise _damaged(path, "parquet", error) from error
  with file:
    _check_column(path, file.schema_arrow)
    try:
      for batch in file.iter_batches(batch_size=1024, columns=["text"]):
        yield from _texts(batch.column(0))
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
      raise _damaged(path, "parquet", error) from error


def _read_arrow(path: pathlib.Path) -> Iterator[str]:
  import pyarrow

  try:
    with pyarrow.memory_map(str(path)) as file:
      batches = pyarrow.ipc.open_stream(file)
      _check_column(path, batches.schema)
      for batch in batches:
        yield from _texts(batch["text"])
  except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
    raise _damaged(path, "arrow", error) from error


def _texts(column) -> Iterator[str]:
  """Texts that are not empty; without a look at its offsets, a damaged file
  would be read outside of its bounds.
  """
  column.validate(full=True)
  return (text for text in column.to_pylist() if text)


def _check_column(path: pathlib.Path, schema) -> None:
  """Raises unless there is one column "text", of strings."""
  import pyarrow

  if schema.names.count("text") != 1:
    raise UserError(
      f'data={path} has not one column "text", but {", ".join(schema.names)}; '
      "rename the column that holds the text."
    )
  kind = schema.field("text").type
  if pyarrow.types.is_dictionary(kind):
    kind = kind.value_type
  if str(kind) not in ("string", "large_string", "string_view"):
    raise UserError(
      f'data={path} has a column "text" of {kind}, not of strings; convert '
      "it to strings."
    )


def _damaged(path: pathlib.Path, kind: str, error: Exception) -> UserError:
  return UserError(
    f"data={path} cannot be read as {kind} ({type(error).__name__}); "
    "the file is damaged or of another kind: make it anew."
  )


_READERS = {
  ".txt": _read_txt,
  ".jsonl": _read_jsonl,
  ".parquet": _read_parquet,
  ".arrow": _read_arrow,
}
