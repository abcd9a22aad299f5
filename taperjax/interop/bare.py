"""The bare folded tree: one safetensors file and a page that explains it.

Also what the other writers share: weights in the dtype of the file.
"""

from __future__ import annotations

import json
import pathlib
from typing import Any

import flax.traverse_util
import numpy as np

from taperjax import config as config_lib, model
from taperjax.config import ModelConfig
from taperjax.errors import UserError
from taperjax.summary import write_json

DTYPES = ("float32", "bfloat16", "float16")
WEIGHTS = "model.safetensors"
PAGE = "model.json"


def cast(tensors: dict[str, Any], dtype: str) -> dict[str, np.ndarray]:
  """Float32 tensors in the dtype of the file, rounded once, contiguous.

  Raises:
    UserError: an unknown dtype, or a tensor that leaves its range.
  """
  import ml_dtypes

  if dtype not in DTYPES:
    raise UserError(f"dtype={dtype!r} is not one of {', '.join(DTYPES)}")
  kind = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
  out = {}
  for name, tensor in tensors.items():
    tensor = np.asarray(tensor, np.float32)
    with np.errstate(over="ignore"):
      out[name] = np.ascontiguousarray(tensor.astype(kind))
    if not np.all(np.isfinite(out[name].astype(np.float32))):
      most = np.max(np.abs(tensor))
      raise UserError(
        f"dtype={dtype}: the largest value of {name} is {most:g}, and "
        f"{float(ml_dtypes.finfo(kind).max):g} is the most that it holds; use "
        "bfloat16 or float32"
      )
  return out


def flatten(
  params: dict, config: ModelConfig
) -> tuple[dict[str, Any], ModelConfig]:
  """Parameters by path, such as block_0/attn/q/kernel; layers unstacked."""
  params, config = model.unstack_layers(params, config)
  return flax.traverse_util.flatten_dict(params, sep="/"), config


def save(
  path: pathlib.Path, tensors: dict[str, np.ndarray], framework: str = "np"
) -> None:
  """Writes tensors made by `cast`; "pt" is what transformers looks for."""
  import safetensors.numpy

  path.touch()
  mode = path.stat().st_mode
  safetensors.numpy.save_file(tensors, path, metadata={"format": framework})
  path.chmod(mode)  # the library lets the owner alone read it


def refuse_tapers(config: ModelConfig) -> None:
  """Raises UserError where a norm still has two branches."""
  if config.tapered_sites:
    raise UserError(
      f"internal_norm={config.internal_norm} and final_norm="
      f"{config.final_norm}: a tapered norm has no place in an export; fold "
      "the model first"
    )


def write(
  folder: pathlib.Path, params: dict, config: ModelConfig, *, dtype: str
) -> dict[str, Any]:
  """Writes model.safetensors and model.json into an empty folder.

  Args:
    params, config: a folded or a baseline model.
    dtype: of the file: float32, bfloat16 or float16.

  Returns:
    `files` and `tensors`, for a report.

  Raises:
    UserError: a tapered model, or weights beyond the dtype.
  """
  refuse_tapers(config)
  flat, config = flatten(params, config)
  tensors = cast(flat, dtype)
  save(folder / WEIGHTS, tensors)
  page = {
    "format": "taperjax-safetensors",
    "version": 1,
    "layout": "(in, out)",
    "dtype": dtype,
    "forward": forward_lines(config),
    "tensors": {name: list(x.shape) for name, x in sorted(tensors.items())},
    "config": config_lib.to_dict(config),
  }
  write_json(folder / PAGE, page)
  return {"files": [WEIGHTS, PAGE], "tensors": len(tensors)}


def forward_lines(config: ModelConfig) -> list[str]:
  """The forward pass in a few lines of text."""
  add = lambda name, text: text + (f" + b_{name}" if name in config.biases
                                   else "")
  norm = {
    "rms": "h / sqrt(mean(h^2) + eps) * scale",
    "layer": "(h - mean(h)) / sqrt(var(h) + eps) * scale + bias",
  }[config.norm]
  folded = "h, for this norm is folded"
  has = lambda mode: norm if mode == "norm" else folded
  internal = has(config.internal_norm)
  if config.internal_norm == "mixed":
    names = config_lib.site_names(config.num_layers)[:-1]
    modes = config.internal_modes
    kept = [n for n, mode in zip(names, modes, strict=True) if mode == "norm"]
    internal = f"{norm} in {', '.join(kept)}; elsewhere {folded}"
  learned = config.positions == "learned"
  up = add("up", "x W_up")
  hidden = {
    "swiglu": f"silu({add('gate', 'x W_gate')}) * ({up})",
    "gelu_tanh": f"gelu_tanh({up})",
    "gelu": f"gelu({up})",
  }[config.mlp]
  lines = [
    "h = embed[token]" + (" + position_embed[position]" if learned else ""),
    "each block: h = h + attn(attn_norm(h)), then h = h + mlp(mlp_norm(h))",
    f"attn_norm(h), mlp_norm(h) = {internal}; eps = norm_eps",
    "attn(x): " + ", ".join(add(n, f"{n} = x W_{n}") for n in "qkv")
    + "; kernels (width, heads, head_dim)",
    "a = softmax(q k / sqrt(head_dim)) v over earlier positions and its own; "
    "query head i reads key/value head i // (num_heads / num_kv_heads)",
    add("o", "attn = a W_o") + "; W_o (heads, head_dim, width)",
    add("down", f"mlp(x) = ({hidden}) W_down"),
    f"final_norm(h) = {has(config.final_norm)}",
    "logits = final_norm(h) embed^T" if config.tied
    else add("head", "logits = final_norm(h) W_head"),
  ]
  if not learned:
    lines.insert(4, (
      "q and k turn by position * frequency: coordinate i with i + "
      "rotary_dim / 2, frequency rope_theta^(-2 i / rotary_dim), stretched "
      "by rope_scaling"
    ))
  return lines


def read(folder: pathlib.Path) -> tuple[dict, ModelConfig]:
  """What `write` wrote, as float32: (params, config)."""
  import safetensors.numpy

  page = json.loads((folder / PAGE).read_text())
  tensors = safetensors.numpy.load_file(folder / WEIGHTS)
  shapes = {name: list(x.shape) for name, x in tensors.items()}
  if shapes != page["tensors"]:
    raise UserError(
      f"{folder / WEIGHTS} does not hold the tensors that {PAGE} lists; "
      "export the model again"
    )
  wide = {name: x.astype(np.float32) for name, x in tensors.items()}
  params = flax.traverse_util.unflatten_dict(wide, sep="/")
  return params, config_lib.model_from_dict(page["config"])
