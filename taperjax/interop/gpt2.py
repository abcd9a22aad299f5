"""GPT-2 layout, both ways: Hugging Face tensors and config, and our models.

LayerNorm, learned positions, GELU. Tensor names are those of transformers'
GPT2LMHeadModel, `transformer.h.0.attn.c_attn.weight` and so on; its matrices
are stored (in, out), q, k and v side by side.
"""

from __future__ import annotations

import math
import os
import pathlib
import re
from typing import Any

import numpy as np

from taperjax import model as model_lib
from taperjax.config import BIASES, ModelConfig
from taperjax.errors import UserError
from taperjax.interop import hf_files, llama
from taperjax.saved import Model

# An eps beside which no variance counts: files of models without norms.
HUGE_EPS = 1e6

_SIZES = ("vocab_size", "n_positions", "n_embd", "n_layer", "n_head")
_ACTIVATIONS = {
  "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu"
}
# Fields that must have one value, which is also that of a missing field.
_FIXED = {
  "scale_attn_weights": True,
  "scale_attn_by_inverse_layer_idx": False,
  "add_cross_attention": False,
  "is_encoder_decoder": False,
}
_READ = {
  *_SIZES, "n_ctx", "n_inner", "activation_function",
  "layer_norm_epsilon", "tie_word_embeddings", "initializer_range",
  "model_type",
}


def full_heads(
  params: dict, config: ModelConfig
) -> tuple[dict, ModelConfig]:
  """The same model with keys and values written out for every query head."""
  times = config.num_heads // config.num_kv_heads
  if times == 1:
    return params, config
  params = dict(params)
  for n in range(config.num_layers):
    block = dict(params[f"block_{n}"])
    attn = dict(block["attn"])
    for name in "kv":
      attn[name] = {
        k: np.repeat(np.asarray(x), times, axis=-2)
        for k, x in attn[name].items()
      }
    params[f"block_{n}"] = {**block, "attn": attn}
  return params, config.replace(num_kv_heads=config.num_heads)


def notes(config: ModelConfig) -> list[str]:
  """What `to_hf` writes that the model does not have."""
  found = []
  missing = [n for n in ("q", "k", "v", "o", "up", "down")
             if n not in config.biases]
  if missing:
    found.append(f"biases of {', '.join(missing)} are written as zeros")
  if config.num_kv_heads != config.num_heads:
    found.append("grouped keys and values are written out for every head")
  return found


def to_hf(
  params: dict, config: ModelConfig
) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
  """Tensors and config.json of GPT2LMHeadModel for a model with real norms.

  The class has every bias but that of the head: those the model lacks are
  zeros, see `notes`. Token ids in the config are left to the caller.

  Returns:
    (tensors, hf_config): float32, contiguous.

  Raises:
    UserError: the layout does not hold this model.
  """
  _check_layout(config)
  params, config = model_lib.unstack_layers(params, config)
  params, config = full_heads(params, config)
  d = config.embed_dim
  tensors = {}

  def put(name, x, prefix="transformer."):
    tensors[prefix + name] = np.ascontiguousarray(x, np.float32)

  def norm(name, tree):
    put(f"{name}.weight", tree["scale"])
    put(f"{name}.bias", tree["bias"])

  def linear(name, trees, rows, columns):
    kernels = [np.reshape(tree["kernel"], (rows, columns)) for tree in trees]
    biases = [np.reshape(tree.get("bias", np.zeros(columns)), columns)
              for tree in trees]
    put(f"{name}.weight", np.concatenate(kernels, axis=1))
    put(f"{name}.bias", np.concatenate(biases))

  put("wte.weight", params["embed"]["embedding"])
  put("wpe.weight", params["position_embed"]["embedding"])
  for n in range(config.num_layers):
    block, name = params[f"block_{n}"], f"h.{n}"
    attn, mlp = block["attn"], block["mlp"]
    norm(f"{name}.ln_1", block["attn_norm"])
    linear(f"{name}.attn.c_attn", [attn[k] for k in "qkv"], d, d)
    linear(f"{name}.attn.c_proj", [attn["o"]], d, d)
    norm(f"{name}.ln_2", block["mlp_norm"])
    linear(f"{name}.mlp.c_fc", [mlp["up"]], d, config.mlp_dim)
    linear(f"{name}.mlp.c_proj", [mlp["down"]], config.mlp_dim, d)
  norm("ln_f", params["final_norm"])
  if not config.tied:
    put(hf_files.HEAD, np.transpose(params["head"]["kernel"]), prefix="")
  return tensors, {
    "architectures": ["GPT2LMHeadModel"],
    "model_type": "gpt2",
    "vocab_size": config.vocab_size,
    "n_positions": config.context_len,
    "n_ctx": config.context_len,
    "n_embd": d,
    "n_layer": config.num_layers,
    "n_head": config.num_heads,
    "n_inner": config.mlp_dim,
    "activation_function": "gelu" if config.mlp == "gelu" else "gelu_new",
    "layer_norm_epsilon": config.norm_eps,
    "tie_word_embeddings": config.tied,
    "initializer_range": config.init_std,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "reorder_and_upcast_attn": False,
    "add_cross_attention": False,
  }


