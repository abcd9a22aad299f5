"""Tiny models and runs for the tests, with nothing at its neutral value.

Sizes differ pairwise where an axis could be swapped: B 3, L 7, H 2, K 4, D 8,
F 20, V 31. Gains are random in [0.3, 3] and biases are not zero, since unit
gains and zero biases hide a wrong axis, a lost gain and a lost bias.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from taperjax import config as config_lib, model, state
from taperjax.config import Config, ModelConfig

B, L, H, K, D, F, V = 3, 7, 2, 4, 8, 20, 31
N = 2  # layers
M = 13  # context length of a bare model: longer than L
S = 2 * N + 1  # norm sites


def model_config(**changes) -> ModelConfig:
  """A Llama-like model, both kinds of norm tapered, unless changed."""
  fields = {
    "num_layers": N,
    "embed_dim": D,
    "num_heads": H,
    "num_kv_heads": H,
    "head_dim": K,
    "mlp_dim": F,
    "mlp": "swiglu",
    "positions": "rope",
    "rope_theta": 100.0,
    "rotary_dim": K,
    "norm_eps": 1e-5,
    "biases": (),
    "tied": True,
    "init_std": 0.02,
    "scan_layers": False,
    "norm": "rms",
    "internal_norm": "taper",
    "final_norm": "taper",
    "vocab_size": V,
    "context_len": M,
    "compute_dtype": "float32",
  }
  return ModelConfig(**{**fields, **changes})


def gpt2_config(**changes) -> ModelConfig:
  """A GPT-2-like model: LayerNorm, learned positions, gelu_tanh, biases."""
  fields = {
    "norm": "layer",
    "positions": "learned",
    "mlp": "gelu_tanh",
    "biases": ("q", "k", "v", "o", "up", "down"),
  }
  return model_config(**{**fields, **changes})


def fields(**changes) -> dict:
  """What a config file would hold; `model__tied=False` changes one field.

  Ten steps: 1..4 in the norm phase, 5..7 in the taper phase, 8..10 at gate 0.
  """
  config = {
    "size": "tiny",
    "variant": "all_aux",
    "norm": "rms",
    "seeds": (0,),
    "steps": 10,
    "batch_size": B,
    "micro_batches": 1,
    "context_len": L,
    "compute_dtype": "float32",
    "log_every": 1,
    "nonfinite": "stop",
    "model": {
      "num_layers": N,
      "embed_dim": D,
      "num_heads": H,
      "num_kv_heads": None,
      "head_dim": None,
      "mlp_dim": F,
      "mlp": "swiglu",
      "positions": "rope",
      "rope_theta": 100.0,
      "rotary_dim": None,
      "norm_eps": 1e-5,
      "biases": (),
      "tied": True,
      "init_std": 0.02,
      "scan_layers": False,
      "remat": False,
    },
    "taper": {
      "start": 0.4,
      "end": 0.8,
      "ema_rate": 0.1,
      "scale_loss_weight": 0.1,
      "shape": "cosine",
      "calibrate": True,
      "train_gain": True,
      "scale_loss_schedule": "constant",
      "sites": None,
    },
    "optimizer": {
      "learning_rate": 1e-2,
      "final_learning_rate": 1e-3,
      "warmup": 0.2,
      "b1": 0.9,
      "b2": 0.95,
      "eps": 1e-8,
      "weight_decay": 0.0,
      "clip_norm": 1.0,
    },
    "data": {
      "train": "corpus",
      "valid": "corpus",
      "tokenizer": "sentencepiece",
      "vocab_size": 300,
      "folder": None,
      "corpus_stories": 20,
    },
    "eval": {
      "every": 5,
      "batch_size": B,
      "max_windows": None,
      "prompt": "Once",
      "sample_tokens": 5,
    },
    "checkpoint": {"every": 5},
    "fold": {"untie": True},
    "init": {"checkpoint": None},
    "lora": {"rank": 0, "alpha": 16.0, "targets": ("q", "v")},
    "mesh": {"seed": 1, "data": 1, "fsdp": 1, "tensor": 1},
    # Cuts after steps 1 to 7, the treatments end after 8 and 9.
    "fakeln": {
      "start": 1,
      "gap_mlp": 1,
      "gap_qk": 1,
      "gap_v": 1,
      "eot_after": 1,
      "position0_after": 1,
      "momentum": 0.9,
    },
  }
  for name, value in changes.items():
    group = config
    *parents, last = name.split("__")
    for parent in parents:
      group = group[parent]
    group[last] = value
  return config


def config(**changes) -> Config:
  """A parsed run of ten steps with V tokens; changes as for `fields`."""
  return config_lib.parse(fields(**changes)).with_vocab(V)


def params(config: ModelConfig, seed: int = 0) -> dict:
  """Random parameters: gains in [0.3, 3], biases of 0.3, logits of about 1."""
  rng = np.random.default_rng(seed)
  shapes = jax.eval_shape(lambda: model.init_params(config, jax.random.key(0)))

  def draw(path, leaf):
    name = path[-1].key
    if name in ("scale", "taper_scale"):
      value = np.exp(rng.uniform(np.log(0.3), np.log(3.0), leaf.shape))
    elif name == "bias" or name == "embedding":
      value = rng.normal(0.0, 0.3, leaf.shape)
    else:
      value = rng.normal(0.0, 0.25, leaf.shape)
    return jnp.asarray(value, jnp.float32)

  return jax.tree_util.tree_map_with_path(draw, shapes)


def c(config: ModelConfig, seed: int = 1) -> jax.Array:
  """Factors of the S sites, all different, zero where nothing tapers."""
  sites = 2 * config.num_layers + 1
  rng = np.random.default_rng(seed)
  values = np.zeros(sites, np.float32)
  tapered = config.tapered_sites
  values[tapered] = rng.uniform(0.5, 1.5, len(tapered))
  return jnp.asarray(values)


def tokens(batch: int = B, length: int = L, seed: int = 2) -> jax.Array:
  """Token ids (batch, length), int32."""
  rng = np.random.default_rng(seed)
  return jnp.asarray(rng.integers(0, V, (batch, length)), jnp.int32)


def mask(batch: int = B, length: int = L) -> jax.Array:
  """Ones but for padding of unequal length at the end of each row."""
  ends = length - 2 * np.arange(batch) % length
  return jnp.asarray(np.arange(length)[None] < ends[:, None], jnp.float32)


def train_state(config: Config, seed: int = 0, **changes) -> state.TrainState:
  """A fresh state, as `state.create` makes it, but for its parameters."""
  weights = params(config.model, seed)
  fresh = state.TrainState(
    step=jnp.zeros((), jnp.int32),
    params=weights,
    opt_state=state.make_tx(config).init(weights),
    gate=jnp.ones((), jnp.float32),
    taper=state.statistics(config),
    key=jax.random.key(seed),
  )
  return fresh.replace(**changes)
