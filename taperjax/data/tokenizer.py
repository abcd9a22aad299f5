"""Tokenizers with one face: bytes, SentencePiece, Hugging Face files."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import pathlib
import re
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from taperjax.data import files
from taperjax.errors import UserError

INFO = "tokenizer_info.json"
# Of a tokenizer.json, gaps included: tables of all ids are made of it.
_IDS_FOR_A_TOKEN = 100
TRAIN_CHARS = 200_000_000  # text that SentencePiece is trained on, at most


class Tokenizer:
  """Text to ids and back; `decode(encode(text)) == text`.

  Text never turns into a special id, whatever it spells: `eos_id` and
  `bos_id` are put in by the caller only.

  Attributes:
    kind: "bytes", "sentencepiece" or "huggingface".
    vocab_size: number of ids, special ones included.
    eos_id: the id after each document.
    bos_id: the id that a document begins with, or None if there is none.
    adds_bos: whether the model saw bos_id before each text, so that prompts
      need it.
    fingerprint: hex sha256 of all that decides the ids.
  """

  kind: str
  model_name: str  # file name of the definition in a saved folder
  vocab_size: int
  eos_id: int
  bos_id: int | None
  adds_bos: bool = False

  def __init__(self, definition: bytes, told: dict | None = None):
    """`told`: fields of the info file that decide ids beside the definition."""
    self.definition = definition
    self.told = told or {}
    salted = self.kind.encode() + b"\0" + definition
    if self.told:
      salted += b"\0" + json.dumps(self.told, sort_keys=True).encode()
    self.fingerprint = hashlib.sha256(salted).hexdigest()

  def encode(self, text: str) -> list[int]:
    return self.encode_batch([text])[0]

  def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
    raise NotImplementedError

  def encode_prompt(self, text: str) -> list[int]:
    """Ids to continue: bos_id first if the model saw it so; never empty."""
    start = [self.bos_id] if self.adds_bos else []
    return start + self.encode(text) or [self.eos_id]

  def decode(self, ids: Iterable[int], continues: bool = False) -> str:
    """Text of the ids; special ids are dropped.

    Some tokenizers put a blank before a text, and decoding takes it away
    again: with `continues` it stays, since the ids go on from other ones.
    """
    raise NotImplementedError

  def id_bytes(self) -> np.ndarray:
    """UTF-8 bytes of text that each id stands for, int32[V]; special: 0."""
    raise NotImplementedError

  def save(self, folder: str | os.PathLike) -> None:
    """Writes the definition, then a JSON of kind and fingerprint."""
    folder = pathlib.Path(folder)
    with files.atomic_write(folder / self.model_name) as file:
      file.write(self.definition)
    info = {
      "kind": self.kind,
      "model": self.model_name,
      "vocab_size": self.vocab_size,
      "fingerprint": self.fingerprint,
      **self.told,
    }
    with files.atomic_write(folder / INFO) as file:
      file.write(json.dumps(info, indent=2).encode())


class ByteTokenizer(Tokenizer):
  """The 256 bytes of UTF-8, and 256 for the end of a document."""

  kind = "bytes"
  model_name = "bytes.model"
  vocab_size = 257
  eos_id = 256
  bos_id = None

  def __init__(self, definition: bytes = b"257"):
    super().__init__(definition)

  def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
    return [list(text.encode()) for text in texts]

  def decode(self, ids: Iterable[int], continues: bool = False) -> str:
    return bytes(i for i in ids if i < 256).decode(errors="replace")

  def id_bytes(self) -> np.ndarray:
    return (np.arange(257) < 256).astype(np.int32)


class SentencePieceTokenizer(Tokenizer):
  """A SentencePiece model, given as the bytes of its file.

  SentencePiece writes a blank as U+2581, and so would read that character
  back as a blank: here it is encoded as its three bytes instead.
  """

  kind = "sentencepiece"
  model_name = "tokenizer.model"

  def __init__(self, definition: bytes):
    import sentencepiece

    super().__init__(definition)
    self._model = sentencepiece.SentencePieceProcessor(model_proto=definition)
    self.vocab_size = self._model.get_piece_size()
    self.eos_id = self._model.eos_id()
    self.bos_id = self._model.bos_id() if self._model.bos_id() >= 0 else None
    self._special = {
      i
      for i in range(self.vocab_size)
      if self._model.is_control(i) or self._model.is_unknown(i)
    }
    block = [self._model.piece_to_id(f"<0x{b:02X}>") for b in "▁".encode()]
    self._block = None if self._special.intersection(block) else block

  def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
    encoded = self._model.encode(list(texts))
    if self._block:
      for row, text in enumerate(texts):
        if "▁" in text:
          first, *others = self._model.encode(text.split("▁"))
          encoded[row] = sum((self._block + ids for ids in others), first)
    return encoded

  def decode(self, ids: Iterable[int], continues: bool = False) -> str:
    kept = (int(i) for i in ids)
    kept = [i for i in kept if i not in self._special]
    if not continues:
      return self._model.decode(kept)
    # Only the first piece of a text loses its blank: put another one there.
    first = [self._model.unk_id()]
    return self._model.decode(first + kept)[len(self._model.decode(first)) :]

  def id_bytes(self) -> np.ndarray:
    pieces = [self._model.id_to_piece(i) for i in range(self.vocab_size)]
    return np.array(
      [
        0
        if i in self._special
        else 1
        if self._model.is_byte(i)
        else len(piece.replace("▁", " ").encode())
        for i, piece in enumerate(pieces)
      ],
      np.int32,
    )


class HFTokenizer(Tokenizer):
  """A Hugging Face `tokenizer.json`, given as its bytes.

  Its special tokens are never read from text and never added. Unless told,
  the end of text is the first of `EOS` that it has, `bos_id` the first of
  `BOS`.

  Args:
    definition: the file's bytes.
    path: its name, for messages.
    told: any of "eos_id", "bos_id" (None: there is none) and "adds_bos".
  """

  kind = "huggingface"
  model_name = "tokenizer.json"
  EOS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>")
  BOS = ("<|begin_of_text|>", "<s>", "<bos>", "<|startoftext|>")
  TOLD = ("eos_id", "bos_id", "adds_bos")

  def __init__(
    self,
    definition: bytes,
    path: str | os.PathLike = model_name,
    told: dict | None = None,
  ):
    import tokenizers

    super().__init__(definition, told)
    with library_errors(path):
      self._model = tokenizers.Tokenizer.from_buffer(definition)
      self._model.encode_special_tokens = True
      self._model.no_padding()
      self._model.no_truncation()
      vocab = self._model.get_vocab(with_added_tokens=True)
    self.vocab_size = max(vocab.values(), default=-1) + 1
    if not 0 < self.vocab_size <= _IDS_FOR_A_TOKEN * len(vocab):
      raise UserError(
        f"data.tokenizer={path} has {len(vocab):,} tokens with ids below "
        f"{self.vocab_size:,}; give one without such gaps."
      )
    ends = [vocab[token] for token in self.EOS if token in vocab]
    starts = [vocab[token] for token in self.BOS if token in vocab]
    self.eos_id = self._told("eos_id", ends, path)
    self.bos_id = self._told("bos_id", starts, path)
    self.adds_bos = bool(self.told.get("adds_bos", False))
    if self.eos_id is None:
      raise UserError(
        f"data.tokenizer={path} has no end-of-text token; add one of "
        f"{', '.join(self.EOS)} to it."
      )
    if self.adds_bos and self.bos_id is None:
      raise UserError(
        f"data.tokenizer={path} adds a beginning of text (adds_bos=True) but "
        "has no such token; tell bos_id too."
      )
    with library_errors(path):
      parts = json.loads(definition)
    decoder = str(parts.get("decoder"))
    self._is_byte_level = "ByteLevel" in decoder
    if not re.search("ByteLevel|ByteFallback|Metaspace", decoder):
      raise UserError(
        f"data.tokenizer={path} has a decoder that does not keep the text "
        "exactly; use a byte-level or SentencePiece-like tokenizer."
      )
    with library_errors(path):
      self._continued = _continued(parts["decoder"])
      self.decode(self.encode("a 1é\n"), continues=True)  # nothing is missing

  def _told(self, name: str, named: list[int], path) -> int | None:
    """The id that was told, else the first of the known names."""
    if name not in self.told:
      return named[0] if named else None
    token = self.told[name]
    if token is not None and not (
      type(token) is int and 0 <= token < self.vocab_size
    ):
      raise UserError(
        f"data.tokenizer={path}: {name}={token!r} is not an id of its "
        f"vocabulary; use one from 0 to {self.vocab_size - 1}."
      )
    return token

  def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
    encoded = self._model.encode_batch(list(texts), add_special_tokens=False)
    return [encoding.ids for encoding in encoded]

  def decode(self, ids: Iterable[int], continues: bool = False) -> str:
    ids = [int(i) for i in ids]
    if not continues or self._continued is None:
      return self._model.decode(ids, skip_special_tokens=True)
    added = self._model.get_added_tokens_decoder()
    special = {i for i, token in added.items() if token.special}
    kept = (self._model.id_to_token(i) for i in ids if i not in special)
    return self._continued.decode([token for token in kept if token])

  def id_bytes(self) -> np.ndarray:
    added = self._model.get_added_tokens_decoder()
    lengths = np.zeros(self.vocab_size, np.int32)
    for piece, i in self._model.get_vocab(with_added_tokens=True).items():
      if i in added:
        lengths[i] = 0 if added[i].special else len(added[i].content.encode())
      elif self._is_byte_level:
        lengths[i] = len(piece)  # one printable character for each byte
      elif re.fullmatch("<0x[0-9A-F]{2}>", piece):
        lengths[i] = 1
      else:
        lengths[i] = len(piece.replace("▁", " ").encode())
    return lengths


@contextlib.contextmanager
def _no_stderr() -> Iterator[None]:
  """Drops what is written to file descriptor 2, as the library's panics are.

  Of the whole process, for the moment that a tokenizer.json takes to open.
  """
  try:
    kept = os.dup(2)
  except OSError:  # there is none
    yield
    return
  try:
    with open(os.devnull, "wb") as null:
      os.dup2(null.fileno(), 2)
    yield
  finally:
    os.dup2(kept, 2)
    os.close(kept)


@contextlib.contextmanager
def library_errors(path: str | os.PathLike) -> Iterator[None]:
  """Turns whatever a tokenizer.json makes of the library into one line."""
  try:
    with _no_stderr():
      yield
  except (KeyboardInterrupt, SystemExit, MemoryError):
    raise
  except BaseException as error:  # a panic of the library is no Exception
    raise UserError(
      f"data.tokenizer={path} is not a tokenizer.json ({error}); give the "
      "file that Hugging Face `tokenizers` saves."
    ) from error


def _continued(decoder: dict):
  """The decoder without what takes the first blank away; None: the same."""
  import tokenizers

  def keep(part: dict) -> dict | None:
    if part["type"] == "Sequence":
      parts = [keep(p) for p in part["decoders"]]
      return part | {"decoders": [p for p in parts if p]}
    if part["type"] == "Strip" and part["start"] and part["content"] == " ":
      return part | {"start": 0} if part["stop"] else None
    if part["type"] == "Metaspace":
      # Older files have add_prefix_space in place of prepend_scheme.
      part = {k: v for k, v in part.items() if k != "add_prefix_space"}
      return part | {"prepend_scheme": "never"}
    return part

  kept = keep(decoder)
  if kept == decoder:
    return None
  # The library builds decoders from JSON only as part of a tokenizer.
  shell = {"version": "1.0", "added_tokens": [], "decoder": kept}
  shell["model"] = {"type": "BPE", "vocab": {}, "merges": []}
  return tokenizers.Tokenizer.from_str(json.dumps(shell)).decoder


def train_sentencepiece(
  documents: Iterable[str], vocab_size: int
) -> SentencePieceTokenizer:
  """Trains BPE pieces on the documents; the same text gives the same model.

  Nothing is normalized, blanks and line breaks are pieces like others, and
  what has no piece falls back to bytes, so that every text comes back
  exactly. vocab_size includes `<unk>`, `</s>`, the line break and 256 bytes.
  There is no `<s>`: nothing in a stream of documents would train it. Of a
  long text the first TRAIN_CHARS characters count, as all lies in memory.

  Raises:
    UserError: vocab_size does not fit the text, with the nearest that does.
  """
  import sentencepiece

  # No piece crosses a line break, so lines are the natural training sentences.
  lines = (
    line
    for text in _first_chars(documents, TRAIN_CHARS)
    for line in text.split("\n")
    if line
  )
  model = io.BytesIO()
  try:
    sentencepiece.SentencePieceTrainer.train(
      sentence_iterator=lines,
      model_writer=model,
      model_type="bpe",
      vocab_size=vocab_size,
      normalization_rule_name="identity",
      add_dummy_prefix=False,
      remove_extra_whitespaces=False,
      allow_whitespace_only_pieces=True,
      user_defined_symbols=["\n"],
      byte_fallback=True,
      max_sentence_length=2**30,
      unk_id=0,
      eos_id=1,
      bos_id=-1,
      pad_id=-1,
      minloglevel=3,
    )
  except RuntimeError as error:
    raise UserError(_vocab_size_message(vocab_size, str(error))) from error
  return SentencePieceTokenizer(model.getvalue())


def _first_chars(documents: Iterable[str], limit: int) -> Iterator[str]:
  """Documents until `limit` characters are reached."""
  for document in documents:
    yield document[:limit]
    limit -= len(document)
    if limit <= 0:
      return


def _vocab_size_message(vocab_size: int, error: str) -> str:
  """What is wrong with vocab_size, read from SentencePiece's own words."""
  field = f"data.vocab_size={vocab_size}"
  if largest := re.search(r"value <= (\d+)", error):
    return (
      f"{field} is more than the training text supports; use at most "
      f"{largest[1]}, or give more text."
    )
  if smallest := re.search(r"required_chars\. \d+ vs (\d+)", error):
    return (
      f"{field} is too small for the characters of the training text; use at "
      f"least {smallest[1]}."
    )
  return f"{field} cannot be trained ({error}); give a text with words in it."


