"""Tokenizers of other formats: read as ours, and written as theirs.

All that is read becomes a Hugging Face tokenizer.json. SentencePiece's BPE
joins the neighbours whose joint text is the piece with the best score; its
merges in tokenizer.json are therefore all the ways to cut each piece in two
pieces, the pieces with the best scores first.
"""

from __future__ import annotations

import json
import math
import os
import pathlib
import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from taperjax.data.tokenizer import (
  ByteTokenizer,
  HFTokenizer,
  SentencePieceTokenizer,
  Tokenizer,
  library_errors,
)
from taperjax.errors import UserError
from taperjax.interop import hf_files

# Kinds of pieces, numbered alike in SentencePiece and GGUF.
NORMAL, UNKNOWN, CONTROL, USER, UNUSED, BYTE = range(1, 7)
_KINDS = {
  NORMAL: "normal",
  UNKNOWN: "unknown",
  CONTROL: "control",
  USER: "user-defined",
  UNUSED: "unused",
  BYTE: "byte",
}
_END = "<|endoftext|>"
# Merges of a piece grow with its square: a short file could ask for any amount
# of memory. SentencePiece makes pieces of up to 16 characters unless told.
_LONGEST_PIECE = 256
_BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
_BYTE_LEVEL = {
  "type": "ByteLevel",
  "add_prefix_space": False,
  "trim_offsets": True,
  "use_regex": True,
}
_LLAMA3_WORDS = (
  r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
  r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# How text is cut before byte-level BPE, by GGUF's tokenizer.ggml.pre.
_PRE = {
  "gpt-2": [_BYTE_LEVEL],
  "smollm": [{"type": "Digits", "individual_digits": True}, _BYTE_LEVEL],
  "llama-bpe": [
    {
      "type": "Split",
      "pattern": {"Regex": _LLAMA3_WORDS},
      "behavior": "Isolated",
      "invert": False,
    },
    {**_BYTE_LEVEL, "use_regex": False},
  ],
}


def from_llama2c(path: str | os.PathLike, vocab_size: int) -> HFTokenizer:
  """Reads a tokenizer file of llama2.c (tok512.bin and the like).

  A document begins with id 1, and the next document's ends it, so 1 is both
  bos_id and eos_id. A blank is put before a text that is not empty.

  Args:
    path: int32 longest length; for each token float32 score, int32 length,
      bytes. Ids 0 to 2 are special, 3 to 258 the bytes, then pieces.
    vocab_size: number of tokens.

  Raises:
    UserError: the file is cut, too long, or holds something else.
  """
  path = pathlib.Path(path)
  pieces, scores = _llama2c_pieces(path, vocab_size)
  pieces[:3] = "<unk>", "<s>", "</s>"
  kinds = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256]
  kinds += [NORMAL] * (vocab_size - len(kinds))
  definition = _scored(pieces, scores, kinds, prefix=True, path=path)
  told = {"bos_id": 1, "eos_id": 1, "adds_bos": True}
  return HFTokenizer(definition, path, told)


def _llama2c_pieces(
  path: pathlib.Path, vocab_size: int
) -> tuple[list[str], list[float]]:
  def wrong(what: str) -> UserError:
    return UserError(
      f"tokenizer={path} {what}, so it is no llama2.c tokenizer of "
      f"{vocab_size} tokens; give the file that belongs to the checkpoint"
    )

  try:
    data = path.read_bytes()
  except OSError as error:
    raise UserError(
      f"tokenizer={path} cannot be read ({error.strerror}); give a llama2.c "
      "tokenizer file"
    ) from error
  pieces, scores, offset = [], [], 4
  for i in range(vocab_size):
    if offset + 8 > len(data):
      raise wrong(f"ends in token {i}")
    score, length = struct.unpack_from("<fi", data, offset)
    piece = data[offset + 8 : offset + 8 + length] if length > 0 else b""
    if length < 0 or len(piece) < length:
      raise wrong(f"gives token {i} the length {length}")
    try:
      pieces.append(piece.decode())
    except UnicodeDecodeError:
      raise wrong(f"has a token {i} that is not UTF-8") from None
    scores.append(score)
    offset += 8 + length
  if offset != len(data):
    raise wrong(f"holds {len(data) - offset} bytes after the last token")
  longest = max(len(piece.encode()) for piece in pieces)
  if struct.unpack_from("<i", data)[0] < longest:
    raise wrong("names a longest token that is too short")
  if pieces[3:259] != _BYTES:
    raise wrong("does not have the 256 bytes as tokens 3 to 258")
  return pieces, scores


