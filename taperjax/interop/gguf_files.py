"""GGUF files of the llama architecture, as llama.cpp reads and writes them.

Its rotary embedding turns neighbouring coordinates (0, 1), (2, 3), ... of a
head, ours the halves, so rows of q and k change places on the way.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from taperjax import attention
from taperjax.config import ModelConfig, RopeScaling
from taperjax.data.tokenizer import Tokenizer
from taperjax.errors import UserError
from taperjax.interop import hf_files, llama, tokenizer_files
from taperjax.saved import Model

# Metadata that decides nothing, or that `read` honours.
_KNOWN = {
  "block_count",
  "context_length",
  "embedding_length",
  "feed_forward_length",
  "vocab_size",
  "attention.head_count",
  "attention.head_count_kv",
  "attention.key_length",
  "attention.value_length",
  "attention.layer_norm_rms_epsilon",
  "rope.dimension_count",
  "rope.freq_base",
  "rope.scale_linear",
  "rope.scaling.factor",
  "rope.scaling.finetuned",
  "rope.scaling.original_context_length",
  "rope.scaling.type",
}
_DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
_FILE_TYPES = {
  "float32": "ALL_F32",
  "float16": "MOSTLY_F16",
  "bfloat16": "MOSTLY_BF16",
}


def _gguf():
  try:
    import gguf
  except ImportError as error:
    raise UserError(
      "GGUF files need the package gguf; pip install 'taperjax[export]'"
    ) from error
  return gguf


def read(
  path: str | os.PathLike, *, context_len: int | None = None
) -> Model:
  """A GGUF file of the llama architecture; quantised weights are expanded.

  Args:
    context_len: at most the file's, which it is unless told.

  Raises:
    UserError: a damaged file, another architecture, or metadata or a tensor
      that this reader does not honour.
  """
  gguf = _gguf()
  path = pathlib.Path(path)
  metadata, found = _open(gguf, path)
  config = _config(metadata, found, context_len, path)
  tensors = {}
  for name, tensor in found.items():
    try:
      with np.errstate(all="ignore"):  # what is not finite is told below
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
    except (NotImplementedError, ValueError) as error:
      raise UserError(
        f"{path}: tensor {name} of type {tensor.tensor_type.name} cannot be "
        f"expanded ({error}); give a file of another type"
      ) from error
    tensors[name] = np.asarray(values, np.float32)
    if not np.isfinite(tensors[name]).all():
      raise UserError(
        f"{path}: tensor {name} holds numbers that are not finite; fetch the "
        "file again"
      )
  params = _params(tensors, config, path)
  tokenizer = tokenizer_files.from_gguf(metadata, path)
  if tokenizer.vocab_size != config.vocab_size:
    raise UserError(
      f"{path}: {tokenizer.vocab_size} tokens for {config.vocab_size} rows of "
      "token_embd.weight; give a file in which they agree"
    )
  types = sorted({tensor.tensor_type.name for tensor in found.values()})
  source = {
    "format": "gguf",
    "files": {path.name: hf_files.sha256(path)},
    "path": str(path.resolve()),
    "dtype": ",".join(types),
  }
  return Model(
    params=params,
    config=config,
    c=np.zeros(2 * config.num_layers + 1, np.float32),
    gate=1.0,
    tokenizer=tokenizer,
    meta={"source": source},
  )


def _open(gguf, path: pathlib.Path) -> tuple[dict[str, Any], dict[str, Any]]:
  """Metadata as plain Python, and the tensors of gguf, both by name."""

  class Reader(gguf.GGUFReader):
    def _get(self, offset, dtype, count=1, override_order=None):
      # The library reads less past the end, and counts on without one.
      size = np.dtype(dtype).itemsize * int(count)
      if int(offset) + size > len(self.data):
        raise ValueError("it ends too early")
      return super()._get(offset, dtype, count, override_order)

  if not path.is_file():
    raise UserError(f"{path} is not a file; give a GGUF file")
  try:
    with np.errstate(over="ignore"):  # of offsets
      reader = Reader(path)
    # Else a small file could ask for any amount of memory.
    if sum(tensor.n_bytes for tensor in reader.tensors) > len(reader.data):
      raise ValueError("its tensors overlap")
    metadata = {
      name: field.contents()
      for name, field in reader.fields.items()
      if not name.startswith("GGUF.")
    }
  except Exception as error:  # the library raises many kinds
    reason = " ".join(str(error).split()) or type(error).__name__
    raise UserError(
      f"{path} is no GGUF file, or damaged ({reason}); fetch it again"
    ) from error
  return metadata, {tensor.name: tensor for tensor in reader.tensors}


def _config(
  metadata: Mapping[str, Any],
  found: Mapping[str, Any],
  context_len: int | None,
  path: pathlib.Path,
) -> ModelConfig:
  def refuse(key: str, rule: str) -> UserError:
    return UserError(
      f"{path}: {key}={metadata.get(key)!r} {rule}; give another file"
    )

  if metadata.get("general.architecture") != "llama":
    raise refuse("general.architecture", "is not llama")
  if metadata.get("split.count", 1) != 1:
    raise refuse("split.count", "is only a part; join the parts first")
  fields = {
    key.removeprefix("llama."): value
    for key, value in metadata.items()
    if key.startswith("llama.")
  }
  for key, value in fields.items():
    # Some writers name what the model does not have.
    if key not in _KNOWN and value not in (0, False):
      raise refuse(f"llama.{key}", "is not supported")

  def number(key: str, kind, default=None, least=2**-126):
    value = fields.get(key, default)
    low, high = (1, 2**31) if kind is int else (least, 2**127)
    if type(value) is not kind or not low <= value < high:
      rule = "of 1 or more" if least == 1 else "above 0"
      raise refuse(
        f"llama.{key}", f"must be one {kind.__name__} {rule} of 32 bits"
      )
    return value

  layers = number("block_count", int)
  if layers > len(found):  # before any list of so many
    raise refuse("llama.block_count", f"is more than {len(found)} tensors")
  width = number("embedding_length", int)
  heads = number("attention.head_count", int)
  head_dim = number("attention.key_length", int, width // heads)
  for key in ("attention.value_length", "rope.dimension_count"):
    if number(key, int, head_dim) != head_dim:
      raise refuse(f"llama.{key}", f"is not the head size {head_dim}")
  kv_heads = number("attention.head_count_kv", int, heads)
  if heads % kv_heads:
    raise refuse("llama.attention.head_count_kv", f"does not divide {heads}")
  if head_dim % 2:
    raise refuse("llama.attention.key_length", "must be even")
  longest = number("context_length", int)
  context_len = llama.shorter_context(longest, context_len)
  if "token_embd.weight" not in found:
    raise UserError(f"{path} has no tensor token_embd.weight; fetch it again")
  if len(shape := found["token_embd.weight"].shape) != 2:
    raise UserError(
      f"{path}: tensor token_embd.weight has {len(shape)} dimensions in place "
      "of 2; fetch it again"
    )
  rows = int(shape[-1])
  if fields.get("vocab_size", rows) != rows:
    raise refuse(
      "llama.vocab_size", f"is not the {rows} rows of token_embd.weight"
    )
  names = {"q": "attn_q", "k": "attn_k", "v": "attn_v"}
  biases = [b for b, name in names.items() if f"blk.0.{name}.bias" in found]
  theta = number("rope.freq_base", float, 10_000.0, least=1)
  return ModelConfig(
    num_layers=layers,
    embed_dim=width,
    num_heads=heads,
    num_kv_heads=kv_heads,
    head_dim=head_dim,
    mlp_dim=number("feed_forward_length", int),
    mlp="swiglu",
    positions="rope",
    rope_theta=theta,
    rotary_dim=head_dim,
    norm_eps=number("attention.layer_norm_rms_epsilon", float),
    biases=tuple(biases),
    tied="output.weight" not in found,
    init_std=0.02,
    scan_layers=False,
    norm="rms",
    internal_norm="norm",
    final_norm="norm",
    vocab_size=rows,
    context_len=context_len,
    compute_dtype="float32",
    rope_scaling=_scaling(fields, found, theta, head_dim, path),
  )


def _scaling(
  fields: Mapping[str, Any],
  found: Mapping[str, Any],
  theta: float,
  head_dim: int,
  path: pathlib.Path,
) -> RopeScaling | None:
  # As in llama.cpp, a factor without a type is that of linear scaling.
  kind = fields.get("rope.scaling.type", "linear")
  factor = fields.get("rope.scaling.factor", 1.0)
  if "rope.scale_linear" in fields:  # of older files
    kind, factor = "linear", fields["rope.scale_linear"]
  if kind not in ("none", "linear"):
    raise UserError(
      f"{path}: llama.rope.scaling.type={kind!r} is neither none nor linear; "
      "give a file of a model without it"
    )
  linear = None
  if kind == "linear":
    if type(factor) is not float or not 1 <= factor < 2**127:
      raise UserError(
        f"{path}: llama.rope.scaling.factor={factor!r} must be a number of 1 "
        "or more that float32 holds; give another file"
      )
    linear = RopeScaling("linear", factor) if factor != 1.0 else None
  if "rope_freqs.weight" not in found:
    return linear
  # Llama 3.1 and later: what each frequency is divided by. The file does not
  # keep the rule, which has had these bounds in all released models.
  divisor_R = np.asarray(found["rope_freqs.weight"].data)
  sound = linear is None and divisor_R.dtype == np.float32
  sound = sound and divisor_R.shape == (head_dim // 2,)
  if sound:
    scaling = RopeScaling("llama3", float(np.max(divisor_R)))
    want_R = _divisors(theta, head_dim, scaling)
    sound = scaling.factor >= 1 and np.allclose(divisor_R, want_R, rtol=2e-6)
  if not sound:
    raise UserError(
      f"{path}: tensor rope_freqs.weight is not the llama3 scaling with bounds "
      "1 and 4 and original context 8192; give a file of a model without it"
    )
  return scaling


def _divisors(theta: float, head_dim: int, scaling: RopeScaling) -> np.ndarray:
  """What llama3 scaling divides each frequency by, float32 (R,)."""
  plain_R = np.asarray(attention.frequencies(theta, head_dim), np.float64)
  slow_R = attention.frequencies(theta, head_dim, scaling)
  return (plain_R / np.asarray(slow_R, np.float64)).astype(np.float32)


def _shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
  """Shapes of all tensors, (out, in), by name, but rope_freqs."""
  width, hidden = config.embed_dim, config.mlp_dim
  queries = config.num_heads * config.head_dim
  keys = config.num_kv_heads * config.head_dim
  shapes = {
    "token_embd.weight": (config.vocab_size, width),
    "output_norm.weight": (width,),
  }
  if not config.tied:
    shapes["output.weight"] = (config.vocab_size, width)
  for n in range(config.num_layers):
    block = {
      "attn_norm.weight": (width,),
      "attn_q.weight": (queries, width),
      "attn_k.weight": (keys, width),
      "attn_v.weight": (keys, width),
      "attn_output.weight": (width, queries),
      "ffn_norm.weight": (width,),
      "ffn_gate.weight": (hidden, width),
      "ffn_up.weight": (hidden, width),
      "ffn_down.weight": (width, hidden),
    }
    for name in config.biases:
      block[f"attn_{name}.bias"] = block[f"attn_{name}.weight"][:1]
    shapes |= {f"blk.{n}.{name}": shape for name, shape in block.items()}
  return shapes


def _params(
  tensors: dict[str, np.ndarray], config: ModelConfig, path: pathlib.Path
) -> dict:
  """Our parameters; every tensor is used, and none is missing."""
  shapes = _shapes(config)
  tensors.pop("rope_freqs.weight", None)
  for name, shape in shapes.items():
    if name not in tensors:
      raise UserError(f"{path} has no tensor {name}; fetch it again")
    if tensors[name].shape != shape:
      raise UserError(
        f"{path}: tensor {name} has shape {tensors[name].shape}, but the "
        f"metadata asks for {shape}; fetch it again"
      )
  if unknown := sorted(tensors.keys() - shapes.keys()):
    raise UserError(
      f"{path}: tensor {unknown[0]} is not part of a plain Llama; give a file "
      "without it"
    )
  width, size = config.embed_dim, config.head_dim
  heads = {
    "q": config.num_heads,
    "k": config.num_kv_heads,
    "v": config.num_kv_heads,
  }

  def projection(prefix: str, name: str) -> dict:
    rows = tensors[f"{prefix}.attn_{name}.weight"]
    if turned := name in ("q", "k"):
      rows = llama.halves(rows, heads[name])
    shape = (width, heads[name], size)
    found = {"kernel": np.ascontiguousarray(rows.T).reshape(shape)}
    if name in config.biases:
      bias = tensors[f"{prefix}.attn_{name}.bias"]
      bias = llama.halves(bias, heads[name]) if turned else bias
      found["bias"] = bias.reshape(heads[name], size)
    return found

  def kernel(name: str) -> dict:
    return {"kernel": np.ascontiguousarray(tensors[name].T)}

  params = {
    "embed": {"embedding": tensors["token_embd.weight"]},
    "final_norm": {"scale": tensors["output_norm.weight"]},
  }
  if not config.tied:
    params["head"] = kernel("output.weight")
  for n in range(config.num_layers):
    prefix = f"blk.{n}"
    out = kernel(f"{prefix}.attn_output.weight")["kernel"]
    params[f"block_{n}"] = {
      "attn_norm": {"scale": tensors[f"{prefix}.attn_norm.weight"]},
      "attn": {
        **{name: projection(prefix, name) for name in heads},
        "o": {"kernel": out.reshape(config.num_heads, size, width)},
      },
      "mlp_norm": {"scale": tensors[f"{prefix}.ffn_norm.weight"]},
      "mlp": {
        name: kernel(f"{prefix}.ffn_{name}.weight")
        for name in ("gate", "up", "down")
      },
    }
  return params


def _pairs(rows: np.ndarray, heads: int) -> np.ndarray:
  """The inverse of `llama.halves`."""
  split = rows.reshape(heads, 2, -1, *rows.shape[1:])
  return split.swapaxes(1, 2).reshape(rows.shape)


def write(
  path: str | os.PathLike,
  params: dict,
  config: ModelConfig,
  tokenizer: Tokenizer | None,
  *,
  dtype: str,
  name: str,
) -> None:
  """Writes a model with plain RMSNorms as a GGUF of the llama architecture.

  llama.cpp takes any eps above 0 and any width: of the forms of `stock` it
  gives our logits within 3e-5 in float32, an eps of 2^40 included (seen with
  llama-cpp-python 0.3.36 on the CPU, 600 positions).

  Args:
    dtype: of the matrices: "float32", "float16" or "bfloat16"; gains are
      float32.
    name: the model's name in the metadata.

  Raises:
    UserError: a model that the architecture cannot hold, or one without a
      tokenizer; weights beyond the dtype, or a file that cannot be written.
  """
  gguf = _gguf()
  _check_writable(config, tokenizer, dtype)
  path = pathlib.Path(path)
  kind = gguf.GGMLQuantizationType[_DTYPES[dtype]]
  tensors = _tensors(params, config)
  tokens = tokenizer_files.to_gguf(tokenizer, config.vocab_size)
  part = path.with_name(f"{path.name}.part-{os.getpid()}")
  writer = gguf.GGUFWriter(None, "llama")
  writer.add_name(name)
  writer.add_file_type(gguf.LlamaFileType[_FILE_TYPES[dtype]])
  writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
  writer.add_vocab_size(config.vocab_size)
  writer.add_context_length(config.context_len)
  writer.add_embedding_length(config.embed_dim)
  writer.add_block_count(config.num_layers)
  writer.add_feed_forward_length(config.mlp_dim)
  writer.add_head_count(config.num_heads)
  writer.add_head_count_kv(config.num_kv_heads)
  writer.add_key_length(config.head_dim)
  writer.add_value_length(config.head_dim)
  writer.add_layer_norm_rms_eps(config.norm_eps)
  writer.add_rope_dimension_count(config.head_dim)
  writer.add_rope_freq_base(config.rope_theta)
  if config.rope_scaling and config.rope_scaling.kind == "linear":
    writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
    writer.add_rope_scaling_factor(config.rope_scaling.factor)
  for key, value in tokens.items():
    _add(writer, key, value)
  for tensor_name, array in tensors.items():
    stored, raw = array, None
    if array.ndim == 2 and dtype == "float16":
      with np.errstate(over="ignore"):
        stored = array.astype(np.float16)
      if not np.isfinite(stored).all():
        raise UserError(
          f"dtype=float16: {tensor_name} is beyond 65504; use bfloat16 "
          "or float32"
        )
    elif array.ndim == 2 and dtype == "bfloat16":
      stored, raw = gguf.quants.quantize(array, kind), kind
    writer.add_tensor(tensor_name, stored, raw_dtype=raw)
  try:
    writer.write_header_to_file(part)
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    part.replace(path)
  except OSError as error:
    raise UserError(
      f"{path} cannot be written ({error.strerror}); choose a folder with room"
    ) from error
  finally:
    writer.close()
    with contextlib.suppress(OSError):
      part.unlink(missing_ok=True)


def _add(writer, key: str, value: Any) -> None:
  if isinstance(value, bool):
    writer.add_bool(key, value)
  elif isinstance(value, int):
    writer.add_uint32(key, value)
  elif isinstance(value, str):
    writer.add_string(key, value)
  else:
    writer.add_array(key, value)


def _check_writable(
  config: ModelConfig, tokenizer: Tokenizer | None, dtype: str
) -> None:
  def check(field: str, value, holds: bool, rule: str) -> None:
    if not holds:
      raise UserError(
        f"{field}={value!r}: GGUF of the llama architecture needs {rule}; "
        "export to another format"
      )

  if dtype not in _DTYPES:
    raise UserError(
      f"dtype={dtype!r} is not one of {', '.join(_DTYPES)}; use one of these"
    )
  plain = config.internal_norm == config.final_norm == "norm"
  modes = (config.internal_norm, config.final_norm)
  check("norm", config.norm, config.norm == "rms", "RMSNorm")
  check("norms", modes, plain, "a norm at each site")
  check("mlp", config.mlp, config.mlp == "swiglu", "swiglu")
  rope = config.positions == "rope"
  check("positions", config.positions, rope, "rotary positions")
  whole = config.rotary_dim == config.head_dim
  check("rotary_dim", config.rotary_dim, whole, "the whole head to turn")
  check("biases", config.biases, not config.biases, "no biases")
  scaling = config.rope_scaling
  if scaling and scaling.kind == "llama3":
    known = RopeScaling("llama3", scaling.factor)
    check("rope_scaling", scaling, scaling == known, "bounds 1, 4 and 8192")
  if tokenizer is None:
    raise UserError(
      "tokenizer=None: a GGUF file holds the tokenizer, and this model has "
      "none; keep tokenizer/ with the checkpoints, or import with --tokenizer"
    )
  if tokenizer.vocab_size > config.vocab_size:
    raise UserError(
      f"tokenizer with vocabulary {tokenizer.vocab_size} is larger than the "
      f"model's {config.vocab_size}; use the model's own tokenizer"
    )


def _tensors(params: dict, config: ModelConfig) -> dict[str, np.ndarray]:
  """All tensors, (out, in), float32, in the order of llama.cpp."""
  array = lambda x: np.asarray(x, np.float32)
  width = config.embed_dim

  def rows(projection: dict, heads: int = 0) -> np.ndarray:
    kernel = array(projection["kernel"]).reshape(width, -1).T
    return _pairs(kernel, heads) if heads else kernel

  tensors = {
    "token_embd.weight": array(params["embed"]["embedding"]),
    "output_norm.weight": array(params["final_norm"]["scale"]),
  }
  if not config.tied:
    tensors["output.weight"] = rows(params["head"])
  if config.rope_scaling and config.rope_scaling.kind == "llama3":
    tensors["rope_freqs.weight"] = _divisors(
      config.rope_theta, config.head_dim, config.rope_scaling
    )
  for n in range(config.num_layers):
    block = params[f"block_{n}"]
    attn, mlp = block["attn"], block["mlp"]
    found = {
      "attn_norm": array(block["attn_norm"]["scale"]),
      "attn_q": rows(attn["q"], config.num_heads),
      "attn_k": rows(attn["k"], config.num_kv_heads),
      "attn_v": rows(attn["v"]),
      "attn_output": array(attn["o"]["kernel"]).reshape(-1, width).T,
      "ffn_norm": array(block["mlp_norm"]["scale"]),
      "ffn_gate": rows(mlp["gate"]),
      "ffn_up": rows(mlp["up"]),
      "ffn_down": array(mlp["down"]["kernel"]).T,
    }
    tensors |= {f"blk.{n}.{name}.weight": x for name, x in found.items()}
  return {name: np.ascontiguousarray(x) for name, x in tensors.items()}
