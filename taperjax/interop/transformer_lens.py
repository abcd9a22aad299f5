"""Weights, a configuration and a loader for TransformerLens 4.

Its native model has no block norms with `normalization_type=None`, and a real
final RMSNorm with `final_rms=True`; the loader puts a LayerNorm there where
the model has one. Axes as in `model`; C components of the stream.
"""

from __future__ import annotations

import importlib.resources
import importlib.util
import json
import pathlib
from typing import Any

import numpy as np

from taperjax import model
from taperjax.config import ModelConfig
from taperjax.errors import UserError
from taperjax.interop import bare
from taperjax.summary import write_json

PAGE = "transformer_lens.json"
LOADER = "load_taperjax.py"


def write(
  folder: pathlib.Path, params: dict, config: ModelConfig, *, dtype: str
) -> dict[str, Any]:
  """Writes model.safetensors, transformer_lens.json and load_taperjax.py.

  Args:
    params, config: a model whose internal norms are folded.
    dtype: of the file; the loader opens it as float32 unless told.

  Returns:
    `files` and `tensors`, for a report.

  Raises:
    UserError: internal norms are left, a scaling that TransformerLens ignores,
      or weights beyond the dtype.
  """
  bare.refuse_tapers(config)
  if config.internal_norm != "none":
    raise UserError(
      f"internal_norm={config.internal_norm}: the TransformerLens export is "
      "for models without internal norms; export with --to hf and open that "
      "folder with TransformerBridge.boot_transformers"
    )
  scaling = config.rope_scaling
  if scaling and scaling.factor < 1:
    raise UserError(
      f"rope_scaling.factor={scaling.factor}: TransformerLens ignores factors "
      "below 1; export with --to hf --remote-code"
    )
  params, config = model.unstack_layers(params, config)
  tensors = bare.cast(lens_tensors(params, config), dtype)
  bare.save(folder / bare.WEIGHTS, tensors, framework="pt")
  final = config.final_norm == "norm"
  write_json(folder / PAGE, {
    "format": "taperjax-transformer-lens",
    "version": 1,
    "dtype": dtype,
    "final_layer_norm": final and config.norm == "layer",
    "cfg": lens_config(config),
    "rope_scaling": _rope_scaling(config),
  })
  files = importlib.resources.files("taperjax.interop") / "files"
  text = (files / "transformer_lens_loader.py").read_text(encoding="utf-8")
  (folder / LOADER).write_text(text, encoding="utf-8")
  names = [bare.WEIGHTS, PAGE, LOADER]
  return {"files": sorted(names), "tensors": len(tensors)}


def lens_config(config: ModelConfig) -> dict[str, Any]:
  """The fields of a TransformerBridgeConfig."""
  fields = {
    "n_layers": config.num_layers,
    "d_model": config.embed_dim,
    "n_heads": config.num_heads,
    "n_key_value_heads": config.num_kv_heads,
    "d_head": config.head_dim,
    "d_mlp": config.mlp_dim,
    "d_vocab": config.vocab_size,
    "n_ctx": config.context_len,
    "act_fn": {
      "swiglu": "silu", "gelu_tanh": "gelu_new", "gelu": "gelu",
    }[config.mlp],
    "gated_mlp": config.mlp == "swiglu",
    "normalization_type": None,
    "final_rms": config.final_norm == "norm",
    "eps": config.norm_eps,
    "positional_embedding_type": "standard",
    "init_weights": False,
  }
  if config.positions == "rope":
    fields["positional_embedding_type"] = "rotary"
    fields["rotary_dim"] = config.rotary_dim
    fields["rotary_base"] = config.rope_theta
  return fields


def _rope_scaling(config: ModelConfig) -> dict[str, Any] | None:
  """The scaling under transformers' names, or None."""
  scaling = config.rope_scaling
  return scaling and {
    "rope_type": scaling.kind,
    "factor": scaling.factor,
    "low_freq_factor": scaling.low_freq_factor,
    "high_freq_factor": scaling.high_freq_factor,
    "original_max_position_embeddings": scaling.original_context,
  }