def _scored(
  pieces: Sequence[str],
  scores: Sequence[float],
  kinds: Sequence[int],
  *,
  prefix: bool,
  path: str | os.PathLike,
) -> bytes:
  """A tokenizer.json of SentencePiece BPE with byte fallback.

  Blanks stay blanks in the pieces, so U+2581 is a character like others.
  With `prefix` a blank is put before a text, and decoding takes it away.
  """
  vocab = {piece: i for i, piece in enumerate(pieces)}
  if len(vocab) < len(pieces):
    twice = next(p for i, p in enumerate(pieces) if vocab[p] != i)
    raise UserError(
      f"tokenizer={path} has the piece {twice!r} twice, so its ids are not "
      "known; give another file"
    )
  blank = ["<0x20>"] if " " in vocab else []  # it falls back to no byte
  if missing := [b for b in _BYTES if b not in vocab and b not in blank]:
    raise UserError(
      f"tokenizer={path} has no piece {missing[0]}, so some texts have no ids; "
      "only tokenizers with byte fallback can be used"
    )
  long = [piece for piece in pieces if len(piece) > _LONGEST_PIECE]
  if long:
    raise UserError(
      f"tokenizer={path} has a piece of {len(long[0]):,} characters, "
      f"{long[0][:20]!r}...; up to {_LONGEST_PIECE} can be used: give another "
      "file"
    )
  if not all(map(math.isfinite, scores)):
    raise UserError(
      f"tokenizer={path} has a score that is not finite, so the order of its "
      "pieces is not known; give another file"
    )
  decoders = [{"type": "ByteFallback"}, {"type": "Fuse"}]
  if prefix:
    decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
  special = [i for i, k in enumerate(kinds) if k in (UNKNOWN, CONTROL)]
  return _definition(
    vocab,
    _merges_of(pieces, scores, kinds),
    added=dict.fromkeys(special, True),
    byte_fallback=True,
    normalizer={"type": "Prepend", "prepend": " "} if prefix else None,
    decoder={"type": "Sequence", "decoders": decoders},
  )


def _merges_of(
  pieces: Sequence[str], scores: Sequence[float], kinds: Sequence[int]
) -> list[tuple[str, str]]:
  normal = [i for i, kind in enumerate(kinds) if kind == NORMAL]
  known = {pieces[i] for i in normal}
  return [
    (piece[:cut], piece[cut:])
    for piece in (pieces[i] for i in sorted(normal, key=lambda i: -scores[i]))
    for cut in range(1, len(piece))
    if piece[:cut] in known and piece[cut:] in known
  ]


def _definition(
  vocab: Mapping[str, int],
  merges: Iterable[tuple[str, str]],
  *,
  added: Mapping[int, bool],
  decoder: dict,
  pre: Sequence[dict] = (),
  normalizer: dict | None = None,
  byte_fallback: bool = False,
  ignore_merges: bool = False,
) -> bytes:
  """A tokenizer.json of BPE.

  Args:
    added: ids that are matched whole, and whether they are special.
    pre: steps that cut the text first.
  """
  names = {i: piece for piece, i in vocab.items()}
  plain = {
    "single_word": False,
    "lstrip": False,
    "rstrip": False,
    "normalized": False,
  }
  parts = {
    "version": "1.0",
    "truncation": None,
    "padding": None,
    "added_tokens": [
      {"id": i, "content": names[i], **plain, "special": special}
      for i, special in sorted(added.items())
    ],
    "normalizer": normalizer,
    "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*pre]}
    if pre
    else None,
    "post_processor": None,
    "decoder": decoder,
    "model": {
      "type": "BPE",
      "dropout": None,
      "unk_token": None,
      "continuing_subword_prefix": None,
      "end_of_word_suffix": None,
      "fuse_unk": False,
      "byte_fallback": byte_fallback,
      "ignore_merges": ignore_merges,
      "vocab": dict(vocab),
      "merges": [list(merge) for merge in merges],
    },
  }
  return json.dumps(parts, ensure_ascii=False, indent=1).encode()


