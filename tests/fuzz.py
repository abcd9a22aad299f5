"""Hostile files, thousands of them, and a table of what became of each.

    python -m tests.fuzz [--count 20000] [--seed 0] [--json FILE]
    python -m tests.fuzz --only FORMAT:NUMBER       one trial, with traceback

Valid files, tiny and real, are changed: bits, lengths, numbers and names, and
what they say of themselves, mostly so that the outer form stays whole ("header
passed"). Each must load, or be refused in one line. Anything else counts as a
fault, and so do a write outside of the target folder, code that runs from the
data, memory beyond a multiple of the file, and a word on standard error.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import functools
import io
import json
import math
import os
import pathlib
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
import typing
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from taperjax import (
  api,
  checkpoint,
  cli,
  config as config_lib,
  interop,
  saved,
)
from taperjax.data import text, tokenizer as tokenizer_lib, tokens
from taperjax.errors import UserError
from taperjax.interop import gguf_files, gpt2, hf_files, llama, llama2c
from tests import data_tokenizer_test, interop_import_test, tiny

MEMORY = 2**25  # bytes that a trial may take whatever the size of its file
MEMORY_FACTOR = 64  # and for each byte of the file
ADDRESSES = 2**34  # of the process; nothing of the size of a lie is reserved
LIMIT = 120  # seconds for a trial
LOADED, REFUSED = "loaded", "refused"
INTS = (
  0, 1, 2, 3, 7, 255, 2**15, 2**16, 2**24, 2**31 - 1, 2**31, 2**32 - 1, 2**32,
  2**40, 2**53, 2**63 - 1, 2**63, 2**64 - 1, 10**30, -1, -2, -(2**31), -(2**63),
)
NAMES = (
  "", "x", "../../x", "/etc/passwd", "a/b", "..", ".", "\0", "x\ny", "\x1b[2J",
  "\ud800", "\u202e", "a" * 300, "params", "__class__", "%s", "{0.__class__}",
)
VALUES = (
  None, True, False, *INTS, *NAMES, 0.5, -0.5, 1e-40, 1e38, 1e300, "1",
  float("nan"), float("inf"), float("-inf"), [], {}, [[]], [1, 2], {"a": 1},
  ["a", None], {"type": "x"},
)


# Changes of bytes, of JSON, and of lists of tensors.


def change_bytes(data: bytes, rng: random.Random) -> bytes:
  """A flipped bit, a cut, a copy, a hole, a number of another size."""
  data = bytearray(data)
  a, b = sorted(rng.randrange(len(data) + 1) for _ in range(2))
  b = min(b, a + rng.choice((1, 4, 8, 64, len(data))))
  kind = rng.randrange(8)
  if kind == 0:
    del data[a:]
  elif kind == 1:
    del data[a:b]
  elif kind == 2:
    data[a:a] = data[a:b]
  elif kind == 3:
    data[a:b] = bytes([rng.choice((0, 255, 10, 127))]) * (b - a)
  elif kind == 4:
    data += rng.randbytes(rng.choice((1, 4, 100)))
  elif kind == 5 and len(data) > 8:
    size = rng.choice((4, 8))
    a = rng.randrange(len(data) - size + 1)
    number = rng.choice(INTS) % 256**size
    data[a : a + size] = number.to_bytes(size, "little")
  else:
    for _ in range(rng.choice((1, 1, 3))):
      if data:
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
  return bytes(data)


def change_json(value: Any, rng: random.Random) -> Any:
  """The same with one node of the tree replaced, renamed, gone or doubled."""
  value = json.loads(json.dumps(value))
  nodes = []

  def walk(node):
    for key in node if isinstance(node, dict) else range(len(node)):
      nodes.append((node, key))
      if isinstance(node[key], dict | list):
        walk(node[key])

  if isinstance(value, dict | list):
    walk(value)
  if not nodes:
    return rng.choice(VALUES)
  parents = list({id(n): n for n, _ in nodes}.values())
  node = rng.choice(parents)
  key = rng.choice(list(node if isinstance(node, dict) else range(len(node))))
  kind, old = rng.randrange(8), node[key]
  if kind == 0:
    del node[key]
  elif kind == 1 and isinstance(node, dict):
    node[rng.choice((*NAMES, *node))] = node.pop(key)
  elif kind == 2 and isinstance(node, list):
    node.insert(rng.randrange(len(node) + 1), old)
  elif kind == 3 and isinstance(old, int | float):
    node[key] = rng.choice(
      (old + 1, old - 1, -old, 2 * old, old // 2, float(old), str(old))
    )
  elif kind == 4:
    other = rng.choice(nodes)
    with contextlib.suppress(LookupError):
      node[key] = json.loads(json.dumps(other[0][other[1]]))
  else:
    node[key] = rng.choice(VALUES)
  return value


def dump_json(value: Any, rng: random.Random) -> bytes:
  """As text; now and then with a key twice, or nested too deeply."""
  made = json.dumps(value)
  kind = rng.randrange(20)
  if kind == 0 and isinstance(value, dict) and value:
    name = json.dumps(rng.choice(list(value)))
    made = f"{{{name}: {json.dumps(rng.choice(VALUES))}, {made[1:]}"
  elif kind == 1:
    deep = "[" * 100_000 + "]" * 100_000
    made = made.replace("}", f', "deep": {deep}}}', 1) if value else deep
  return made.encode()


def change_json_file(path: pathlib.Path, rng: random.Random) -> None:
  value = json.loads(path.read_bytes())
  for _ in range(rng.choice((1, 1, 2))):
    value = change_json(value, rng)
  path.write_bytes(dump_json(value, rng))


@dataclasses.dataclass
class Tensor:
  """One of a file, as its header tells it."""

  name: str
  dtype: Any
  shape: list[int]
  data: bytes


def change_tensors(
  found: list[Tensor], dtypes: list, rng: random.Random
) -> list[Tensor]:
  """One tensor with another name, dtype, shape or content, gone or doubled."""
  found = [dataclasses.replace(t, shape=list(t.shape)) for t in found]
  i = rng.randrange(len(found))
  t, kind = found[i], rng.randrange(10)
  if kind == 0:
    del found[i]
  elif kind == 1:
    found.insert(rng.randrange(len(found)), dataclasses.replace(t))
  elif kind == 2:
    t.name = rng.choice((*NAMES, *(other.name for other in found)))
  elif kind == 3:
    t.dtype = rng.choice(dtypes)
  elif kind == 4:
    t.shape = rng.choice((
      [], [0], t.shape[::-1], [1, *t.shape], [*t.shape, 0], [2**32, 2**32],
      [2**62], [*t.shape, 1], [math.prod(t.shape)],
    ))
    if 0 in t.shape:
      t.data = b""
  elif kind == 5 and t.shape:
    t.shape[rng.randrange(len(t.shape))] = rng.choice(INTS)
  elif kind == 6:
    other = rng.choice(found)
    t.shape, t.data, t.dtype = list(other.shape), other.data, other.dtype
  else:
    numbers = bytearray(t.data)
    bad = np.array(
      [np.nan, np.inf, -np.inf, 1e38, 1e-45, -0.0], "<f4"
    ).tobytes()
    for _ in range(rng.choice((1, 3))):
      if len(numbers) >= 4:
        a = 4 * rng.randrange(len(numbers) // 4)
        b = 4 * rng.randrange(6)
        numbers[a : a + 4] = bad[b : b + 4]
    t.data = bytes(numbers)
  return found


# The formats: how valid files are made, changed and loaded.


@dataclasses.dataclass
class Format:
  """Attributes:
    share: of the trials, relative.
    make: writes folders of valid files into a folder.
    change: changes the files of one of them.
    passed: whether the outer form is sound.
    load: loads it, into the target if it writes; anything that is not loaded
      raises.
  """

  share: int
  make: Callable[[pathlib.Path], Any]
  change: Callable[[pathlib.Path, random.Random], Any]
  passed: Callable[[pathlib.Path], Any]
  load: Callable[[pathlib.Path, pathlib.Path], Any]


def some_file(folder: pathlib.Path, rng: random.Random, glob="*"):
  return rng.choice(sorted(p for p in folder.rglob(glob) if p.is_file()))


def flip(folder: pathlib.Path, rng: random.Random, glob="*") -> None:
  path = some_file(folder, rng, glob)
  path.write_bytes(change_bytes(path.read_bytes(), rng))


def plain(family=tiny.model_config, **changes):
  config = family(
    internal_norm="norm", final_norm="norm", num_layers=1, **changes
  )
  return config, tiny.params(config)


def make_hf(folder: pathlib.Path) -> None:
  config, params = plain(tied=False, biases=("q", "k", "v", "o"))
  tensors, fields = llama.to_hf(params, config)
  hf_files.write_folder(folder / "llama", tensors, fields, "float32")
  config, params = plain(tiny.gpt2_config)
  tensors, fields = gpt2.to_hf(params, config)
  hf_files.write_folder(folder / "gpt2", tensors, fields, "float16")
  config, params = plain()
  tensors, fields = llama.to_hf(params, config)
  parts = {
    "a.safetensors": dict(list(tensors.items())[::2]),
    "b.safetensors": dict(list(tensors.items())[1::2]),
  }
  for name, part in parts.items():
    hf_files.write_folder(folder / "shards", tensors, fields, "bfloat16")
    hf_files.bare.save(
      folder / "shards" / name, hf_files.bare.cast(part, "bfloat16"), "pt"
    )
  (folder / "shards" / hf_files.WEIGHTS).unlink()
  weight_map = {n: name for name, part in parts.items() for n in part}
  (folder / "shards" / hf_files.INDEX).write_text(
    json.dumps({"metadata": {}, "weight_map": weight_map})
  )


SAFETENSORS = [
  "F64", "F32", "F16", "BF16", "I64", "I32", "I8", "U8", "BOOL", "F8_E4M3",
  "U16", "F8_E8M0", "F4", "C64", "X", 1,
]


def read_safetensors(path: pathlib.Path) -> list[Tensor]:
  data = path.read_bytes()
  start = 8 + int.from_bytes(data[:8], "little")
  found = []
  for name, told in json.loads(data[8:start]).items():
    if name != "__metadata__":
      a, b = told["data_offsets"]
      part = data[start + a : start + b]
      found.append(Tensor(name, told["dtype"], told["shape"], part))
  return found


def write_safetensors(
  path: pathlib.Path, found: list[Tensor], rng: random.Random
) -> None:
  """A name may come twice, and the header may be changed once more."""
  lines, data = ['"__metadata__": {"format": "pt"}'], b""
  for t in found:
    told = {"dtype": t.dtype, "shape": t.shape,
            "data_offsets": [len(data), len(data) + len(t.data)]}
    if rng.randrange(60) == 0:
      told = change_json(told, rng)
    lines.append(f"{json.dumps(t.name)}: {json.dumps(told)}")
    data += t.data
  header = f"{{{', '.join(lines)}}}".encode()
  path.write_bytes(len(header).to_bytes(8, "little") + header + data)


def change_safetensors(folder: pathlib.Path, rng: random.Random) -> None:
  if rng.randrange(5) == 0:
    flip(folder, rng, "*.safetensors")
    return
  if rng.randrange(8) == 0 and (folder / hf_files.INDEX).exists():
    change_json_file(folder / hf_files.INDEX, rng)
    return
  path = some_file(folder, rng, "*.safetensors")
  found = read_safetensors(path)
  for _ in range(rng.choice((1, 1, 2))):
    found = change_tensors(found, SAFETENSORS, rng)
    if rng.randrange(3) == 0 and found:  # a dtype and a shape that agree
      t = rng.choice(found)
      t.dtype, size = rng.choice((("F16", 2), ("BF16", 2), ("U8", 1),
                                  ("BOOL", 1), ("F64", 8), ("I32", 4)))
      t.shape = [len(t.data) // size]
    found = found or [Tensor("x", "F32", [1], b"\0" * 4)]
  write_safetensors(path, found, rng)


def safetensors_open(folder: pathlib.Path) -> bool:
  import safetensors

  for path in folder.glob("*.safetensors"):
    safetensors.safe_open(path, framework="numpy")
  return True


def is_json(folder: pathlib.Path) -> bool:
  return isinstance(json.loads((folder / "config.json").read_bytes()), dict)


# Fields that are not in the files that we write, but are read.
FIELDS = {
  "rope_scaling": {"rope_type": "llama3", "factor": 8.0,
                   "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                   "original_max_position_embeddings": 8192},
  "rope_parameters": {"rope_type": "linear", "factor": 2.0},
  "sliding_window": 4, "layer_types": ["full_attention"], "use_mrope": False,
  "quantization_config": {"bits": 4}, "partial_rotary_factor": 1.0,
  "max_window_layers": 1, "use_sliding_window": True, "mlp_bias": False,
  "num_key_value_heads": 1, "n_inner": 20, "model_type": "qwen2",
  "layer_norm_epsilon": 1e12, "eos_token_id": [1, 2], "n_ctx": 13,
}


def change_fields(path: pathlib.Path, fields: dict, rng: random.Random) -> dict:
  """Perhaps one field more, and one or two changed, or what is in them."""
  value = json.loads(path.read_bytes())
  name = rng.choice(list(fields))
  if rng.randrange(3):
    value |= {name: fields[name]}
  for _ in range(rng.choice((1, 1, 2))):
    name = rng.choice(list(value))
    value |= change_json({name: value[name]}, rng)
  return value


def change_config(folder: pathlib.Path, rng: random.Random) -> None:
  path = folder / "config.json"
  if rng.randrange(8) == 0:
    flip(folder, rng, "config.json")
  else:
    path.write_bytes(dump_json(change_fields(path, FIELDS, rng), rng))


def load_import(folder: pathlib.Path, target: pathlib.Path) -> None:
  """What `taperjax import` reads; one of 50 is written too, and opened."""
  if folder.parent.name.isdecimal() and int(folder.parent.name) % 50:
    check_model(interop.read(folder))
    return
  with contextlib.redirect_stdout(io.StringIO()):
    cli.main(["import", str(folder), str(target), "--debug"])
  check_model(saved.load(target))


def check_model(model: saved.Model) -> None:
  """It is whole and finite, and its tokenizer works."""
  import jax

  leaves = jax.tree.leaves(model.params)
  assert len(leaves) > 5
  for leaf in (*leaves, model.c):
    assert np.asarray(leaf).dtype == np.float32
    assert np.isfinite(leaf).all(), "a number is not finite"
  hash(model.config)
  if model.tokenizer is not None:
    check_tokenizer(model.tokenizer)
    assert model.tokenizer.vocab_size <= model.config.vocab_size


def check_tokenizer(found: tokenizer_lib.Tokenizer) -> None:
  ids = found.encode_prompt("Once upon  a time\n é😀▁")
  assert all(0 <= i < found.vocab_size for i in ids)
  assert isinstance(found.decode(ids) + found.decode(ids, True), str)
  assert len(found.id_bytes()) == found.vocab_size


BYTES = tokenizer_lib.ByteTokenizer()


def make_gguf(folder: pathlib.Path) -> None:
  for name in ("bytes", "merges"):
    tokenizer, scaling = BYTES, None
    if name == "merges":
      definition = data_tokenizer_test.train_hf(byte_level=True)
      tokenizer = tokenizer_lib.HFTokenizer(definition)
      scaling = config_lib.RopeScaling("llama3", 8.0)
    config, params = plain(vocab_size=tokenizer.vocab_size, embed_dim=32,
                           mlp_dim=32, num_heads=4, num_kv_heads=2,
                           rope_scaling=scaling)
    (folder / name).mkdir()
    gguf_files.write(
      folder / name / "a.gguf", params, config, tokenizer, dtype="float32",
      name="x",
    )


# Ways to write a number: type of GGUF, and of numpy.
GGUF_KINDS = {
  0: "u1", 1: "i1", 2: "u2", 3: "i2", 4: "u4", 5: "i4", 6: "f4", 7: "u1",
  10: "u8", 11: "i8", 12: "f8",
}


def gguf_string(value: str) -> bytes:
  data = value.encode(errors="surrogatepass")
  return len(data).to_bytes(8, "little") + data


def gguf_value(rng: random.Random) -> bytes:
  """A type and a value of it, alone or in a list."""
  kind = rng.choice((8, 9, *GGUF_KINDS))
  if kind == 8:
    made = gguf_string(rng.choice(NAMES))
  elif kind == 9:
    inner, count = gguf_value(rng), rng.choice((0, 1, 1, 3, 2**20, 2**60))
    copies = min(count, 3)
    made = inner[:4] + count.to_bytes(8, "little") + inner[4:] * copies
  else:
    values = (*INTS, 0.5, float("nan"), float("inf"))
    number, dtype = rng.choice(values), GGUF_KINDS[kind]
    with np.errstate(all="ignore"):
      if dtype[0] == "f":
        made = np.float64(number).astype("<" + dtype).tobytes()
      else:
        size = int(dtype[1])
        number = int(number) if number == number and abs(number) < 1e31 else 0
        made = (number % 256**size).to_bytes(size, "little")
  return kind.to_bytes(4, "little") + made


def read_gguf(path: pathlib.Path) -> tuple[list[tuple], list[Tensor]]:
  """Keys with type and value as they lie there, and the tensors."""
  import gguf

  reader = gguf.GGUFReader(path)
  fields = [
    (f.name, b"".join(p.tobytes() for p in f.parts[2:]))
    for f in reader.fields.values()
    if not f.name.startswith("GGUF.")
  ]
  return fields, [
    Tensor(t.name, int(t.tensor_type), t.shape.tolist(), t.data.tobytes())
    for t in reader.tensors
  ]


def write_gguf(
  path: pathlib.Path,
  fields: list[tuple[str, bytes]],
  found: list[Tensor],
  counts: tuple[int, int] = (0, 0),
  share: bool = False,
) -> None:
  """With `counts` the numbers of both lie; `share` stores data only once."""
  little = lambda number, size: (number % 256**size).to_bytes(size, "little")
  made = b"GGUF" + little(3, 4)
  made += little(len(found) + counts[0], 8) + little(len(fields) + counts[1], 8)
  for name, value in fields:
    made += gguf_string(name) + value
  data, offsets = b"", {}
  for t in found:
    if not share or t.data not in offsets:
      offsets[t.data] = len(data)
      data += t.data + b"\0" * (-len(t.data) % 32)
    made += gguf_string(t.name) + little(len(t.shape), 4)
    made += b"".join(little(n, 8) for n in t.shape)
    made += little(t.dtype, 4) + little(offsets[t.data], 8)
  path.write_bytes(made + b"\0" * (-len(made) % 32) + data)


def change_gguf(folder: pathlib.Path, rng: random.Random) -> None:
  path = folder / "a.gguf"
  if rng.randrange(5) == 0:
    flip(folder, rng)
    return
  fields, found = read_gguf(path)
  for _ in range(rng.choice((1, 1, 2))):
    kind, i = rng.randrange(6), rng.randrange(len(fields))
    if kind == 0:
      del fields[i]
    elif kind == 1:
      fields.append(fields[i])
    elif kind == 2:
      names = ("general.alignment", "split.count", "llama.expert_count",
               "llama.rope.scaling.factor", "llama.rope.scale_linear",
               "tokenizer.ggml.add_space_prefix", *NAMES)
      fields.append((rng.choice(names), gguf_value(rng)))
    elif kind == 3:
      fields[i] = (fields[i][0], gguf_value(rng))
    elif kind == 4:
      # A number inside a value, of which the type stays.
      name, data = fields[i]
      fields[i] = (name, data[:4] + change_bytes(data[4:], rng))
    else:
      found = change_tensors(found, [*range(40)], rng)
      found = found or [Tensor("x", 0, [1], b"\0" * 4)]
  counts = (0, 0)
  if rng.randrange(20) == 0:
    counts = (rng.choice((1, -1, 2**60)), rng.choice((0, 1, -1, 2**60)))
  write_gguf(path, fields, found, counts, share=rng.randrange(20) == 0)


def gguf_open(folder: pathlib.Path) -> bool:
  import gguf

  gguf_files._open(gguf, folder / "a.gguf")
  return True


def make_llama2c(folder: pathlib.Path) -> None:
  for name, vocab in (("bare", 31), ("told", 264)):
    config, params = plain(vocab_size=vocab, tied=name == "told")
    (folder / name).mkdir()
    interop_import_test.write_llama2c(
      folder / name / "model.bin", config, params
    )
  pieces = ["<unk>", "\n<s>\n", "\n</s>\n"]
  pieces += [f"<0x{byte:02X}>" for byte in range(256)]
  pieces += [" ", "a", "b", "ab", " ab"]
  made = (7).to_bytes(4, "little")
  for i, piece in enumerate(pieces):
    score, data = np.float32(-i).tobytes(), piece.encode()
    made += score + len(data).to_bytes(4, "little") + data
  (folder / "told" / "tok.bin").write_bytes(made)


def change_llama2c(folder: pathlib.Path, rng: random.Random) -> None:
  path, kind = folder / "model.bin", rng.randrange(8)
  data = path.read_bytes()
  head = np.frombuffer(data[:28], "<i4").astype(np.int64)
  if kind == 0:
    flip(folder, rng)
  elif kind == 1 and (folder / "tok.bin").exists():
    flip(folder, rng, "tok.bin")
  elif kind < 5:  # numbers of the weights
    weights = Tensor("x", "f4", [], data[28:])
    while weights.data == data[28:]:
      [weights, *_] = change_tensors([weights, weights], ["f4"], rng)
      weights.data = weights.data or data[28:]
    path.write_bytes(data[:28] + weights.data)
  else:
    values = (*INTS, *range(1, 9), 16, 24, 264)
    for _ in range(rng.choice((1, 1, 2))):
      head[rng.randrange(7)] = (rng.choice(values) + 2**31) % 2**32 - 2**31
    header = dict(zip(llama2c._HEADER, head.tolist(), strict=True))
    rest = data[28:]
    if rng.randrange(6):  # and a file of the size that it asks for
      with contextlib.suppress(ZeroDivisionError):
        shapes = llama2c._shapes(header).values()
        size = 4 * sum(map(math.prod, shapes))
        if 0 <= size < 2**17:
          rest = (rest * (size // len(rest) + 1))[:size]
    path.write_bytes(head.astype("<i4").tobytes() + rest)


def llama2c_open(folder: pathlib.Path) -> bool:
  path = folder / "model.bin"
  llama2c._header(path, path.read_bytes()[:28])
  return True


def make_tokenizers(folder: pathlib.Path) -> None:
  for name in ("bytes", "blocks"):
    config, params = plain(vocab_size=320)
    hf_files.write_folder(
      folder / name, *llama.to_hf(params, config), "float32"
    )
    made = data_tokenizer_test.train_hf(byte_level=name == "bytes")
    (folder / name / "tokenizer.json").write_bytes(made)
    end = "<|endoftext|>" if name == "bytes" else "</s>"
    for path, fields in (
      ("tokenizer_config", {"eos_token": {"content": end}, "bos_token": None}),
      ("generation_config", {"eos_token_id": [1, 0], "bos_token_id": 1}),
    ):
      (folder / name / f"{path}.json").write_text(json.dumps(fields))


TOKENIZER_PARTS = {
  "normalizer": [
    {"type": "Lowercase"}, {"type": "Prepend", "prepend": "▁"},
    {"type": "Precompiled", "precompiled_charsmap": "AAAA"},
    {"type": "Replace", "pattern": {"Regex": "(a*)*b"}, "content": "x"},
  ],
  "pre_tokenizer": [
    {"type": "Whitespace"}, {"type": "Metaspace", "replacement": "▁",
                             "prepend_scheme": "always"},
    {"type": "Split", "pattern": {"Regex": "(?<=a)b|("}, "invert": False,
     "behavior": "Isolated"},
  ],
  "post_processor": [
    {"type": "TemplateProcessing", "single": [
      {"SpecialToken": {"id": "x", "type_id": 0}},
      {"Sequence": {"id": "A", "type_id": 0}}], "pair": [],
     "special_tokens": {"x": {"id": "x", "ids": [0], "tokens": ["x"]}}},
    {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": False},
  ],
  "decoder": [
    {"type": "WordPiece", "prefix": "##", "cleanup": True},
    {"type": "Metaspace", "replacement": "▁", "add_prefix_space": True},
    {"type": "Sequence", "decoders": [
      {"type": "ByteFallback"}, {"type": "Fuse"},
      {"type": "Strip", "content": " ", "start": 1, "stop": 0}]},
    {"type": "BPEDecoder", "suffix": "</w>"},
  ],
  "truncation": [{"max_length": 1, "strategy": "LongestFirst", "stride": 9}],
  "padding": [{"strategy": {"Fixed": 2**40}, "direction": "Right",
               "pad_id": 0, "pad_type_id": 0, "pad_token": "x"}],
  "model": [{"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"},
            {"type": "Unigram", "vocab": [["a", 0.0]], "unk_id": 0},
            {"type": "BPE", "vocab": {}, "merges": []}],
}


def change_tokenizer(folder: pathlib.Path, rng: random.Random) -> None:
  kind = rng.randrange(8)
  if kind == 0:
    flip(folder, rng, "tokenizer.json")
  elif kind < 3:
    path = some_file(folder, rng, "*_config.json")
    path.write_bytes(dump_json(change_fields(path, {
      "bos_token": "<s>", "eos_token_id": 1, "bos_token_id": [0],
      "add_bos_token": True,
    }, rng), rng))
  else:
    path = folder / "tokenizer.json"
    value = json.loads(path.read_bytes())
    for _ in range(rng.choice((1, 1, 2))):
      name = rng.choice([n for n in TOKENIZER_PARTS if n in value])
      if rng.randrange(2):
        value[name] = rng.choice(TOKENIZER_PARTS[name])
      elif value[name] is not None and rng.randrange(2):
        value |= change_json({name: value[name]}, rng)
      vocab = value.get("model")
      vocab = vocab.get("vocab") if isinstance(vocab, dict) else None
      if isinstance(vocab, dict) and rng.randrange(4) == 0:
        vocab[rng.choice(NAMES[:6])] = rng.choice(INTS[:9])
      if rng.randrange(4) == 0:
        value["added_tokens"].append({
          "id": rng.choice(INTS[:9]), "content": rng.choice(NAMES[:12]),
          **dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized",
                           "special"), rng.choice((True, False))),
        })
    path.write_bytes(dump_json(value, rng))


def tokenizer_open(folder: pathlib.Path) -> bool:
  import tokenizers

  data = (folder / "tokenizer.json").read_bytes()
  return bool(tokenizers.Tokenizer.from_buffer(data))


def make_saved_tokenizers(folder: pathlib.Path) -> None:
  from taperjax.data import corpus

  stories = corpus.generate_stories(50, seed=0)
  for name, made in (
    ("bytes", BYTES),
    ("pieces", tokenizer_lib.train_sentencepiece(stories, 320)),
    ("hf", tokenizer_lib.HFTokenizer(data_tokenizer_test.train_hf(True))),
  ):
    made.save(folder / name)


def change_saved_tokenizer(folder: pathlib.Path, rng: random.Random) -> None:
  """The note agrees with the definition, or nothing would be read."""
  import hashlib

  info = folder / tokenizer_lib.INFO
  told = json.loads(info.read_bytes())
  model = folder / told["model"]
  if rng.randrange(4) == 0:
    change_json_file(info, rng)
    return
  data = model.read_bytes()
  if model.suffix == ".json":
    data = dump_json(change_json(json.loads(data), rng), rng)
  else:
    data = change_bytes(data, rng)
  model.write_bytes(data)
  salted = told["kind"].encode() + b"\0" + data
  told["fingerprint"] = hashlib.sha256(salted).hexdigest()
  info.write_text(json.dumps(told))


def saved_tokenizer_open(folder: pathlib.Path) -> bool:
  info = json.loads((folder / tokenizer_lib.INFO).read_bytes())
  return {"kind", "model", "fingerprint"} <= info.keys()


def make_checkpoints(folder: pathlib.Path) -> None:
  for name, changes in (
    ("tapered", {}), ("folded", {"final_norm": "none", "tied": False}),
    ("stacked", {"scan_layers": True}),
  ):
    config = tiny.model_config(num_layers=1, vocab_size=257, **changes)
    meta = {
      "model": config_lib.to_dict(config), "step": 3, "gate": 0.0, "seed": 0,
      "scale_target": 0.0, "commit": None, "versions": {},
      "source": {"format": "x", "files": {}}, "data_hashes": {},
    }
    write_checkpoint(folder / name, tiny.params(config), tiny.c(config), meta)
    BYTES.save(folder / name / "tokenizer")


def write_checkpoint(folder: pathlib.Path, params, c, meta: Any) -> None:
  with contextlib.closing(checkpoint.Checkpoints(folder)) as found:
    found.save(3, {"params": params, "taper": {"c": c}}, meta)


def change_record(folder: pathlib.Path, rng: random.Random) -> None:
  """Its sum is made anew, as somebody would who means it."""
  [path] = (folder / "3" / "record").glob("metadata")
  record = json.loads(path.read_bytes())
  del record["sha256"]
  for _ in range(rng.choice((1, 1, 2))):
    name = rng.choice(("meta", "meta", "arrays", "all"))
    if name == "all" or name not in record:
      record = change_json(record, rng)
    elif name == "meta" and rng.randrange(2) and "model" in record["meta"]:
      record["meta"]["model"] = change_json(record["meta"]["model"], rng)
    else:
      record[name] = change_json(record[name], rng)
    if not isinstance(record, dict) or not isinstance(
      record.get("meta"), dict
    ):
      break
  if isinstance(record, dict):
    record = {**record, "sha256": checkpoint._record_sum(record)}
  path.write_text(json.dumps(record))


DTYPES = ["float32", "float16", "int32", "uint8", "bool", "bfloat16",
          "complex64", "float64"]


def change_checkpoint(folder: pathlib.Path, rng: random.Random) -> None:
  """Files as they lie there; what orbax says of an array; other arrays."""
  import tensorstore

  kind = rng.randrange(4)
  if kind == 0:
    flip(folder, rng)
  elif kind == 1:
    flip(folder / "3" / "state", rng)
  elif kind == 2:  # orbax's own notes, in its key-value store
    where = folder / "3" / "state" / rng.choice(("", "ocdbt.process_0"))
    store = tensorstore.KvStore.open(
      {"driver": "ocdbt", "base": f"file://{where}/"}
    ).result()
    key = rng.choice(store.list().result())
    data = bytes(store.read(key).result().value)
    if key.endswith(b".zarray"):
      data = dump_json(change_json(json.loads(data), rng), rng)
    else:
      data = change_bytes(data, rng)
    store.write(key, data).result()
  else:
    change_arrays(folder, rng)


def change_arrays(folder: pathlib.Path, rng: random.Random) -> None:
  """Other arrays under a record that tells them, as our writer would."""
  import jax

  step, tree, meta = checkpoint.load_arrays(folder, 3, ())
  found = [
    Tensor(name, a.dtype.name, list(a.shape), a.tobytes())
    for name, a in checkpoint._flatten(tree).items()
  ]
  found = change_tensors(found, DTYPES, rng)
  arrays = {}
  for t in found:
    dtype = np.dtype(jax.numpy.dtype(t.dtype))
    size = len(t.data) // dtype.itemsize
    array = np.frombuffer(t.data[: size * dtype.itemsize], dtype)
    if math.prod(t.shape) == size:
      array = array.reshape(t.shape)
    arrays[t.name.replace("\0", "")] = array
  with contextlib.suppress(Exception):  # what cannot be written
    state = {"params": {}, "taper": {}}
    for name, array in arrays.items():
      *parents, last = name.split("/")
      node = state
      for parent in parents:
        node = node.setdefault(parent, {})
      node[last] = array
    shutil.rmtree(folder / "3")
    with contextlib.closing(checkpoint.Checkpoints(folder)) as writer:
      writer.save(step, state, meta)


def record_open(folder: pathlib.Path) -> bool:
  checkpoint.Checkpoints(folder, read_only=True).meta(3)
  return True


def load_checkpoint(folder: pathlib.Path, target: pathlib.Path) -> None:
  check_model(api.load(folder))


def make_tokens(folder: pathlib.Path) -> None:
  (folder / "a.txt").write_text("Once upon a time. " * 9)
  for name in ("a", "b"):
    tokens.prepare(folder / "a.txt", BYTES, folder / name, name="x",
                   log=lambda _: None)
  (folder / "a.txt").unlink()


def change_tokens(folder: pathlib.Path, rng: random.Random) -> None:
  """The sum and the count are made anew where the ids change."""
  import hashlib

  path = folder / "x.json"
  meta = json.loads(path.read_bytes())
  if rng.randrange(2):
    data = change_bytes((folder / "x.bin").read_bytes(), rng)
    (folder / "x.bin").write_bytes(data)
    meta["tokens_sha256"] = hashlib.sha256(data).hexdigest()
    meta["num_tokens"] = len(data) // 2
  if rng.randrange(2):
    meta["dtype"] = rng.choice(("O", "u2", "uint8", "<u4", "f4", "U4", "V8"))
    size = (folder / "x.bin").stat().st_size
    with contextlib.suppress(TypeError, ZeroDivisionError):
      meta["num_tokens"] = size // np.dtype(meta["dtype"]).itemsize
  else:
    meta = change_json(meta, rng)
  path.write_bytes(dump_json(meta, rng))


def tokens_open(folder: pathlib.Path) -> bool:
  return json.loads((folder / "x.json").read_bytes())["format"] == 1


def load_tokens(folder: pathlib.Path, target: pathlib.Path) -> None:
  found, reason = tokens.open_tokens(folder, "x")
  if found is None:  # a line, and they are made anew
    raise UserError(f"tokens: {reason}")
  assert found.tokens.dtype in ("uint16", "uint32")
  assert int(found.tokens[:].sum(dtype=np.int64)) >= 0
  assert all(isinstance(v, str) for v in found.hashes.values())


def make_texts(folder: pathlib.Path) -> None:
  import pyarrow
  import pyarrow.parquet

  lines = [f"Story {i} of a cat. é" * 3 for i in range(20)]
  table = pyarrow.table({"text": lines, "n": list(range(20))})
  for kind in ("parquet", "jsonl", "arrow", "txt"):
    (folder / kind).mkdir()
  for i, compression in enumerate(("snappy", "none", "zstd")):
    pyarrow.parquet.write_table(
      table, folder / "parquet" / f"{i}.parquet", compression=compression,
      use_dictionary=i != 1,
    )
  with pyarrow.ipc.new_stream(folder / "arrow" / "a.arrow", table.schema) as f:
    f.write_table(table)
  objects = [json.dumps({"text": line}) for line in lines]
  (folder / "jsonl" / "a.jsonl").write_text("\n".join(objects))
  (folder / "txt" / "a.txt").write_text("<|endoftext|>".join(lines))


def change_text(folder: pathlib.Path, rng: random.Random) -> None:
  path = some_file(folder, rng)
  if path.suffix == ".jsonl" and rng.randrange(3):
    lines = path.read_text().splitlines()
    i = rng.randrange(len(lines))
    value = change_json(json.loads(lines[i]), rng)
    data = b"\n".join(
      dump_json(value, rng) if j == i else line.encode()
      for j, line in enumerate(lines)
    )
    path.write_bytes(data)
  else:
    path.write_bytes(change_bytes(path.read_bytes(), rng))


def text_open(folder: pathlib.Path) -> bool:
  import pyarrow.parquet

  for path in folder.iterdir():
    if path.suffix == ".parquet":
      pyarrow.parquet.ParquetFile(path).close()
    elif path.suffix == ".arrow":
      with pyarrow.memory_map(str(path)) as file:
        pyarrow.ipc.open_stream(file)
    else:
      path.read_text()
  return True


def load_text(folder: pathlib.Path, target: pathlib.Path) -> None:
  assert all(isinstance(t, str) for t in text.iter_documents(folder))


def load_tokenizer(folder: pathlib.Path, target: pathlib.Path) -> None:
  check_tokenizer(tokenizer_lib.load_tokenizer(folder))


FORMATS = {
  "safetensors": Format(
    20, make_hf, change_safetensors, safetensors_open, load_import
  ),
  "config.json": Format(15, make_hf, change_config, is_json, load_import),
  "GGUF": Format(18, make_gguf, change_gguf, gguf_open, load_import),
  "llama2.c": Format(
    10, make_llama2c, change_llama2c, llama2c_open, load_import
  ),
  "tokenizer.json": Format(
    15, make_tokenizers, change_tokenizer, tokenizer_open, load_import
  ),
  "saved tokenizer": Format(
    5, make_saved_tokenizers, change_saved_tokenizer, saved_tokenizer_open,
    load_tokenizer,
  ),
  "checkpoint record": Format(
    5, make_checkpoints, change_record, record_open, load_checkpoint
  ),
  "checkpoint arrays": Format(
    4, make_checkpoints, change_checkpoint, record_open, load_checkpoint
  ),
  "token file": Format(4, make_tokens, change_tokens, tokens_open, load_tokens),
  "text": Format(4, make_texts, change_text, text_open, load_text),
}


# What is watched while a file is loaded.

_WRITES = {
  "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.link", "os.symlink",
  "os.truncate", "os.chmod", "os.chown", "shutil.rmtree", "shutil.move",
  "shutil.copyfile", "shutil.copytree",
}
_CODE = {
  "pickle.find_class", "os.system", "os.exec", "os.posix_spawn", "os.spawn",
  "os.fork", "subprocess.Popen", "ctypes.dlopen", "socket.connect",
  "code.__new__",
}


class Watch:
  """Python's own audit events: what is opened to write, and what is run."""

  def __init__(self):
    self.target: str | None = None  # nothing is watched without one
    self.faults: list[str] = []
    sys.addaudithook(self)

  def __call__(self, event: str, args: tuple) -> None:
    if self.target is None:
      return
    if event == "open":
      path, _, flags = args
      if isinstance(path, int) or not flags & (
        os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
      ):
        return
      self._inside(event, path)
    elif event in _WRITES:
      for path in args[:2]:
        self._inside(event, path)
    elif event in _CODE:
      self.faults.append(f"{event} {args!r:.100}")
    elif event == "exec":
      # A module that is imported late comes from a file, typing evaluates
      # our annotations, dataclasses of ours come from a text; data does not.
      source, caller = args[0].co_filename, sys._getframe(1).f_code.co_filename
      ours = source.endswith(".py") and not source.startswith(self.root)
      if not ours and caller not in (typing.__file__, dataclasses.__file__):
        self.faults.append(f"exec of {source} by {caller}")

  def _inside(self, event: str, path: Any) -> None:
    if isinstance(path, str | bytes | os.PathLike):
      real = os.path.realpath(os.fsdecode(path))
      if f"{real}/".startswith(f"{self.target}/") or real == os.devnull:
        return
      self.faults.append(f"{event} writes {real}")

  @contextlib.contextmanager
  def over(self, folder: pathlib.Path, target: pathlib.Path):
    self.root, self.faults = os.path.realpath(folder), []
    self.target = os.path.realpath(target)
    try:
      yield
    finally:
      self.target = None