def _check_layout(config: ModelConfig) -> None:
  """Raises UserError where GPT-2's layout does not hold the model."""
  remedy = "export with --remote-code, or to stablehlo or safetensors"
  for name, good in (
    ("norm", ("layer",)),
    ("positions", ("learned",)),
    ("mlp", ("gelu_tanh", "gelu")),
    ("internal_norm", ("norm",)),
    ("final_norm", ("norm",)),
  ):
    value = getattr(config, name)
    if value not in good:
      raise UserError(
        f"{name}={value}: the GPT-2 layout has {' or '.join(good)}; {remedy}"
      )
  if "head" in config.biases:
    raise UserError(
      "biases names 'head': the GPT-2 layout has no bias at the head; "
      f"{remedy}"
    )
  if config.num_heads * config.head_dim != config.embed_dim:
    raise UserError(
      f"head_dim={config.head_dim}: in the GPT-2 layout num_heads="
      f"{config.num_heads} times head_dim is embed_dim={config.embed_dim}; "
      f"{remedy}"
    )


def read(
  folder: str | os.PathLike[str], *, context_len: int | None = None
) -> Model:
  """A model from a local Hugging Face folder; see `from_tensors`.

  Raises:
    UserError: as `hf_files.read_folder` and `from_tensors`.
  """
  hf_config, tensors, files = hf_files.read_folder(folder)
  model = from_tensors(hf_config, tensors, context_len=context_len)
  source = {
    "format": "gpt2",
    "files": files,
    "path": str(pathlib.Path(folder).resolve()),
    "dtype": hf_files.stored_dtype(folder),
  }
  return model.replace(meta={"source": source | model.meta["source"]})