def from_hf_folder(folder: str | os.PathLike) -> HFTokenizer | None:
  """The tokenizer.json of a Hugging Face folder; None: there is none.

  Its ends are those that tokenizer_config.json names, else the ids in
  generation_config.json or config.json (of a list the first), else they are
  known by their names. `adds_bos` is what the post-processor does.

  Raises:
    UserError: a damaged file, an end that the vocabulary does not have, or a
      post-processor that does more.
  """
  folder = pathlib.Path(folder)
  path = folder / "tokenizer.json"
  if not path.is_file():
    return None
  definition = path.read_bytes()
  model = HFTokenizer(definition, path, {"eos_id": 0, "bos_id": None})._model
  vocab = model.get_vocab(with_added_tokens=True)
  names = _read_json(folder / "tokenizer_config.json")
  told = {}
  for end in ("bos", "eos"):
    token = names.get(f"{end}_token")
    token = token.get("content") if isinstance(token, dict) else token
    if token is not None:
      told[f"{end}_id"] = vocab.get(str(token))
      if told[f"{end}_id"] is None:
        raise UserError(
          f"{folder / 'tokenizer_config.json'}: {end}_token={token!r} is not "
          "in tokenizer.json; put it there, or name one that is"
        )
      continue
    if end == "bos" and "bos_token" in names:  # null: there is none
      told["bos_id"] = None
      continue
    for name in ("generation_config.json", "config.json"):
      token = _read_json(folder / name).get(f"{end}_token_id")
      token = token[0] if isinstance(token, list) and token else token
      if token is not None:
        told[f"{end}_id"] = token
        break
  found = HFTokenizer(definition, path, told)
  with library_errors(path):
    ids = model.encode("a", add_special_tokens=True).ids
  plain = found.encode("a")
  if ids == plain:
    return found
  if ids == [found.bos_id, *plain]:
    return HFTokenizer(definition, path, told | {"adds_bos": True})
  raise UserError(
    f"{path}: its post-processor makes {ids} of the ids {plain}, but only a "
    "beginning of text in front is supported; change the post-processor"
  )


def _read_json(path: pathlib.Path) -> dict[str, Any]:
  """A JSON file as a dict; empty if there is no file."""
  return hf_files.read_json(path) if path.exists() else {}


def from_gguf(
  metadata: Mapping[str, Any], path: str | os.PathLike
) -> HFTokenizer:
  """The tokenizer that a GGUF file describes, as llama.cpp would run it.

  Args:
    metadata: values by key, as plain Python.
    path: the file, for messages.

  Raises:
    UserError: a kind of tokenizer, of text cutting or of token that is not
      known here, or tables that do not belong together.
  """
  def get(key: str, default=None):
    return metadata.get(f"tokenizer.ggml.{key}", default)

  def refuse(key: str, value, rule: str) -> UserError:
    return UserError(
      f"{path}: tokenizer.ggml.{key}={value!r} {rule}; give another file"
    )

  def table(key: str, of: type) -> list:
    found = get(key, [])
    if type(found) is not list or any(type(x) is not of for x in found):
      raise refuse(key, str(found)[:40], f"must be a list of {of.__name__}")
    return found

  kind, pre = get("model"), get("pre")
  pieces, scores = table("tokens", str), table("scores", float)
  kinds = table("token_type", int) or [NORMAL] * len(pieces)
  if len(kinds) != len(pieces) or not pieces:
    raise refuse("tokens", len(pieces), f"tokens have {len(kinds)} types")
  if kind == "gpt2":
    if str(pre) not in _PRE:
      raise refuse("pre", pre, f"is not one of {', '.join(_PRE)}")
    allowed = (NORMAL, CONTROL, USER, UNUSED)
  elif kind == "llama":
    allowed = (NORMAL, UNKNOWN, CONTROL, UNUSED, BYTE)
    if len(scores) != len(pieces):
      raise refuse("scores", len(scores), f"are not those of {len(pieces)}")
  else:
    raise refuse("model", kind, "is neither gpt2 nor llama")
  if odd := [i for i, k in enumerate(kinds) if k not in allowed]:
    name = _KINDS.get(kinds[odd[0]], str(kinds[odd[0]]))
    raise refuse("token_type", name, f"of {pieces[odd[0]]!r} is not supported")
  if get("add_eos_token", False):
    raise refuse("add_eos_token", True, "would end each prompt")
  starts = kind == "llama" or pre == "llama-bpe"
  told = {"adds_bos": bool(get("add_bos_token", starts))}
  for end in ("bos", "eos"):
    if (token := get(f"{end}_token_id")) is not None:
      told[f"{end}_id"] = token
  if kind == "llama":
    pieces = [
      piece.replace("▁", " ") if k == NORMAL else piece
      for piece, k in zip(pieces, kinds, strict=True)
    ]
    prefix = bool(get("add_space_prefix", True))
    definition = _scored(pieces, scores, kinds, prefix=prefix, path=path)
  else:
    vocab = {piece: i for i, piece in enumerate(pieces)}
    if len(vocab) < len(pieces):
      raise refuse("tokens", len(pieces), "holds a token twice")
    merges = [tuple(merge.split(" ", 1)) for merge in table("merges", str)]
    if any(len(merge) != 2 for merge in merges):
      raise refuse("merges", len(merges), "holds one that is not a pair")
    definition = _definition(
      vocab,
      merges,
      added={
        i: k == CONTROL for i, k in enumerate(kinds) if k in (CONTROL, USER)
      },
      pre=_PRE[pre],
      decoder=_BYTE_LEVEL,
      ignore_merges=pre == "llama-bpe",
    )
  return HFTokenizer(definition, path, told)


