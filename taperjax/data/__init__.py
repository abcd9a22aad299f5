"""Text to tokens to windows."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import pathlib
import re
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from taperjax.errors import UserError

if TYPE_CHECKING:
  from taperjax.data.text import Source
  from taperjax.data.tokenizer import Tokenizer
  from taperjax.data.tokens import TokenFile

# Of data.train=alphabet: 666,000 tokens, and 67,000 for validation.
_ALPHABET_DOCUMENTS = {"train": 20_000, "valid": 2_000}


@dataclasses.dataclass(frozen=True)
class Data:
  """A tokenizer and the two token files that it made."""

  tokenizer: Tokenizer
  train: TokenFile
  valid: TokenFile
  hashes: dict[str, Any]  # of all three, for a run that is resumed


def load_data(
  *,
  train: str,
  valid: str,
  tokenizer: str,
  vocab_size: int,
  folder: str | os.PathLike,
  seed: int,
  corpus_stories: int | None,
  log: Callable[[str], object],
  expect: dict[str, Any] | None = None,
) -> Data:
  """Finds or makes the tokens of a run; all that is made lies in `folder`.

  Args:
    train: "corpus" (the embedded corpus), "alphabet" (see data/alphabet.py),
      "tinystories", "tinystories-v2", "tfds:NAME/SPLIT", or a .txt, .jsonl or
      .parquet file.
    valid: likewise.
    tokenizer: "sentencepiece" (trained on the training text), "bytes", or a
      tokenizer.json, a .model, or a folder with a saved tokenizer.
    vocab_size: of a trained tokenizer, special pieces included.
    folder: made if missing; several runs may share it at the same time.
    seed: of the embedded corpus and of the alphabet.
    corpus_stories: stories of its training part; validation has a tenth. None
      where neither text is the corpus.
    log: takes lines on what is waited for, or made anew and why.
    expect: `Data.hashes` of a run that this one continues.

  Raises:
    UserError: bad or missing data, or data that differ from `expect`.
  """
  from taperjax.data import tokens

  folder = pathlib.Path(folder).absolute()
  expect = expect or {}
  with _workplace(folder, log):
    # Train and valid of the corpus never share a seed: its stories are new.
    num_valid = corpus_stories and max(1, corpus_stories // 10)
    sources = {
      "train": _source(train, "train", folder, 2 * seed, corpus_stories),
      "valid": _source(valid, "valid", folder, 2 * seed + 1, num_valid),
    }
    tok, tok_name = _tokenizer(
      tokenizer, vocab_size, sources["train"], folder, log, expect
    )
    made = {
      part: tokens.prepare(
        source,
        tok,
        folder,
        name=_name(source.name, tok_name),
        log=log,
        expect=expect.get(part),
      )
      for part, source in sources.items()
    }
  hashes = {part: token_file.hashes for part, token_file in made.items()}
  return Data(tok, **made, hashes={"tokenizer": tok.fingerprint, **hashes})


@contextlib.contextmanager
def _workplace(
  folder: pathlib.Path, log: Callable[[str], object]
) -> Iterator[None]:
  """The folder, made and locked; what the system refuses is a UserError."""
  from taperjax.data import files

  try:
    folder.mkdir(parents=True, exist_ok=True)
    with files.lock(folder, log):
      yield
  except OSError as error:  # not writable, disk full, source not readable
    raise UserError(
      f"data.folder={folder} or a source cannot be used ({error}); mend that "
      "or give another folder."
    ) from error


def _source(
  spec: str,
  part: str,
  folder: pathlib.Path,
  seed: int,
  num_stories: int | None,
) -> Source:
  from taperjax.data import alphabet, corpus, files, text

  if spec in ("corpus", "alphabet"):
    module, write, number = corpus, corpus.write_corpus, num_stories
    if spec == "alphabet":
      module, write = alphabet, alphabet.write_alphabet
      number = _ALPHABET_DOCUMENTS[part]
    version = files.sha256_of_files([pathlib.Path(module.__file__)])[:8]
    path = folder / f"{spec}-{seed}-{number}-{version}.txt"
    if not path.exists():
      write(path, number, seed)
    # Without the folder, so that a moved workdir keeps its names.
    return dataclasses.replace(text.file_source(path), name=path.name)
  if spec in ("tinystories", "tinystories-v2"):
    from taperjax.data import tinystories

    split = {"train": "train", "valid": "validation"}[part]
    version = "v2" if spec.endswith("-v2") else "v1"
    return tinystories.source(folder, version, split)
  if spec.startswith("tfds:"):
    from taperjax.data import tinystories

    return tinystories.tfds_source(spec)
  return text.file_source(pathlib.Path(spec).absolute())


def _tokenizer(
  spec: str,
  vocab_size: int,
  source: Source,
  folder: pathlib.Path,
  log: Callable[[str], object],
  expect: dict[str, Any],
) -> tuple[Tokenizer, str]:
  """The tokenizer, and a name that tells it from others in `folder`."""
  from taperjax.data import tokenizer

  if spec == "sentencepiece":
    name = _name(source.name, f"sentencepiece {vocab_size}")
    path = folder / name
    tok = _sentencepiece(vocab_size, source, path, log, expect.get("train", {}))
  elif spec == "bytes":
    tok, name = tokenizer.ByteTokenizer(), spec
  elif pathlib.Path(spec).exists():
    tok = tokenizer.load_tokenizer(spec)
    name = str(pathlib.Path(spec).absolute())
  else:
    raise UserError(
      f"data.tokenizer={spec} does not exist; use sentencepiece, bytes, or "
      "the path of a tokenizer.json or of a saved tokenizer."
    )
  if expect.get("tokenizer", tok.fingerprint) != tok.fingerprint:
    raise UserError(
      f"data.tokenizer={spec} differs from the one that the run was started "
      "with; put the old one back, or start a new run."
    )
  return tok, name


def _sentencepiece(
  vocab_size: int,
  source: Source,
  path: pathlib.Path,
  log: Callable[[str], object],
  expect: dict[str, str],
) -> Tokenizer:
  """Trains on the source, or reuses what was trained on the same text."""
  from taperjax.data import files, tokenizer, tokens

  try:
    trained_on = json.loads((path / "trained_on.json").read_bytes())
    trained_on["source_sha256"]  # is there
  except FileNotFoundError:
    trained_on = {}
  except (ValueError, LookupError, TypeError, RecursionError):
    trained_on = {}
    log(f"Tokenizer {path} is trained anew: trained_on.json is damaged.")
  identity = source.identity(trained_on)
  tokens.check_expected(source, expect, identity)  # before it is replaced
  if trained_on:
    if trained_on["source_sha256"] == identity["source_sha256"]:
      return tokenizer.load_tokenizer(path)
    log(f"Tokenizer {path} is trained anew: the source {source.name} changed.")
  tok = tokenizer.train_sentencepiece(source.documents(), vocab_size)
  # A kill from here on must not leave the stamp of another model.
  (path / "trained_on.json").unlink(missing_ok=True)
  tok.save(path)
  with files.atomic_write(path / "trained_on.json") as file:
    file.write(json.dumps(identity).encode())
  return tok


def _name(source: str, other: str) -> str:
  """A file name: the stem of the source, and a digest of both names."""
  stem = re.sub(r"\W+", "-", pathlib.Path(source).stem).strip("-")
  digest = hashlib.sha256(f"{source}\0{other}".encode()).hexdigest()[:8]
  return f"{stem}-{digest}"