def from_tensors(
  hf_config: dict[str, Any],
  tensors: dict[str, np.ndarray],
  *,
  context_len: int | None = None,
) -> Model:
  """A model from the tensors and the config of a GPT-2 layout.

  Taken as they come: prefixes `transformer.` and `_orig_mod.`, matrices (in,
  out) or (out, in), stored causal masks (left out), biases that no layer has.
  A file with a huge eps is a model without norms: it becomes a tapered one at
  gate 0 with c = 1 and taper_scale = weight / sqrt(eps), unfolded, so that it
  folds, keeps its tied head, and exports to the same form again.

  Args:
    hf_config: what config.json holds.
    tensors: float32, by name.
    context_len: to keep fewer positions than the file has.

  Returns:
    A model without a tokenizer; meta["source"]["notes"] lists what was left
    out or filled in.

  Raises:
    UserError: a field or a tensor that is not understood, missing, of another
      shape, or against another.
  """
  found = []  # notes
  config, tied = _read_config(hf_config)
  tensors = _plain_names(tensors)
  tensors = _without_masks(tensors, found)
  head = _head(tensors, tied, found)
  take = _Taker(tensors, config, found)
  params = take.tree()
  if not tied:
    _check_shape(hf_files.HEAD, head, (config.vocab_size, config.embed_dim))
    params["head"] = {"kernel": np.ascontiguousarray(head.T)}
  context_len = llama.shorter_context(config.context_len, context_len)
  position = params["position_embed"]
  position["embedding"] = position["embedding"][:context_len].copy()
  config = config.replace(context_len=context_len)
  config = config.replace(
    biases=tuple(n for n in BIASES if n in take.biases), tied=tied
  )
  c_S = np.zeros(2 * config.num_layers + 1, np.float32)
  gate = 1.0
  if config.norm_eps >= HUGE_EPS:
    params, config = _without_norms(params, config)
    c_S, gate = np.ones_like(c_S), 0.0
    found.append(
      f"layer_norm_epsilon={hf_config['layer_norm_epsilon']:g}: the norms are "
      "fixed maps; read as tapered, at gate 0"
    )
  return Model(params, config, c_S, gate, meta={"source": {"notes": found}})


def _read_config(hf_config: dict[str, Any]) -> tuple[ModelConfig, bool]:
  """The shape that config.json tells, biases apart, and whether it is tied."""
  if hf_config.get("model_type") != "gpt2":
    raise UserError(
      f"model_type={hf_config.get('model_type')!r} is not gpt2; this reader "
      "knows the GPT-2 layout only"
    )
  hf_files.check_fields(hf_config, _READ, _FIXED)
  size = {name: hf_files.whole(hf_config, name) for name in _SIZES}
  if hf_config.get("n_ctx", size["n_positions"]) != size["n_positions"]:
    raise UserError(
      f"config.json: n_ctx={hf_config['n_ctx']!r} is not n_positions="
      f"{size['n_positions']}; make them one"
    )
  heads, width = size["n_head"], size["n_embd"]
  if width % heads:
    raise UserError(
      f"config.json: n_embd={width} is not divisible by n_head={heads}; check "
      "both"
    )
  inner = 4 * width
  if hf_config.get("n_inner") is not None:
    inner = hf_files.whole(hf_config, "n_inner")
  activation = hf_config.get("activation_function", "gelu_new")
  if str(activation) not in _ACTIVATIONS:
    raise UserError(
      f"config.json: activation_function={activation!r} is not one of "
      f"{', '.join(_ACTIVATIONS)}"
    )
  tied = hf_config.get("tie_word_embeddings", True)
  if not isinstance(tied, bool):
    raise UserError(
      f"config.json: tie_word_embeddings={tied!r} must be true or false"
    )
  return ModelConfig(
    num_layers=size["n_layer"],
    embed_dim=width,
    num_heads=heads,
    num_kv_heads=heads,
    head_dim=width // heads,
    mlp_dim=inner,
    mlp=_ACTIVATIONS[activation],
    positions="learned",
    rope_theta=10_000.0,  # without effect
    rotary_dim=width // heads,
    norm_eps=hf_files.number(hf_config, "layer_norm_epsilon", 1e-5),
    biases=(),
    tied=tied,
    init_std=hf_files.number(hf_config, "initializer_range", 0.02),
    scan_layers=False,
    norm="layer",
    internal_norm="norm",
    final_norm="norm",
    vocab_size=size["vocab_size"],
    context_len=size["n_positions"],
    compute_dtype="float32",
  ), tied


