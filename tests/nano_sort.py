"""gpt-nano-sort, a real GPT-2 of 85 thousand parameters that sorts.

It reads six symbols of {0, 1, 2}, then prints them sorted: positions 5 to 10
predict the six, each from those before it.
"""

from __future__ import annotations

import base64
import itertools
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np

from taperjax import model, saved
from taperjax.interop import gpt2

INPUTS = np.array(list(itertools.product(range(3), repeat=6)), np.int32)


def tensors_of(path: pathlib.Path) -> tuple[dict, dict[str, np.ndarray]]:
  """Configuration and arrays of a JSON file of base64 float32."""
  entries = json.loads(path.read_text())
  fields = entries.pop("config")
  arrays = {}
  for name, entry in entries.items():
    assert entry["dtype"] == "torch.float32"
    flat = np.frombuffer(base64.b64decode(entry["data"]), "<f4")
    arrays[name] = flat.reshape(entry["shape"])
  return fields, arrays


def read(test_data: pathlib.Path) -> tuple[saved.Model, dict[str, np.ndarray]]:
  """The model in Hugging Face's terms, matrices (out, in); and its tensors."""
  folder = test_data / "gpt-nano-sort"
  fields, tensors = tensors_of(folder / "gpt-nano-sort-model.json")
  hf_config = {
    "model_type": "gpt2", "activation_function": "gelu_new",
    "vocab_size": fields["vocab_size"], "n_positions": fields["block_size"],
    "n_embd": fields["n_embd"], "n_layer": fields["n_layer"],
    "n_head": fields["n_head"], "tie_word_embeddings": False,
  }
  return gpt2.from_tensors(hf_config, tensors), tensors


def sorted_inputs(params, c, gate: float, config) -> int:
  """How many of the 729 inputs come out sorted, greedily."""
  tokens_BL = np.pad(INPUTS, ((0, 0), (0, 5)))
  apply = jax.jit(
    lambda tokens_BL: model.Transformer(config).apply(
      {"params": params}, tokens_BL, gate=gate, c=jnp.asarray(c)
    )[0]
  )
  output = []
  for i in range(5, 11):
    next_B = np.asarray(apply(jnp.asarray(tokens_BL)))[:, i].argmax(axis=-1)
    output.append(next_B)
    if i < 10:
      tokens_BL[:, i + 1] = next_B
  found_BL = np.stack(output, axis=1)
  return int((found_BL == np.sort(INPUTS, axis=1)).all(axis=1).sum())


def batch(seed: int, step: int, size: int) -> tuple[np.ndarray, np.ndarray]:
  """(tokens (B, 12), mask (B, 11)): random inputs, the sorted part counts."""
  rng = np.random.default_rng((seed, step))
  inputs_B6 = rng.integers(0, 3, (size, 6), dtype=np.int32)
  tokens_BL1 = np.concatenate([inputs_B6, np.sort(inputs_B6, axis=1)], axis=1)
  mask_BL = np.zeros((size, 11), np.float32)
  mask_BL[:, 5:] = 1.0
  return tokens_BL1, mask_BL