def memory(name: str) -> int:
  """A number of bytes from /proc: VmRSS now, VmHWM at most."""
  with open("/proc/self/status") as file:
    for line in file:
      if line.startswith(name + ":"):
        return 1024 * int(line.split()[1])
  raise KeyError(name)


def names_in(root: pathlib.Path, *but: pathlib.Path) -> set[str]:
  found = set()
  for folder, folders, files in os.walk(root):
    folders[:] = [f for f in folders if pathlib.Path(folder, f) not in but]
    found |= {os.path.join(folder, name) for name in (*folders, *files)}
  return found


def trial(
  name: str, number: int, seed: int, root: pathlib.Path, watch: Watch
) -> tuple[bool, str, int]:
  """(header passed, outcome, bytes of memory) of one changed file."""
  rng = random.Random(f"{seed} {name} {number}")
  case = FORMATS[name]
  valid = root / "valid" / name
  here = root / "trials" / f"{number:06d}"
  source, target = here / "source", here / "target"
  here.mkdir(parents=True)
  variants = sorted(path for path in valid.iterdir() if path.is_dir())
  shutil.copytree(rng.choice(variants), source)
  try:
    case.change(source, rng)
    size = sum(p.stat().st_size for p in source.rglob("*") if p.is_file())
    passed = False
    with contextlib.suppress(BaseException):
      passed = bool(case.passed(source))
    before = names_in(root, root / "valid", target)
    said = os.fstat(2).st_size
    pathlib.Path("/proc/self/clear_refs").write_text("5")
    start = memory("VmRSS")
    outcome = LOADED
    with watch.over(root, target):
      try:
        case.load(source, target)
      except UserError as error:
        outcome = REFUSED
        line = str(error)
        if not line.isprintable() or not 20 < len(line) < 4_000:
          outcome = f"no line: {line!r:.300}"
      except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
          raise
        traceback.print_exc()
        outcome = f"{type(error).__name__}: {error!s:.300}"
    used = memory("VmHWM") - start
    if watch.faults:
      outcome = watch.faults[0]
    elif names_in(root, root / "valid", target) != before:
      outcome = "a file outside of the target"
    elif used > MEMORY + MEMORY_FACTOR * size:
      outcome = f"{used:,} bytes of memory for a file of {size:,}"
    elif outcome in (LOADED, REFUSED) and os.fstat(2).st_size > said:
      outcome = "a word on standard error"
    return passed, outcome, used
  finally:
    shutil.rmtree(here, ignore_errors=True)