def to_tokenizer_json(tokenizer: Tokenizer) -> bytes:
  """A tokenizer.json with exactly the ids of `encode`.

  Beside `tokenizer_config` in a folder, AutoTokenizer puts bos_id first if
  the tokenizer's `adds_bos` says so, and adds nothing otherwise.

  Raises:
    UserError: a SentencePiece model that has no equal there.
  """
  parts = json.loads(_definition_of(tokenizer))
  parts["truncation"] = parts["padding"] = parts["post_processor"] = None
  if tokenizer.adds_bos:
    name = _names(parts)[tokenizer.bos_id]

    def run(letter, type_id):
      return [
        {"SpecialToken": {"id": name, "type_id": type_id}},
        {"Sequence": {"id": letter, "type_id": type_id}},
      ]

    parts["post_processor"] = {
      "type": "TemplateProcessing",
      "single": run("A", 0),
      "pair": run("A", 0) + run("B", 1),
      "special_tokens": {
        name: {"id": name, "ids": [tokenizer.bos_id], "tokens": [name]}
      },
    }
  return json.dumps(parts, ensure_ascii=False, indent=1).encode()


def tokenizer_config(tokenizer: Tokenizer) -> dict[str, Any]:
  """What tokenizer_config.json holds beside `to_tokenizer_json`.

  Special tokens are not read from text, as with `encode`.
  """
  names = _names(json.loads(_definition_of(tokenizer)))
  bos = tokenizer.bos_id
  return {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "bos_token": None if bos is None else names[bos],
    "eos_token": names[tokenizer.eos_id],
    "add_bos_token": tokenizer.adds_bos,
    "add_eos_token": False,
    "clean_up_tokenization_spaces": False,
    "split_special_tokens": True,
  }


def special_ids(tokenizer: Tokenizer) -> dict[str, int | None]:
  """bos_token_id and eos_token_id, for configurations."""
  return {
    "bos_token_id": tokenizer.bos_id,
    "eos_token_id": tokenizer.eos_id,
  }


def _definition_of(tokenizer: Tokenizer) -> bytes:
  """A tokenizer.json of any of our kinds, without a post-processor of ours."""
  if isinstance(tokenizer, HFTokenizer):
    return tokenizer.definition
  if isinstance(tokenizer, ByteTokenizer):
    letters = _byte_letters()
    vocab = {letter: byte for byte, letter in enumerate(letters)}
    return _definition(
      vocab | {_END: tokenizer.eos_id},
      [],
      added={tokenizer.eos_id: True},
      pre=[{**_BYTE_LEVEL, "use_regex": False}],
      decoder=_BYTE_LEVEL,
    )
  if isinstance(tokenizer, SentencePieceTokenizer):
    pieces, scores, kinds = _sentencepiece(tokenizer)
    return _scored(pieces, scores, kinds, prefix=False, path="sentencepiece")
  raise TypeError(f"unknown tokenizer {tokenizer!r}")


def _names(parts: dict) -> dict[int, str]:
  """Tokens by id, of a parsed tokenizer.json."""
  names = {i: piece for piece, i in parts["model"]["vocab"].items()}
  return names | {t["id"]: t["content"] for t in parts["added_tokens"]}


def _byte_letters() -> list[str]:
  """The printable letter of each byte in byte-level BPE."""
  printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
  others = [byte for byte in range(256) if byte not in printable]
  return [
    chr(byte if byte in printable else 256 + others.index(byte))
    for byte in range(256)
  ]


