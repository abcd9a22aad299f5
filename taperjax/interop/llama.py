"""The Llama layout of Hugging Face: Llama, Mistral and Qwen2, both ways.

    model.embed_tokens.weight (V, D)           model.norm.weight (D,)
    model.layers.n.input_layernorm.weight      .post_attention_layernorm.weight
    model.layers.n.self_attn.{q,k,v,o}_proj    weight (out, in), bias
    model.layers.n.mlp.{gate,up,down}_proj     weight (out, in), bias
    lm_head.weight (V, D)                      [untied]

Ours are (in, out) with the heads apart; rotary is half-split on both sides.
"""

from __future__ import annotations

import math
import os
import pathlib
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from taperjax import model as model_lib, saved
from taperjax.config import BIASES, ModelConfig, RopeScaling
from taperjax.errors import UserError
from taperjax.interop import hf_files

MODEL_TYPES = ("llama", "mistral", "qwen2")
EMBED = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
_ATTENTION, _MLP = ("q", "k", "v", "o"), ("gate", "up", "down")
_MODULES = {
  **dict.fromkeys(_ATTENTION, "self_attn"),
  **dict.fromkeys(_MLP, "mlp"),
}
_NORMS = {
  "attn_norm": "input_layernorm",
  "mlp_norm": "post_attention_layernorm",
}
# Fields of config.json that are honoured, and flags with one known value.
_USED = {
  "model_type", "vocab_size", "hidden_size", "intermediate_size",
  "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
  "hidden_act", "rms_norm_eps", "max_position_embeddings",
  "tie_word_embeddings", "attention_bias", "mlp_bias", "rope_theta",
  "rope_scaling", "rope_parameters", "partial_rotary_factor",
  "original_max_position_embeddings", "sliding_window", "use_sliding_window",
  "max_window_layers", "layer_types",
}
_FIXED = {
  "add_cross_attention": False,
  "is_encoder_decoder": False,
  "rope_interleaved": False,
  "use_mrope": False,
}
# Made again from theta by every reader; old files still hold them.
_SKIPPED = re.compile(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq")
# Parts of tensor names that we know and cannot hold.
_REFUSED = {
  "q_norm": "a norm of the queries (qk-norm)",
  "k_norm": "a norm of the keys (qk-norm)",
  "pre_feedforward_layernorm": "a sandwich norm",
  "post_feedforward_layernorm": "a norm after the MLP (post-norm or sandwich)",
  "post_mlp_layernorm": "a norm after the MLP (sandwich)",
  "post_self_attn_layernorm": "a norm after attention (sandwich)",
  "lora_": "an adapter that was not merged",
  "rotary_emb": "a rotary table",
}


def read(
  folder: str | os.PathLike[str],
  *,
  gain_offset: float = 0.0,
  context_len: int | None = None,
) -> saved.Model:
  """A model from a local folder, without a tokenizer.

  Args:
    folder: config.json and safetensors.
    gain_offset: added to every gain; 1 for files that store gains as (1 + w).
    context_len: a shorter context than the file's.

  Raises:
    UserError: whatever the model of taperjax cannot hold exactly.
  """
  folder = pathlib.Path(folder)
  _check_offset(gain_offset)
  hf_config, tensors, files = hf_files.read_folder(folder)
  config = config_from_hf(
    hf_config, biases=_biases_of(hf_config), context_len=context_len
  )
  params = from_hf(tensors, config, gain_offset)
  source = {
    "format": f"huggingface {hf_config['model_type']}",
    "files": files,
    "path": str(folder.resolve()),
    "dtype": hf_files.stored_dtype(folder),
  }
  if gain_offset:
    source["gain_offset"] = float(gain_offset)
  c_S = np.zeros(2 * config.num_layers + 1, np.float32)
  return saved.Model(params, config, c_S, gate=1.0, meta={"source": source})


def _check_offset(gain_offset: float) -> None:
  if not abs(gain_offset) < 2**127:
    raise UserError(
      f"gain_offset={gain_offset} is not finite in float32; give a number, "
      "for example 1"
    )


def check_model_type(hf_config: Mapping[str, Any]) -> str:
  """model_type, if it is one that is understood."""
  kind = hf_config.get("model_type")
  if kind in MODEL_TYPES:
    return kind
  known = ", ".join(MODEL_TYPES)
  if str(kind).startswith("gemma"):
    raise UserError(
      f"model_type={kind!r} multiplies the embedding by sqrt(width) and has a "
      f"GELU gate, beside its (1 + w) gains; understood are {known}"
    )
  raise UserError(f"model_type={kind!r} is not understood; the ones that are: "
                  f"{known}")


def config_from_hf(
  hf_config: Mapping[str, Any],
  *,
  biases: tuple[str, ...] = (),
  context_len: int | None = None,
) -> ModelConfig:
  """The shape that config.json tells, with real norms everywhere.

  Args:
    hf_config: config.json, as transformers 4 or 5 writes it.
    biases: projections with a bias.
    context_len: shortens max_position_embeddings.

  Raises:
    UserError: a field is missing or means something that we do not have.
  """
  kind = check_model_type(hf_config)
  if hf_config.get("quantization_config"):
    raise UserError(
      "quantization_config: the weights are quantized; import the model that "
      "they were made from"
    )
  hf_files.check_fields(hf_config, _USED, _FIXED)
  if (act := hf_config.get("hidden_act", "silu")) != "silu":
    raise UserError(
      f"hidden_act={act!r} is not understood; the MLP must be SwiGLU (silu)"
    )
  whole = lambda name: hf_files.whole(hf_config, name)
  width, heads = whole("hidden_size"), whole("num_attention_heads")
  kv_heads = heads
  if kind != "llama" or hf_config.get("num_key_value_heads") is not None:
    kv_heads = whole("num_key_value_heads")
  if heads % kv_heads:
    raise UserError(
      f"num_key_value_heads={kv_heads} does not divide num_attention_heads="
      f"{heads}; mend config.json"
    )
  if hf_config.get("head_dim") is not None:
    head_dim = whole("head_dim")
  elif width % heads:
    raise UserError(
      f"hidden_size={width} is not divisible by num_attention_heads={heads} "
      "and config.json has no head_dim; add it"
    )
  else:
    head_dim = width // heads
  if head_dim % 2:
    raise UserError(
      f"head_dim={head_dim} is odd; rotary positions need an even one"
    )
  layers = whole("num_hidden_layers")
  longest = whole("max_position_embeddings")
  context_len = shorter_context(longest, context_len)
  _check_window(hf_config, kind, layers, context_len)
  theta, scaling = _rope(hf_config)
  return ModelConfig(
    num_layers=layers,
    embed_dim=width,
    num_heads=heads,
    num_kv_heads=kv_heads,
    head_dim=head_dim,
    mlp_dim=whole("intermediate_size"),
    mlp="swiglu",
    positions="rope",
    rope_theta=theta,
    rotary_dim=head_dim,
    norm_eps=hf_files.number(hf_config, "rms_norm_eps"),
    biases=biases,
    tied=_flag(hf_config, "tie_word_embeddings"),
    init_std=0.02,
    scan_layers=False,
    norm="rms",
    internal_norm="norm",
    final_norm="norm",
    vocab_size=whole("vocab_size"),
    context_len=context_len,
    compute_dtype="float32",
    rope_scaling=scaling,
  )


def halves(rows: np.ndarray, heads: int) -> np.ndarray:
  """Rows of q or k, (heads x K, ...), from neighbouring pairs to halves."""
  pairs = rows.reshape(heads, -1, 2, *rows.shape[1:])
  return pairs.swapaxes(1, 2).reshape(rows.shape)


def shorter_context(longest: int, context_len: int | None) -> int:
  """The context to use: the file's own unless a shorter one is asked for."""
  if context_len is None:
    return longest
  if not 1 <= context_len <= longest:
    raise UserError(
      f"context_len={context_len} must be from 1 to {longest}, the context "
      "that the model has positions for"
    )
  return context_len


def _flag(fields: Mapping[str, Any], name: str) -> bool:
  """False where it is left out, as all these model types have it."""
  value = fields.get(name, False)
  if type(value) is not bool:
    raise UserError(
      f"{name}={value!r} in config.json must be true or false; mend config.json"
    )
  return value


def _biases_of(hf_config: Mapping[str, Any]) -> tuple[str, ...]:
  """Projections that have a bias according to config.json."""
  kind = check_model_type(hf_config)
  if kind == "qwen2":
    return ("q", "k", "v")
  if kind == "mistral":
    return ()
  attention = _ATTENTION if _flag(hf_config, "attention_bias") else ()
  return attention + (_MLP if _flag(hf_config, "mlp_bias") else ())


def _check_window(
  hf_config: Mapping[str, Any], kind: str, layers: int, context_len: int
) -> None:
  """Raises where attention would not see the whole context."""
  # A Mistral that does not tell has the default of its class.
  default = {"sliding_window": 4_096} if kind == "mistral" else {}
  hf_config = default | dict(hf_config)
  types = hf_config.get("layer_types")
  known = types is None or isinstance(types, list)
  if known and types and kind != "qwen2":
    known = set(map(str, types)) == {"full_attention"}
  if not known:
    raise UserError(
      f"layer_types={types!r} is not understood with model_type={kind!r}; only "
      "full_attention is"
    )
  if hf_config.get("sliding_window") is None:
    return
  window = hf_files.whole(hf_config, "sliding_window")
  if kind == "qwen2":
    first = hf_config.get("max_window_layers", 0)  # the layers before see all
    slides = type(first) is not int or first < layers
    if types is not None:
      slides = "sliding_attention" in types
    if not (_flag(hf_config, "use_sliding_window") and slides):
      return
  if context_len > window:
    raise UserError(
      f"sliding_window={window} hides tokens in a context of {context_len}, "
      f"and taperjax has no sliding window; import with --context-len {window}"
    )


_ROPE_KEYS = {
  "default": set(),
  "linear": {"factor"},
  "llama3": {
    "factor",
    "low_freq_factor",
    "high_freq_factor",
    "original_max_position_embeddings",
  },
}


def _rope(hf_config: Mapping[str, Any]) -> tuple[float, RopeScaling | None]:
  """(theta, scaling), from the keys of transformers 4, 5 or both."""
  groups = {}
  for key in ("rope_scaling", "rope_parameters"):
    group = hf_config.get(key) or {}
    if not isinstance(group, Mapping):
      raise UserError(
        f"{key}={group!r} in config.json must be an object; mend config.json"
      )
    if group:
      groups[key] = group
  sources = [hf_config, *groups.values()]
  thetas = {
    hf_files.number(fields, "rope_theta", least=1)
    for fields in sources
    if fields.get("rope_theta") is not None
  }
  if len(thetas) > 1:
    raise UserError(
      f"rope_theta is told twice, as {' and '.join(map(str, sorted(thetas)))};"
      " leave one in config.json"
    )
  for fields in sources:
    if (share := fields.get("partial_rotary_factor", 1)) != 1:
      raise UserError(
        f"partial_rotary_factor={share!r} is not understood in a Llama layout; "
        "all of a head must turn"
      )
  found = {key: _scaling(key, group) for key, group in groups.items()}
  if len(found) > 1 and len(set(found.values())) > 1:
    raise UserError(
      "rope_scaling and rope_parameters in config.json differ; leave one of "
      "them"
    )
  scaling = next(iter(found.values()), None)
  if scaling is not None and scaling.kind == "llama3":
    outer = hf_config.get("original_max_position_embeddings")
    if outer not in (None, scaling.original_context):
      raise UserError(
        f"original_max_position_embeddings={outer!r} differs from the one in "
        f"the rope parameters, {scaling.original_context}; leave one"
      )
  # Llama 2 has no such key: 10,000 is the method's own constant.
  return thetas.pop() if thetas else 10_000.0, scaling


def _scaling(key: str, group: Mapping[str, Any]) -> RopeScaling | None:
  """One of the two groups; every key in it is understood or refused."""
  told = [str(group[k]) for k in ("type", "rope_type") if k in group]
  kinds = set(told or ["default"])
  if len(kinds) > 1:
    raise UserError(f"{key} has two types, {sorted(kinds)}; leave one")
  kind = kinds.pop()
  if kind not in _ROPE_KEYS:
    raise UserError(
      f"{key}: rope type {kind!r} is not understood; the ones that are: "
      f"{', '.join(_ROPE_KEYS)}"
    )
  general = {"type", "rope_type", "rope_theta", "partial_rotary_factor"}
  for name in sorted(set(group) - general - _ROPE_KEYS[kind]):
    if group[name] is not None:
      raise UserError(
        f"{key}: {name}={group[name]!r} is not understood with rope type "
        f"{kind!r}; remove it if it has no effect"
      )
  if kind == "default":
    return None
  factor = hf_files.number(group, "factor", least=1)
  if kind == "linear":
    return RopeScaling("linear", factor)
  low = hf_files.number(group, "low_freq_factor")
  high = hf_files.number(group, "high_freq_factor")
  if not low < high:
    raise UserError(
      f"{key}: low_freq_factor={low} must be below high_freq_factor={high}; "
      "mend config.json"
    )
  original = hf_files.whole(group, "original_max_position_embeddings")
  return RopeScaling("llama3", factor, low, high, original)


def from_hf(
  tensors: dict[str, np.ndarray],
  config: ModelConfig,
  gain_offset: float = 0.0,
) -> dict:
  """Our parameters from the tensors of a Llama layout.

  Args:
    tensors: float32, emptied as they are used, so that no more than one of
      them is held twice.
    config: from `config_from_hf`.
    gain_offset: added to every gain.

  Raises:
    UserError: a tensor is missing, of another shape, or not understood.
  """
  d, k, f = config.embed_dim, config.head_dim, config.mlp_dim
  heads = {"q": config.num_heads, "k": config.num_kv_heads}
  heads |= {"v": config.num_kv_heads, "o": config.num_heads}

  def take(name, *shape):
    if name not in tensors:
      raise UserError(
        f"tensor {name!r} is missing; config.json asks for it: fetch the model "
        "again"
      )
    value = tensors.pop(name)
    if value.shape != shape:
      raise UserError(
        f"tensor {name!r} has shape {value.shape}, against {shape} by "
        "config.json; fetch both again"
      )
    return value

  def gain(name):
    return {"scale": take(name, d) + np.float32(gain_offset)}

  def linear(prefix, name, inputs, outputs):
    """A kernel (*inputs, *outputs) from a matrix (out, in)."""
    path = f"{prefix}.{_MODULES[name]}.{name}_proj"
    shape = (math.prod(outputs), math.prod(inputs))
    w = take(f"{path}.weight", *shape).T.reshape(*inputs, *outputs)
    found = {"kernel": np.ascontiguousarray(w)}
    if name in config.biases:
      found["bias"] = take(f"{path}.bias", shape[0]).reshape(outputs)
    return found

  _refuse_known(tensors)
  params = {"embed": {"embedding": take(EMBED, config.vocab_size, d)}}
  for n in range(config.num_layers):
    prefix = f"model.layers.{n}"
    block = {
      ours: gain(f"{prefix}.{theirs}.weight") for ours, theirs in _NORMS.items()
    }
    block["attn"] = {
      name: linear(prefix, name, (d,), (heads[name], k)) for name in "qkv"
    }
    block["attn"]["o"] = linear(prefix, "o", (heads["o"], k), (d,))
    block["mlp"] = {
      name: linear(prefix, name, (d,), (f,)) for name in ("gate", "up")
    }
    block["mlp"]["down"] = linear(prefix, "down", (f,), (d,))
    params[f"block_{n}"] = block
  params["final_norm"] = gain(FINAL_NORM)
  if not config.tied:
    if hf_files.HEAD not in tensors:
      raise UserError(
        f"tie_word_embeddings=False, but tensor {hf_files.HEAD!r} is missing; "
        "set it to true in config.json if the head is the embedding"
      )
    head = take(hf_files.HEAD, config.vocab_size, d)
    params["head"] = {"kernel": np.ascontiguousarray(head.T)}
  elif hf_files.HEAD in tensors and not np.array_equal(
    tensors.pop(hf_files.HEAD), params["embed"]["embedding"]
  ):
    raise UserError(
      f"tie_word_embeddings=True, but tensor {hf_files.HEAD!r} differs from "
      f"{EMBED!r}; set it to false in config.json if the head is its own"
    )
  for name in sorted(tensors):
    if not _SKIPPED.fullmatch(name):
      raise UserError(_unknown(name, config))
  return params


def _refuse_known(tensors: Mapping[str, np.ndarray]) -> None:
  """Names the part that we cannot hold, before anything else is missing."""
  for name in sorted(tensors):
    for part, reason in _REFUSED.items():
      if part in name and not _SKIPPED.fullmatch(name):
        raise UserError(
          f"tensor {name!r} is {reason}, which taperjax does not have; only "
          "pre-norm models without it can be imported"
        )


def _unknown(name: str, config: ModelConfig) -> str:
  layer = re.match(r"model\.layers\.(\d+)\.", name)
  if layer and int(layer[1]) >= config.num_layers:
    reason = f"config.json has num_hidden_layers={config.num_layers}"
  elif name.endswith(".bias"):
    reason = f"by config.json only {list(config.biases)} have a bias"
  else:
    reason = "a Llama layout has no such tensor"
  return f"tensor {name!r} is not understood: {reason}; import another model"


def to_hf(
  params: Mapping[str, Any], config: ModelConfig
) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
  """The tensors and config.json of a model with all its norms.

  The inverse of `read`: LlamaForCausalLM, or Qwen2ForCausalLM where exactly
  q, k and v have biases. config.json speaks to transformers 4 and 5.

  Args:
    params: parameters; a tree of arrays, stacked layers or not.
    config: RMSNorm, rotary, SwiGLU, no norm tapered or folded.

  Raises:
    UserError: the layout cannot hold this model.
  """
  hf_config = hf_config_of(config)
  params, config = model_lib.unstack_layers(params, config)
  array = lambda x: np.asarray(x, np.float32)
  tensors = {EMBED: array(params["embed"]["embedding"])}
  for n in range(config.num_layers):
    block = params[f"block_{n}"]
    prefix = f"model.layers.{n}"
    for ours, theirs in _NORMS.items():
      tensors[f"{prefix}.{theirs}.weight"] = array(block[ours]["scale"])
    for name, module in _MODULES.items():
      linear = block["attn" if module == "self_attn" else "mlp"][name]
      path = f"{prefix}.{module}.{name}_proj"
      w = array(linear["kernel"])
      # The input axes are D alone, but for o: heads and head size.
      w = w.reshape(-1, config.embed_dim) if name == "o" else (
        w.reshape(w.shape[0], -1)
      )
      tensors[f"{path}.weight"] = np.ascontiguousarray(w.T)
      if name in config.biases:
        tensors[f"{path}.bias"] = array(linear["bias"]).reshape(-1)
  tensors[FINAL_NORM] = array(params["final_norm"]["scale"])
  if not config.tied:
    head = array(params["head"]["kernel"]).T
    tensors[hf_files.HEAD] = np.ascontiguousarray(head)
  return tensors, hf_config


def hf_config_of(config: ModelConfig) -> dict[str, Any]:
  """config.json of a model with all its norms; errors as `to_hf`."""
  for field, want in (
    ("norm", "rms"),
    ("internal_norm", "norm"),
    ("final_norm", "norm"),
    ("positions", "rope"),
    ("mlp", "swiglu"),
    ("rotary_dim", config.head_dim),
  ):
    value = getattr(config, field)
    if value != want:
      raise UserError(
        f"{field}={value!r}: a Llama layout needs {want!r}; choose another "
        "format"
      )
  biases = set(config.biases)
  attention, mlp = biases & set(_ATTENTION), biases & set(_MLP)
  qwen = biases == {"q", "k", "v"}
  whole = attention in (set(), set(_ATTENTION)) and mlp in (set(), set(_MLP))
  if not qwen and (not whole or "head" in biases):
    named = [name for name in BIASES if name in biases]
    raise UserError(
      f"biases={named}: a Llama layout holds those of q, k, v; or of q, k, v, "
      "o; of gate, up, down; or of both; choose another format"
    )
  if not qwen and config.embed_dim % config.num_heads:
    raise UserError(
      f"embed_dim={config.embed_dim} is not divisible by num_heads="
      f"{config.num_heads}, which LlamaForCausalLM insists on; choose another "
      "format"
    )
  parameters = {"rope_type": "default"}
  if (scaling := config.rope_scaling) is not None:
    parameters = {"rope_type": scaling.kind, "factor": scaling.factor}
    if scaling.kind == "llama3":
      parameters |= {
        "low_freq_factor": scaling.low_freq_factor,
        "high_freq_factor": scaling.high_freq_factor,
        "original_max_position_embeddings": scaling.original_context,
      }
  written = {
    "architectures": ["Qwen2ForCausalLM" if qwen else "LlamaForCausalLM"],
    "model_type": "qwen2" if qwen else "llama",
    "vocab_size": config.vocab_size,
    "hidden_size": config.embed_dim,
    "intermediate_size": config.mlp_dim,
    "num_hidden_layers": config.num_layers,
    "num_attention_heads": config.num_heads,
    "num_key_value_heads": config.num_kv_heads,
    "head_dim": config.head_dim,
    "hidden_act": "silu",
    "max_position_embeddings": config.context_len,
    "initializer_range": config.init_std,
    "rms_norm_eps": config.norm_eps,
    "tie_word_embeddings": config.tied,
    "rope_theta": config.rope_theta,
    "rope_scaling": None if scaling is None else dict(parameters),
    "rope_parameters": {**parameters, "rope_theta": config.rope_theta},
    "attention_dropout": 0.0,
    "use_cache": True,
    # Whoever adds a tokenizer tells these; the classes' defaults are others.
    "bos_token_id": None,
    "eos_token_id": None,
  }
  if qwen:
    written["use_sliding_window"] = False
  else:
    written |= {"attention_bias": bool(attention), "mlp_bias": bool(mlp)}
  return written