def plan(count: int) -> list[tuple[str, int]]:
  """(format, number) of each trial."""
  total = sum(case.share for case in FORMATS.values())
  found = []
  for name, case in FORMATS.items():
    share = -(-count * case.share // total)
    found += [(name, i) for i in range(share)]
  return found


def make(root: pathlib.Path) -> None:
  for name, case in FORMATS.items():
    folder = root / "valid" / name
    folder.mkdir(parents=True)
    case.make(folder)


def forked(function: Callable, *args) -> int:
  """The number of a process that calls it and ends."""
  sys.stdout.flush()
  number = os.fork()
  if number:
    return number
  code = 1
  try:
    function(*args)
    code = 0
  except BaseException:
    traceback.print_exc()
  os._exit(code)


def work(
  trials: list[tuple[str, int]], seed: int, root: pathlib.Path, pipe: int
) -> None:
  """Runs trials and tells of each, before and after, in lines of JSON."""
  log = os.open(root / "log", os.O_CREAT | os.O_APPEND | os.O_WRONLY)
  os.dup2(log, 1)
  os.dup2(log, 2)
  resource.setrlimit(resource.RLIMIT_AS, (ADDRESSES, ADDRESSES))
  warnings.simplefilter("error")
  saved.commit = lambda: None  # asks git
  watch = Watch()
  for name in dict.fromkeys(name for name, _ in trials):
    for valid in sorted((root / "valid" / name).iterdir()):
      if valid.is_dir():  # as it is, it loads, and so do the libraries
        target = root / "warm"
        FORMATS[name].load(valid, target)
        shutil.rmtree(target, ignore_errors=True)
  for name, number in trials:
    os.write(pipe, (json.dumps([name, number]) + "\n").encode())
    found = trial(name, number, seed, root, watch)
    os.write(pipe, (json.dumps(found) + "\n").encode())


def run(count: int, seed: int, root: pathlib.Path) -> Iterator[tuple]:
  """(format, number, header passed, outcome, memory) of every trial."""
  if os.waitstatus_to_exitcode(os.waitpid(forked(make, root), 0)[1]):
    raise RuntimeError("no valid files")
  left = plan(count)
  while left:
    read, write = os.pipe()
    number = forked(work, left, seed, root, write)
    os.close(write)
    now = None
    stop = functools.partial(os.kill, number, signal.SIGKILL)
    with os.fdopen(read) as lines:
      signal.signal(signal.SIGALRM, lambda *_, stop=stop: stop())
      signal.alarm(4 * LIMIT)
      for line in lines:
        signal.alarm(LIMIT)
        told = json.loads(line)
        if len(told) == 2:
          now = tuple(told)
          continue
        left.pop(0)
        yield (*now, *told)
        now = None
      signal.alarm(0)
    status = os.waitstatus_to_exitcode(os.waitpid(number, 0)[1])
    if status and now is None:
      log = (root / "log").read_text(errors="replace")
      raise RuntimeError(f"the trials ended with {status}: {log[-2000:]}")
    if now:  # it took the process with it
      left.pop(0)
      yield (*now, False, f"the process ended with {status}", 0)


def table(found: list[tuple]) -> list[str]:
  """Rows of Markdown."""
  rows: dict[str, collections.Counter] = {}
  for name, _, passed, outcome, _ in found:
    kind = outcome if outcome in (LOADED, REFUSED) else "fault"
    for row in (name, "all"):
      counter = rows.setdefault(row, collections.Counter())
      counter.update(["tried", kind, *(["passed"] if passed else [])])
  rows["all"] = rows.pop("all")
  lines = [
    "| format | tried | header passed | loaded | refused in one line | "
    "anything else |",
    "| --- | --- | --- | --- | --- | --- |",
  ]
  for name, row in rows.items():
    cells = (f"{row[k]:,}" for k in ("tried", "passed", LOADED, REFUSED,
                                     "fault"))
    lines.append(f"| {name} | " + " | ".join(cells) + " |")
  return lines


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
  parser.add_argument("--count", type=int, default=20_000)
  parser.add_argument("--seed", type=int, default=0)
  parser.add_argument("--json", metavar="FILE")
  parser.add_argument("--only", metavar="FORMAT:NUMBER")
  args = parser.parse_args()
  found, start = [], time.monotonic()
  with tempfile.TemporaryDirectory() as folder:
    root = pathlib.Path(folder).resolve()
    if args.only:
      name, _, number = args.only.rpartition(":")
      make(root)
      warnings.simplefilter("error")
      print(trial(name, int(number), args.seed, root, Watch()))
      return
    for row in run(args.count, args.seed, root):
      found.append(row)
      if row[3] not in (LOADED, REFUSED):
        print(f"{row[0]}:{row[1]} {row[3]}", file=sys.stderr, flush=True)
      if len(found) % 1_000 == 0:
        print(f"{len(found):,} tried", file=sys.stderr, flush=True)
  print("\n".join(table(found)))
  most = max(row[4] for row in found)
  print(f"\n{time.monotonic() - start:.0f} s; most memory of a trial: "
        f"{most / 1e6:.1f} MB")
  if args.json:
    pathlib.Path(args.json).write_text(json.dumps(found))
  passed = sum(row[2] for row in found) / len(found)
  faults = any(row[3] not in (LOADED, REFUSED) for row in found)
  sys.exit(faults or passed < 0.3)


if __name__ == "__main__":
  main()