def _plain_names(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
  """Tensors by name without prefixes."""
  plain, origin = {}, {}
  for name, tensor in tensors.items():
    short = name.removeprefix("_orig_mod.").removeprefix("transformer.")
    short = short.removeprefix("_orig_mod.")
    if short in plain:
      raise UserError(
        f"tensors {origin[short]!r} and {name!r} are the same one; remove one"
      )
    plain[short], origin[short] = tensor, name
  return plain


def _without_masks(tensors, found: list[str]) -> dict[str, np.ndarray]:
  """Drops stored causal masks and their fill value."""
  kept = {}
  for name, tensor in tensors.items():
    if re.fullmatch(r"h\.\d+\.attn\.bias", name):
      square = tensor.ndim == 4 and tensor.shape[-1] == tensor.shape[-2]
      mask = tensor != 0
      if not (square and np.array_equal(mask, np.tril(mask | True))):
        raise UserError(
          f"tensor {name!r} of shape {list(tensor.shape)} is no causal mask; "
          "other masks are not supported"
        )
    elif not re.fullmatch(r"h\.\d+\.attn\.masked_bias", name):
      kept[name] = tensor
  if len(kept) < len(tensors):
    found.append("stored causal masks are left out")
  return kept


def _head(tensors, tied: bool, found: list[str]) -> np.ndarray | None:
  """Takes the head out of the tensors; None where it is the embedding."""
  head = tensors.pop(hf_files.HEAD, None)
  if not tied:
    if head is None:
      raise UserError(
        f"tie_word_embeddings=False, but tensor {hf_files.HEAD!r} is missing; "
        "set it to true or add the tensor"
      )
    return head
  if head is None:
    return None
  embedding = tensors.get("wte.weight")
  if embedding is not None and not np.array_equal(head, embedding):
    raise UserError(
      f"tie_word_embeddings=True, but tensor {hf_files.HEAD!r} is not the "
      "embedding; set it to false or remove the tensor"
    )
  found.append(f"{hf_files.HEAD} is the embedding again and is left out")
  return None


def _check_shape(name: str, tensor: np.ndarray, shape: tuple[int, ...]) -> None:
  if tensor.shape != shape:
    raise UserError(
      f"tensor {name!r} has shape {list(tensor.shape)}, but config.json asks "
      f"for {list(shape)}"
    )


class _Taker:
  """Takes tensors one by one, so that missing and left-over ones are told."""

  def __init__(self, tensors, config: ModelConfig, found: list[str]):
    self.tensors, self.config, self.found = dict(tensors), config, found
    self.biases: set[str] = set()
    self.linear_storage = False  # (out, in)

  def tree(self) -> dict:
    """The parameters but for the head; every tensor is used."""
    cfg, d = self.config, self.config.embed_dim
    if cfg.num_layers > len(self.tensors):  # before any list of so many
      raise UserError(
        f"n_layer={cfg.num_layers} in config.json is more than the file's "
        f"{len(self.tensors)} tensors; fetch both again"
      )
    hidden, heads = cfg.mlp_dim, (cfg.num_heads, cfg.head_dim)
    first = self.tensors.get("h.0.attn.c_attn.weight")
    self.linear_storage = first is not None and first.shape == (3 * d, d)
    has = {
      part: self._has_bias(part)
      for part in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
    }
    norm_bias = self._has_bias("ln_1")
    for name in ("ln_2", "ln_f"):
      if self._has_bias(name) != norm_bias:
        raise UserError(
          f"biases of ln_1 and {name}: one has them and the other has not; "
          "add zeros"
        )
    if not norm_bias:
      self.found.append("biases of the norms are missing; they are zeros here")
    for part, names in (
      ("attn.c_attn", "qkv"), ("attn.c_proj", "o"),
      ("mlp.c_fc", ["up"]), ("mlp.c_proj", ["down"]),
    ):
      if has[part]:
        self.biases.update(names)
    params = {
      "embed": {"embedding": self.take("wte.weight", cfg.vocab_size, d)},
      "position_embed": {
        "embedding": self.take("wpe.weight", cfg.context_len, d)
      },
      "final_norm": self.norm("ln_f", norm_bias),
    }
    for n in range(cfg.num_layers):
      h = f"h.{n}"
      qkv = self.linear(f"{h}.attn.c_attn", d, 3 * d, has["attn.c_attn"])
      attn = {
        name: {
          k: np.ascontiguousarray(part).reshape(*part.shape[:-1], *heads)
          for k, part in (
            (k, np.split(x, 3, axis=-1)[i]) for k, x in qkv.items()
          )
        }
        for i, name in enumerate("qkv")
      }
      o = self.linear(f"{h}.attn.c_proj", d, d, has["attn.c_proj"])
      attn["o"] = o | {"kernel": o["kernel"].reshape(*heads, d)}
      params[f"block_{n}"] = {
        "attn_norm": self.norm(f"{h}.ln_1", norm_bias),
        "attn": attn,
        "mlp_norm": self.norm(f"{h}.ln_2", norm_bias),
        "mlp": {
          "up": self.linear(f"{h}.mlp.c_fc", d, hidden, has["mlp.c_fc"]),
          "down": self.linear(f"{h}.mlp.c_proj", hidden, d, has["mlp.c_proj"]),
        },
      }
    if self.tensors:
      name = min(self.tensors)
      raise UserError(
        f"tensor {name!r} is not part of the GPT-2 layout with "
        f"n_layer={cfg.num_layers}; remove it, or check config.json"
      )
    return params

  def _has_bias(self, part: str) -> bool:
    """Whether a part has a bias, the same in all layers."""
    if part == "ln_f":
      return "ln_f.bias" in self.tensors
    names = [f"h.{n}.{part}.bias" for n in range(self.config.num_layers)]
    missing = [name for name in names if name not in self.tensors]
    if missing and len(missing) < len(names):
      raise UserError(
        f"tensor {missing[0]!r} is missing, and other layers have it; add it"
      )
    return not missing

  def take(self, name: str, *shape: int) -> np.ndarray:
    if name not in self.tensors:
      raise UserError(f"tensor {name!r} is missing; check the file")
    tensor = self.tensors.pop(name)
    _check_shape(name, tensor, shape)
    return np.array(tensor, np.float32, order="C")

  def norm(self, name: str, has_bias: bool) -> dict:
    d = self.config.embed_dim
    bias = self.take(f"{name}.bias", d) if has_bias else np.zeros(
      d, np.float32
    )
    return {"scale": self.take(f"{name}.weight", d), "bias": bias}

  def linear(self, name: str, rows: int, columns: int, has_bias: bool) -> dict:
    """A matrix (in, out), stored as the first c_attn is, and its bias."""
    if self.linear_storage:
      kernel = self.take(f"{name}.weight", columns, rows).T
    else:
      kernel = self.take(f"{name}.weight", rows, columns)
    out = {"kernel": np.ascontiguousarray(kernel)}
    if has_bias:
      out["bias"] = self.take(f"{name}.bias", columns)
    return out


def _without_norms(
  params: dict, config: ModelConfig
) -> tuple[dict, ModelConfig]:
  """Norms of a huge eps as tapered ones: taper_scale = weight / sqrt(eps)."""
  root = math.sqrt(config.norm_eps)

  def tapered(norm):
    scale_D = np.float32(norm["scale"].astype(np.float64) / root)
    return norm | {"scale": scale_D, "taper_scale": scale_D.copy()}

  params = dict(params)
  for n in range(config.num_layers):
    block = params[f"block_{n}"]
    params[f"block_{n}"] = block | {
      name: tapered(block[name]) for name in ("attn_norm", "mlp_norm")
    }
  params["final_norm"] = tapered(params["final_norm"])
  # The eps of the norms that were there is not in the file; GPT-2's is 1e-5.
  return params, config.replace(
    internal_norm="taper", final_norm="taper", norm_eps=1e-5
  )
