"""Folded tiny models with logits of about 1, or with a greedy text that varies.

Drawn as in tests/tiny.py a model soon repeats one token, which any wrong cache
would repeat as well. With a factor of 3 the blocks weigh more; such a model
rounds badly, so its ids are compared, not its logits.
"""

import functools

import jax
import jax.numpy as jnp

from taperjax import folding
from taperjax.model import Transformer
from tests import tiny


def model(config, factor: float = 1.0):
  """(params, config) of a tapered or baseline config, folded if tapered."""
  params = tiny.params(config)
  if config.tapered_sites:
    params, config = folding.fold(params, tiny.c(config), config)
  stronger = lambda tree: jax.tree.map(lambda x: factor * x, tree)
  for n in range(config.num_layers):
    block = params[f"block_{n}"]
    for name in ("attn", "mlp"):
      block[name] = stronger(block[name])
  if config.positions == "learned":
    params["position_embed"] = stronger(params["position_embed"])
  if not config.tied:
    std = jnp.std(logits(params, config, tiny.tokens(3, config.context_len)))
    params["head"] = jax.tree.map(lambda x: x / std, params["head"])
  return params, config


@functools.partial(jax.jit, static_argnames="config")
def logits(params, config, tokens_BL):
  """Of our model, all at once."""
  return Transformer(config).apply({"params": params}, tokens_BL)[0]
