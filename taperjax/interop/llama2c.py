"""llama2.c checkpoints, version 0: 7 int32, then float32 matrices (out, in).

    dim, hidden_dim, n_layers, n_heads, n_kv_heads, vocab_size, seq_len
    embedding (V, D); attention gains (N, D); wq wk wv wo (N, ...); MLP gains
    (N, D); w1 gate, w2 down, w3 up (N, ...); final gain (D,); cos and sin
    tables (seq_len, K / 2) each; head (V, D) where vocab_size is negative

Little-endian, no padding. Rotary turns neighbouring pairs there; ours turns
the halves of a head, so the rows of wq and wk change places.
"""

from __future__ import annotations

import math
import os
import pathlib
from typing import Any, BinaryIO

import numpy as np

from taperjax import saved
from taperjax.config import ModelConfig
from taperjax.data import tokenizer as tokenizer_lib
from taperjax.errors import UserError
from taperjax.interop import hf_files, llama, tokenizer_files

_HEADER = (
  "dim", "hidden_dim", "n_layers", "n_heads", "n_kv_heads", "vocab_size",
  "seq_len",
)
_VERSIONED = int.from_bytes(b"24ka", "little")  # begins versions 1 and 2


def read(
  path: str | os.PathLike[str],
  *,
  tokenizer: str | os.PathLike[str] | None = None,
  context_len: int | None = None,
) -> saved.Model:
  """A model from a checkpoint of llama2.c.

  Args:
    path: the .bin file.
    tokenizer: its tokenizer, a .bin of llama2.c or what `load_tokenizer`
      reads; by default the only tok*.bin beside the checkpoint, if there is
      one.
    context_len: a shorter context than seq_len.

  Raises:
    UserError: no such checkpoint, another version of it, or a size that is not
      the one its header asks for.
  """
  path = pathlib.Path(path)
  try:
    with path.open("rb") as file:
      header = _header(path, file.read(4 * len(_HEADER)))
      config = _config(header, context_len)
      params = _params(path, file, config, header)
  except OSError as error:
    raise UserError(
      f"{path} cannot be read ({error.strerror}); give a readable file"
    ) from error
  files = {path.name: hf_files.sha256(path)}
  found = None
  if (where := _tokenizer_path(path, tokenizer)) is not None:
    if where.suffix == ".bin":
      found = tokenizer_files.from_llama2c(where, config.vocab_size)
    else:
      found = tokenizer_lib.load_tokenizer(where)
    if where.is_file():
      files[where.name] = hf_files.sha256(where)
  source = {
    "format": "llama2.c version 0",
    "files": files,
    "path": str(path.resolve()),
    "dtype": "float32",
  }
  c_S = np.zeros(2 * config.num_layers + 1, np.float32)
  return saved.Model(
    params, config, c_S, gate=1.0, tokenizer=found, meta={"source": source}
  )


def tokenizers_in(folder: pathlib.Path) -> list[pathlib.Path]:
  """Files that are tokenizers of llama2.c by their names."""
  return sorted(folder.glob("tok*.bin"))


def _tokenizer_path(path: pathlib.Path, told) -> pathlib.Path | None:
  if told is not None:
    return pathlib.Path(told)
  there = [other for other in tokenizers_in(path.parent) if other != path]
  if len(there) > 1:
    raise UserError(
      f"{path.parent} holds several tokenizers, "
      f"{', '.join(other.name for other in there)}; choose one with --tokenizer"
    )
  return there[0] if there else None


def _header(path: pathlib.Path, head: bytes) -> dict[str, int]:
  """The seven numbers, plausible and of the size of the file."""
  if head[:4] == b"PK\x03\x04" or head[:1] == b"\x80" and head[2:3] == b"}":
    raise UserError(
      f"{path} is a pickle of torch, which is never opened; convert the "
      "weights to safetensors"
    )
  if len(head) < 4 * len(_HEADER):
    raise UserError(
      f"{path} is too short for a llama2.c checkpoint; fetch it again"
    )
  values = np.frombuffer(head, "<i4").tolist()
  if values[0] == _VERSIONED:
    raise UserError(
      f"{path} is a llama2.c checkpoint of version {values[1]}; only version 0 "
      "is understood: export it anew with --version 0"
    )
  header = dict(zip(_HEADER, values, strict=True))
  told = ", ".join(f"{name}={value}" for name, value in header.items())
  heads, kv_heads = header["n_heads"], header["n_kv_heads"]
  sizes = {**header, "vocab_size": abs(header["vocab_size"])}
  sound = min(sizes.values()) > 0
  sound = sound and header["dim"] % heads == 0 and heads % kv_heads == 0
  if not sound or header["dim"] // heads % 2:
    raise UserError(
      f"{path} is no llama2.c checkpoint of version 0: its header would be "
      f"{told}"
    )
  numbers = sum(math.prod(shape) for shape in _shapes(header).values())
  size = 4 * (len(_HEADER) + numbers)
  if path.stat().st_size != size:
    raise UserError(
      f"{path} has {path.stat().st_size:,} bytes, against {size:,} by its "
      f"header ({told}); fetch it again"
    )
  return header