def _sentencepiece(
  tokenizer: SentencePieceTokenizer,
) -> tuple[list[str], list[float], list[int]]:
  """Pieces (blanks as blanks), scores and kinds of a model like ours."""
  from sentencepiece import sentencepiece_model_pb2

  model = sentencepiece_model_pb2.ModelProto.FromString(tokenizer.definition)
  trainer, normalizer = model.trainer_spec, model.normalizer_spec
  pieces = [
    piece.piece.replace("▁", " ") if piece.type == NORMAL else piece.piece
    for piece in model.pieces
  ]
  kinds = [piece.type for piece in model.pieces]
  other = {
    "another model than BPE": trainer.model_type != trainer.BPE,
    "normalization": normalizer.precompiled_charsmap != b"",
    "a blank before each text": normalizer.add_dummy_prefix,
    "blanks taken away": normalizer.remove_extra_whitespaces,
    "blanks as suffixes": trainer.treat_whitespace_as_suffix,
    "blanks without U+2581": not normalizer.escape_whitespaces,
    "unused pieces": UNUSED in kinds,
    # They are cut out before all merging.
    "user-defined words": any(
      kind == USER and len(piece) > 1
      for piece, kind in zip(pieces, kinds, strict=True)
    ),
  }
  if found := [name for name, holds in other.items() if holds]:
    raise UserError(
      f"tokenizer=sentencepiece has {found[0]}, which cannot be exported with "
      "equal ids; train with a tokenizer that taperjax makes"
    )
  return pieces, [piece.score for piece in model.pieces], kinds


def to_gguf(tokenizer: Tokenizer, vocab_size: int) -> dict[str, Any]:
  """Metadata of GGUF with which llama.cpp gives the ids of `encode`.

  Byte-level BPE is its "gpt2", all else its "llama" (SentencePiece), which
  reads U+2581 in a text as a blank: texts with it have other ids there.

  Args:
    vocab_size: rows of the embedding; missing tokens are filled up.

  Raises:
    UserError: a tokenizer that llama.cpp has no equal of.
  """
  fields: dict[str, Any]
  if isinstance(tokenizer, HFTokenizer) and tokenizer._is_byte_level:
    fields = _byte_level_gguf(json.loads(tokenizer.definition))
  elif isinstance(tokenizer, HFTokenizer):
    fields = _merged_gguf(json.loads(tokenizer.definition))
  else:
    if isinstance(tokenizer, ByteTokenizer):
      pieces, scores = [*_BYTES, _END], [0.0] * 257
      kinds = [*[BYTE] * 256, CONTROL]
    else:
      pieces, scores, kinds = _sentencepiece(tokenizer)
      kinds = [NORMAL if kind == USER else kind for kind in kinds]
    fields = _scored_gguf(pieces, scores, kinds, prefix=False)
  tokens, kinds = fields["tokens"], fields["token_type"]
  for i in range(len(tokens), vocab_size):
    tokens.append(f"[PAD{i}]")
    kinds.append(UNUSED)
    if "scores" in fields:
      fields["scores"].append(0.0)
  # Without its own, llama.cpp takes some other token for the beginning.
  bos = tokenizer.eos_id if tokenizer.bos_id is None else tokenizer.bos_id
  fields |= {
    "bos_token_id": bos,
    "eos_token_id": tokenizer.eos_id,
    "add_bos_token": tokenizer.adds_bos,
    "add_eos_token": False,
  }
  return {f"tokenizer.ggml.{key}": value for key, value in fields.items()}


def _cannot(what: str) -> UserError:
  return UserError(
    f"tokenizer=huggingface has {what}, which GGUF cannot express here; export "
    "to another format"
  )


def _byte_level_gguf(parts: dict) -> dict[str, Any]:
  pre = _pre_steps(parts.get("pre_tokenizer"))
  names = [name for name, steps in _PRE.items() if _steps(steps) == pre]
  model = parts["model"]
  if parts.get("normalizer") is not None:
    raise _cannot("a normalizer")
  if model["type"] != "BPE" or not names:
    raise _cannot(f"another way of cutting text than {', '.join(_PRE)}")
  if model.get("ignore_merges", False) != (names[0] == "llama-bpe"):
    raise _cannot("another ignore_merges than llama.cpp has")
  tokens, kinds = _token_table(parts)
  merges = [m if isinstance(m, str) else " ".join(m) for m in model["merges"]]
  return {
    "model": "gpt2",
    "pre": names[0],
    "tokens": tokens,
    "token_type": kinds,
    "merges": merges,
  }