def load_tokenizer(path: str | os.PathLike) -> Tokenizer:
  """Loads a saved folder, or a bare tokenizer.json or .model file."""
  path = pathlib.Path(path)
  kinds = {
    cls.kind: cls
    for cls in (ByteTokenizer, SentencePieceTokenizer, HFTokenizer)
  }
  if path.is_file():
    kind = {".json": "huggingface", ".model": "sentencepiece"}.get(path.suffix)
    if kind is None:
      raise UserError(
        f"data.tokenizer={path} is neither a tokenizer.json nor a .model file; "
        "give one of these, or a folder with a saved tokenizer."
      )
    return _read(kinds[kind], path)
  if not (path / INFO).is_file():
    if (path / HFTokenizer.model_name).is_file():
      return _read(HFTokenizer, path / HFTokenizer.model_name)
    raise UserError(
      f"data.tokenizer={path} holds no tokenizer; give a tokenizer.json, or a "
      f"folder with {INFO} in it."
    )
  try:
    info = json.loads((path / INFO).read_bytes())
    told = {k: info[k] for k in HFTokenizer.TOLD if k in info}
    kind = kinds[info["kind"]]
    # The name in the file might lead out of the folder.
    tokenizer = _read(kind, path / kind.model_name, told)
    intact = tokenizer.fingerprint == info["fingerprint"]
  except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
    raise UserError(_damaged(path)) from error
  if not intact:
    raise UserError(_damaged(path))
  return tokenizer


def _damaged(path: pathlib.Path) -> str:
  return (
    f"data.tokenizer={path} is damaged: its files do not belong together; "
    "delete the folder to have it made anew."
  )


def _read(
  cls: type[Tokenizer], path: pathlib.Path, told: dict | None = None
) -> Tokenizer:
  if cls is HFTokenizer:
    return HFTokenizer(path.read_bytes(), path, told)
  try:
    return cls(path.read_bytes())
  except RuntimeError as error:  # from SentencePiece
    raise UserError(
      f"data.tokenizer={path} is not a SentencePiece model; give the .model "
      "file that it saves."
    ) from error
