"""A Hugging Face folder with a modeling file of its own, norms truly absent.

It loads with `AutoModelForCausalLM.from_pretrained(folder,
trust_remote_code=True)`; the modeling file is files/modeling_taperjax.py.
"""

from __future__ import annotations

import dataclasses
import importlib.resources
import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from taperjax import model
from taperjax.config import ModelConfig
from taperjax.interop import bare
from taperjax.summary import write_json

MODELING = "modeling_taperjax"


def write(
  folder: pathlib.Path,
  params: dict,
  config: ModelConfig,
  *,
  dtype: str,
  special_ids: Mapping[str, int] | None = None,
) -> dict[str, Any]:
  """Writes config.json, model.safetensors and the modeling file.

  Args:
    params, config: a folded or a baseline model.
    dtype: of the file: float32, bfloat16 or float16.
    special_ids: bos_token_id, eos_token_id and pad_token_id of config.json.

  Returns:
    `files` and `tensors`, for a report.

  Raises:
    UserError: a tapered model, or weights beyond the dtype.
  """
  bare.refuse_tapers(config)
  params, config = model.unstack_layers(params, config)
  tensors = bare.cast(hf_tensors(params, config), dtype)
  bare.save(folder / bare.WEIGHTS, tensors, framework="pt")
  fields = hf_config(config) | {"dtype": dtype} | dict(special_ids or {})
  write_json(folder / "config.json", fields)
  files = importlib.resources.files("taperjax.interop") / "files"
  text = (files / f"{MODELING}.py").read_text(encoding="utf-8")
  (folder / f"{MODELING}.py").write_text(text, encoding="utf-8")
  names = [bare.WEIGHTS, "config.json", f"{MODELING}.py"]
  return {"files": sorted(names), "tensors": len(tensors)}


def hf_config(config: ModelConfig) -> dict[str, Any]:
  """What config.json holds; the fields of TaperjaxConfig."""
  scaling = config.rope_scaling
  return {
    "model_type": "taperjax",
    "architectures": ["TaperjaxForCausalLM"],
    "auto_map": {
      "AutoConfig": f"{MODELING}.TaperjaxConfig",
      "AutoModel": f"{MODELING}.TaperjaxModel",
      "AutoModelForCausalLM": f"{MODELING}.TaperjaxForCausalLM",
    },
    "vocab_size": config.vocab_size,
    "hidden_size": config.embed_dim,
    "intermediate_size": config.mlp_dim,
    "num_hidden_layers": config.num_layers,
    "num_attention_heads": config.num_heads,
    "num_key_value_heads": config.num_kv_heads,
    "head_dim": config.head_dim,
    "max_position_embeddings": config.context_len,
    "mlp": config.mlp,
    "norm": config.norm,
    "norm_eps": config.norm_eps,
    "internal_norm": config.internal_norm == "norm",
    "final_norm": config.final_norm == "norm",
    "positions": config.positions,
    "rotary_dim": config.rotary_dim,
    "rotary_base": config.rope_theta,
    "rotary_scaling": scaling and dataclasses.asdict(scaling),
    "biases": list(config.biases),
    "tie_word_embeddings": config.tied,
    "initializer_range": config.init_std,
  }


def hf_tensors(params: dict, config: ModelConfig) -> dict[str, np.ndarray]:
  """Tensors by torch name; matrices (out, in), layers unstacked."""
  out = {"model.embed_tokens.weight": params["embed"]["embedding"]}
  if config.positions == "learned":
    table = params["position_embed"]["embedding"]
    out["model.embed_positions.weight"] = table

  def linear(name, leaf, inputs):
    kernel = np.asarray(leaf["kernel"]).reshape(inputs, -1)
    out[f"{name}.weight"] = kernel.T
    if "bias" in leaf:
      out[f"{name}.bias"] = np.asarray(leaf["bias"]).reshape(-1)

  def norm(name, leaf):
    out[f"{name}.weight"] = leaf["scale"]
    if config.norm == "layer":
      out[f"{name}.bias"] = leaf["bias"]

  width, inner = config.embed_dim, config.num_heads * config.head_dim
  for n in range(config.num_layers):
    block, prefix = params[f"block_{n}"], f"model.layers.{n}"
    if config.internal_norm == "norm":
      norm(f"{prefix}.input_layernorm", block["attn_norm"])
      norm(f"{prefix}.post_attention_layernorm", block["mlp_norm"])
    for name, leaf in block["attn"].items():
      inputs = inner if name == "o" else width
      linear(f"{prefix}.self_attn.{name}_proj", leaf, inputs)
    for name, leaf in block["mlp"].items():
      inputs = config.mlp_dim if name == "down" else width
      linear(f"{prefix}.mlp.{name}_proj", leaf, inputs)
  if config.final_norm == "norm":
    norm("model.norm", params["final_norm"])
  if not config.tied:
    linear("lm_head", params["head"], width)
  return out