def _steps(steps: Sequence[dict]) -> list[dict]:
  """Steps of cutting text, with what does not matter for ids left out."""
  defaults = {"use_regex": True, "invert": False, "add_prefix_space": True}
  kept = {
    "ByteLevel": ("type", "add_prefix_space", "use_regex"),
    "Digits": ("type", "individual_digits"),
    "Split": ("type", "pattern", "behavior", "invert"),
  }
  return [
    {key: step.get(key, defaults.get(key)) for key in kept[step["type"]]}
    if step["type"] in kept
    else step
    for step in steps
  ]


def _pre_steps(pre: dict | None) -> list[dict]:
  if pre is None:
    return []
  return _steps(pre["pretokenizers"] if pre["type"] == "Sequence" else [pre])


def _token_table(parts: dict) -> tuple[list[str], list[int]]:
  """Tokens in the order of their ids, and their kinds; gaps are unused."""
  names = _names(parts)
  tokens = [names.get(i, f"[PAD{i}]") for i in range(max(names) + 1)]
  fallback = parts["model"].get("byte_fallback", False)
  kinds = [
    UNUSED
    if i not in names
    else BYTE
    if fallback and token in _BYTES
    else NORMAL
    for i, token in enumerate(tokens)
  ]
  for token in parts["added_tokens"]:
    kinds[token["id"]] = CONTROL if token["special"] else USER
  return tokens, kinds


def _merged_gguf(parts: dict) -> dict[str, Any]:
  """Of merges that SentencePiece's scores bring about."""
  model = parts["model"]
  blank, prefix = _blank(parts.get("normalizer"))
  if model["type"] != "BPE" or not model.get("byte_fallback"):
    raise _cannot("no BPE with byte fallback")
  if parts.get("pre_tokenizer") is not None:
    raise _cannot(f"a pre-tokenizer, {parts['pre_tokenizer']['type']}")
  tokens, kinds = _token_table(parts)
  if USER in kinds:
    raise _cannot(f"the added word {tokens[kinds.index(USER)]!r}")
  merges = [
    tuple(m.split(" ") if isinstance(m, str) else m) for m in model["merges"]
  ]
  rank = {}
  for left, right in merges:
    rank.setdefault(left + right, len(rank))
  scores = [-float(rank.get(token, len(rank))) for token in tokens]
  # Equal scores: which of the cuts of one piece is first does not matter.
  by_piece = sorted(merges, key=lambda m: (rank[m[0] + m[1]], len(m[0])))
  contiguous = sorted(merges, key=lambda m: rank[m[0] + m[1]]) == merges
  if not contiguous or by_piece != _merges_of(tokens, scores, kinds):
    raise _cannot("merges that no scores of pieces bring about")
  pieces = [
    token.replace(blank, " ") if kind == NORMAL else token
    for token, kind in zip(tokens, kinds, strict=True)
  ]
  return _scored_gguf(pieces, scores, kinds, prefix=prefix)


def _blank(normalizer: dict | None) -> tuple[str, bool]:
  """The blank in the pieces, and whether one is put before a text."""
  if normalizer is None:
    return " ", False
  if normalizer == {"type": "Prepend", "prepend": " "}:
    return " ", True
  steps = normalizer.get("normalizers", [normalizer])
  replace = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
  prepend = {"type": "Prepend", "prepend": "▁"}
  if steps in ([replace], [prepend, replace]):
    return "▁", len(steps) == 2
  raise _cannot(f"a normalizer, {normalizer['type']}")


def _scored_gguf(
  pieces: Sequence[str],
  scores: Sequence[float],
  kinds: Sequence[int],
  *,
  prefix: bool,
) -> dict[str, Any]:
  pieces, kinds = [*pieces], [*kinds]
  if " " not in pieces and "<0x20>" in pieces:
    # llama.cpp writes U+2581 for each blank of a text and falls back to the
    # three bytes of that, so the byte of a blank must be a piece.
    at = pieces.index("<0x20>")
    pieces[at], kinds[at] = " ", NORMAL
  tokens = [
    piece.replace(" ", "▁") if kind == NORMAL else piece
    for piece, kind in zip(pieces, kinds, strict=True)
  ]
  if len(set(tokens)) < len(tokens):
    raise _cannot("pieces with U+2581 beside those with blanks")
  if "<unk>" in tokens and kinds[tokens.index("<unk>")] == CONTROL:
    kinds[tokens.index("<unk>")] = UNKNOWN
  fields = {
    "model": "llama",
    "pre": "default",
    "tokens": tokens,
    "scores": [float(score) for score in scores],
    "token_type": kinds,
    "add_space_prefix": prefix,
  }
  if UNKNOWN in kinds:
    fields["unknown_token_id"] = kinds.index(UNKNOWN)
  return fields