def _shapes(header: dict[str, int]) -> dict[str, tuple[int, ...]]:
  """Every tensor in the order of the file."""
  d, f, n = (header[name] for name in ("dim", "hidden_dim", "n_layers"))
  k = d // header["n_heads"]
  kv = header["n_kv_heads"] * k
  v = abs(header["vocab_size"])
  shapes = {
    "embed": (v, d),
    "attn_norm": (n, d),
    "q": (n, d, d),
    "k": (n, kv, d),
    "v": (n, kv, d),
    "o": (n, d, d),
    "mlp_norm": (n, d),
    "gate": (n, f, d),
    "down": (n, d, f),
    "up": (n, f, d),
    "final_norm": (d,),
    "cos": (header["seq_len"], k // 2),
    "sin": (header["seq_len"], k // 2),
  }
  return shapes if header["vocab_size"] > 0 else shapes | {"head": (v, d)}


def _config(header: dict[str, int], context_len: int | None) -> ModelConfig:
  """eps and theta are constants of llama2.c's run.c."""
  head_dim = header["dim"] // header["n_heads"]
  return ModelConfig(
    num_layers=header["n_layers"],
    embed_dim=header["dim"],
    num_heads=header["n_heads"],
    num_kv_heads=header["n_kv_heads"],
    head_dim=head_dim,
    mlp_dim=header["hidden_dim"],
    mlp="swiglu",
    positions="rope",
    rope_theta=10_000.0,
    rotary_dim=head_dim,
    norm_eps=1e-5,
    biases=(),
    tied=header["vocab_size"] > 0,
    init_std=0.02,
    scan_layers=False,
    norm="rms",
    internal_norm="norm",
    final_norm="norm",
    vocab_size=abs(header["vocab_size"]),
    context_len=llama.shorter_context(header["seq_len"], context_len),
    compute_dtype="float32",
  )


def _params(
  path: pathlib.Path,
  file: BinaryIO,
  config: ModelConfig,
  header: dict[str, int],
) -> dict[str, Any]:
  """Our parameters from what follows the header."""
  d, k = config.embed_dim, config.head_dim
  heads = {"q": config.num_heads, "k": config.num_kv_heads}
  heads["v"] = config.num_kv_heads
  params: dict[str, Any] = {"embed": {}, "final_norm": {}}
  blocks = [{"attn": {}, "mlp": {}} for _ in range(config.num_layers)]
  for name, shape in _shapes(header).items():
    value = np.frombuffer(file.read(4 * math.prod(shape)), "<f4")
    value = value.reshape(shape).astype(np.float32)
    if not np.isfinite(value).all():
      raise UserError(
        f"{path}: tensor {name!r} holds numbers that are not finite; fetch the "
        "file again"
      )
    if name == "embed":
      params["embed"]["embedding"] = value
    elif name == "final_norm":
      params["final_norm"]["scale"] = value
    elif name == "head":
      params["head"] = {"kernel": np.ascontiguousarray(value.T)}
    elif name not in ("cos", "sin"):  # made again from theta
      for block, w in zip(blocks, value, strict=True):
        if name.endswith("norm"):
          block[name] = {"scale": w.copy()}
          continue
        if name in ("q", "k"):
          w = llama.halves(w, heads[name])
        w = w.T
        if name in heads:
          w = w.reshape(d, heads[name], k)
        elif name == "o":
          w = w.reshape(config.num_heads, k, d)
        part = "attn" if name in "qkvo" else "mlp"
        block[part][name] = {"kernel": np.ascontiguousarray(w)}
  return params | {f"block_{n}": block for n, block in enumerate(blocks)}