def lens_tensors(params: dict, config: ModelConfig) -> dict[str, np.ndarray]:
  """Tensors by TransformerLens name; matrices (out, in), layers unstacked."""
  out = {"embed.weight": params["embed"]["embedding"]}
  if config.positions == "learned":
    out["pos_embed.weight"] = params["position_embed"]["embedding"]
  order_K = _adjacent_pairs(config)
  for n in range(config.num_layers):
    block, prefix = params[f"block_{n}"], f"blocks.{n}"
    for name, leaf in block["attn"].items():
      kernel = np.asarray(leaf["kernel"])
      outputs = kernel.shape[2:] if name == "o" else kernel.shape[1:]
      bias = np.asarray(leaf.get("bias", np.zeros(outputs)))
      if name in ("q", "k"):
        kernel, bias = kernel[..., order_K], bias[..., order_K]
      matrix = kernel.reshape(-1, bias.size)
      out[f"{prefix}.attn.{name}.weight"] = matrix.T
      out[f"{prefix}.attn.{name}.bias"] = bias.reshape(-1)
    for name, leaf in block["mlp"].items():
      lens_name = {"gate": "gate", "up": "in", "down": "out"}[name]
      kernel = np.asarray(leaf["kernel"])
      out[f"{prefix}.mlp.{lens_name}.weight"] = kernel.T
      if "bias" in leaf or config.mlp != "swiglu":
        bias = leaf.get("bias", np.zeros(kernel.shape[1]))
        out[f"{prefix}.mlp.{lens_name}.bias"] = bias
  if config.final_norm == "norm":
    out["ln_final.weight"] = params["final_norm"]["scale"]
    if config.norm == "layer":
      out["ln_final.bias"] = params["final_norm"]["bias"]
  kernel_DV, bias_V = model.head_weights(params, config)
  if not config.tied:
    out["unembed.weight"] = np.asarray(kernel_DV).T
  if bias_V is None:
    bias_V = np.zeros(config.vocab_size)
  out["unembed.bias"] = bias_V
  return out


def _adjacent_pairs(config: ModelConfig) -> np.ndarray:
  """Where coordinate i of a head comes from: i and i + R / 2 become a pair."""
  order_K = np.arange(config.head_dim)
  if config.positions == "rope":
    size = config.rotary_dim
    order_K[:size] = order_K[:size].reshape(2, size // 2).T.reshape(-1)
  return order_K


def load(folder: pathlib.Path, **options) -> Any:
  """The bridge that the folder's own loader makes."""
  spec = importlib.util.spec_from_file_location("loader", folder / LOADER)
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module.load(folder, **options)


def check(
  folder: pathlib.Path, tokens_BL: np.ndarray, want_BLV: np.ndarray
) -> dict[str, Any]:
  """How far the folder, opened in TransformerLens, is from given logits.

  Direct logit attribution: embeddings, every head, the attention's output
  biases and every MLP (with its bias) must sum to the stream before the final
  norm, and through the unembedding to the logits. A real final norm is applied
  to each component with its scale held.

  Returns:
    In float32: `max_abs_delta_logit`, `mean_abs_delta_logit` against want_BLV;
    `stream_error`, the largest difference of the summed components from the
    stream, over the largest |stream|; `attribution_error`, of their summed
    logits from the bridge's; `components`; `has_norm`, the final norm's class
    or None.
  """
  import torch

  page = json.loads((folder / PAGE).read_text())
  tokens_BL = torch.tensor(np.asarray(tokens_BL)).long()
  bridge = load(folder, n_ctx=tokens_BL.shape[1])
  with torch.no_grad():
    logits_BLV, cache = bridge.run_with_cache(tokens_BL)
    parts_CBLD = torch.stack(_components(bridge, cache, page["cfg"]))
    last = page["cfg"]["n_layers"] - 1
    stream_BLD = cache[f"blocks.{last}.hook_out"]
    stream_error = (parts_CBLD.sum(0) - stream_BLD).abs().max()
    head, norm = bridge.unembed.original_component, None
    bias_V = head.bias
    if page["cfg"]["final_rms"]:
      norm = bridge.ln_final.original_component
      if page["final_layer_norm"]:
        parts_CBLD = parts_CBLD - parts_CBLD.mean(-1, keepdim=True)
        bias_V = bias_V + norm.bias @ head.weight.T
      scale_BL1 = cache["ln_final.hook_scale"]
      parts_CBLD = parts_CBLD / scale_BL1 * norm.weight
    sum_BLV = (parts_CBLD @ head.weight.T).sum(0) + bias_V
  delta_BLV = np.abs(logits_BLV.numpy() - np.asarray(want_BLV))
  return {
    "max_abs_delta_logit": float(delta_BLV.max()),
    "mean_abs_delta_logit": float(delta_BLV.mean()),
    "stream_error": float(stream_error / stream_BLD.abs().max()),
    "attribution_error": float((sum_BLV - logits_BLV).abs().max()),
    "components": len(parts_CBLD),
    "has_norm": norm and type(norm).__name__,
  }


def _components(bridge, cache, cfg) -> list:
  """What is added to the stream, each (B, L, D), from the hooks alone."""
  parts = [cache["embed.hook_out"]]
  if "pos_embed.hook_out" in cache:
    parts.append(cache["pos_embed.hook_out"].expand_as(parts[0]))
  for n in range(cfg["n_layers"]):
    out = bridge.blocks[n].attn.o.original_component
    z_BLHK = cache[f"blocks.{n}.attn.hook_z"].reshape(
      *parts[0].shape[:2], cfg["n_heads"], cfg["d_head"]
    )
    w_DHK = out.weight.reshape(cfg["d_model"], cfg["n_heads"], cfg["d_head"])
    for head in range(cfg["n_heads"]):
      parts.append(z_BLHK[:, :, head] @ w_DHK[:, head].T)
    parts.append(out.bias.expand_as(parts[0]))
    parts.append(cache[f"blocks.{n}.mlp.hook_out"])
  return parts
