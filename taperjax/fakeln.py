"""FakeLN, the removal of norms in hard cuts: statistics, factors, conversion.

Source: Baroni et al., arXiv:2507.02559, after Heimersheim, arXiv:2409.13710.
A site is what a norm is to one of its readers. Each block has three: the input
of queries and keys, the input of values (both of the attention norm), and the
MLP norm; the final norm follows. Until its cut a site is a real norm, from then
on it divides by a constant s: the running mean of the tokens' own s(h), frozen.
Where the cuts lie is `gate.cut_steps`.

Ours, where their code leaves it open or has faults: the averages take one
sample a step, in training alone; that of regular tokens leaves out position 0,
which has its own, and end of text; RMSNorm is served, too.

Axes: P sites (3 N + 1), S norms (2 N + 1), 2 averages (regular tokens,
position 0), 3 kinds of tokens (regular, position 0, end of text).
"""

from __future__ import annotations

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from taperjax.config import BIASES, ModelConfig
from taperjax.errors import UserError
from taperjax.gate import CutSteps


@flax.struct.dataclass
class FakeState:
  """What a FakeLN run knows beside its parameters.

  Attributes:
    std: running means of s(h), frozen at the cut; 0 before the first sample,
      float32 (P, 2).
    c: factors of the last step, 1 / s by site and kind of token, and 0 where
      the norm is real, float32 (P, 3).
    scale_target: of the scale loss at the last step, float32.
  """

  std: jax.Array
  c: jax.Array
  scale_target: jax.Array


def init(num_layers: int) -> FakeState:
  """A state without samples and without cuts."""
  sites = 3 * num_layers + 1
  return FakeState(
    std=jnp.zeros((sites, 2), jnp.float32),
    c=jnp.zeros((sites, 3), jnp.float32),
    scale_target=jnp.zeros((), jnp.float32),
  )


def site_names(num_layers: int) -> list[str]:
  """Names of the P sites in the order of `FakeState.c`."""
  names = []
  for n in range(num_layers):
    names += [f"block_{n}.qk", f"block_{n}.v", f"block_{n}.mlp"]
  return [*names, "final_norm"]


def cut_sites(step: jax.Array, cuts: CutSteps) -> jax.Array:
  """Which sites are cut at step k, bool (P,)."""
  return step > jnp.array(cuts.sites)


def factors(std_P2: jax.Array, step: jax.Array, cuts: CutSteps) -> jax.Array:
  """c_P3 of step k from the frozen means, see `FakeState.c`.

  Position 0 has its own mean at every site, and end-of-text tokens take it at
  the value sites, until these treatments end; then all tokens are alike.
  """
  c_P2 = jnp.where(std_P2 > 0, 1.0 / jnp.where(std_P2 > 0, std_P2, 1.0), 0.0)
  regular_P, first_P = c_P2[:, 0], c_P2[:, 1]
  is_value_P = jnp.arange(len(cuts.sites)) % 3 == 1
  eot_P = jnp.where(is_value_P & (step <= cuts.eot), first_P, regular_P)
  first_P = jnp.where(step <= cuts.position0, first_P, regular_P)
  c_P3 = jnp.stack([regular_P, first_P, eot_P], axis=-1)
  return jnp.where(cut_sites(step, cuts)[:, None], c_P3, 0.0)


def update(
  std_P2: jax.Array,
  sums_S2: jax.Array,
  weight_2: jax.Array,
  step: jax.Array,
  cuts: CutSteps,
  momentum: float,
) -> jax.Array:
  """One sample into the running means of the sites that are not cut.

  Args:
    std_P2: means so far; the first sample is taken as it is.
    sums_S2: weighted sums of s(h), from the forward pass of step k.
    weight_2: sums of the weights; a mean without any stays.
    step: k.
    cuts: a site that is cut at k is frozen.
    momentum: weight of the old mean.
  """
  blocks_N22 = sums_S2[:-1].reshape(-1, 2, 2)
  blocks_N32 = blocks_N22[:, [0, 0, 1]]  # q and k, v, MLP
  sums_P2 = jnp.concatenate([blocks_N32.reshape(-1, 2), sums_S2[-1:]])
  seen_2 = weight_2 > 0
  new_P2 = sums_P2 / jnp.where(seen_2, weight_2, 1.0)[None, :]
  mixed_P2 = momentum * std_P2 + (1.0 - momentum) * new_P2
  mixed_P2 = jnp.where(std_P2 > 0, mixed_P2, new_P2)
  frozen_P = cut_sites(step, cuts)
  kept_P2 = frozen_P[:, None] | ~seen_2[None, :]
  return jnp.where(kept_P2, std_P2, mixed_P2)


def moving_target(scale_BL: jax.Array, weight_BL2: jax.Array) -> jax.Array:
  """Target of the scale loss: mean s(h) over regular tokens of this batch.

  A constant to the gradient. With micro-batches each has its own, as in the
  authors' code. 1, their choice as well, where a batch has no regular token.
  """
  weight_BL = weight_BL2[..., 0]
  total = jnp.sum(weight_BL)
  mean = jnp.sum(weight_BL * scale_BL) / jnp.where(total > 0, total, 1.0)
  return jax.lax.stop_gradient(jnp.where(total > 0, mean, 1.0))


def to_taper(
  params: dict, c_P3: Any, config: ModelConfig
) -> tuple[dict, np.ndarray, ModelConfig]:
  """The same function as a model with tapered norms, at gate 0.

  gamma~ is gamma. The two readers of an attention norm were frozen at different
  steps, and a tapered norm has one c: v takes the difference into its kernel,
  W' = r W with r = c_v / c_qk, and of LayerNorm into its bias,
  b' = b + (1 - r) beta W, since beta is not scaled. Products are taken in
  float64 and rounded once.

  Args:
    params: of a run whose treatments have all ended, stacked or not.
    c_P3: its factors, alike for all kinds of tokens.
    config: its model.

  Returns:
    (params, c_S, config); `biases` may have gained "v".

  Raises:
    UserError: a site never had a sample.
  """
  c_P = np.asarray(c_P3, np.float64)[:, 0]
  if not np.all(c_P > 0):
    site = site_names(config.num_layers)[int(np.argmin(c_P))]
    raise UserError(
      f"c={c_P.min():g} at {site}: no regular token was seen before its cut, "
      "so the run has no divisor for it; train on text, or raise fakeln.start"
    )
  c_N3 = c_P[:-1].reshape(config.num_layers, 3)
  c_S = np.append(c_N3[:, ::2].ravel(), c_P[-1]).astype(np.float32)
  # Of c as it is kept, rounded to float32.
  ratio_N = c_N3[:, 1] / c_S[:-1:2].astype(np.float64)

  def tapered(norm):
    return {**norm, "taper_scale": np.array(norm["scale"])}

  def converted(block, ratio):
    v, attn_norm = block["attn"]["v"], block["attn_norm"]
    kernel = np.asarray(v["kernel"], np.float64)
    lead = np.asarray(ratio)[..., None, None]  # of the bias, (G, K)
    new = {"kernel": (lead[..., None] * kernel).astype(np.float32)}
    if "bias" in v:
      new["bias"] = v["bias"]
    if config.norm == "layer":
      beta = np.asarray(attn_norm["bias"], np.float64)
      shift = np.einsum("...D,...DGK->...GK", beta, kernel)
      bias = v.get("bias", 0.0) + (1.0 - lead) * shift
      new["bias"] = np.asarray(bias, np.float32)
    return {
      **block,
      "attn": {**block["attn"], "v": new},
      "attn_norm": tapered(attn_norm),
      "mlp_norm": tapered(block["mlp_norm"]),
    }

  params = {**params, "final_norm": tapered(params["final_norm"])}
  if config.scan_layers:
    params["blocks"] = converted(params["blocks"], ratio_N)
  else:
    for n in range(config.num_layers):
      params[f"block_{n}"] = converted(params[f"block_{n}"], ratio_N[n])
  biases = set(config.biases) | ({"v"} if config.norm == "layer" else set())
  config = config.replace(
    internal_norm="taper",
    final_norm="taper",
    eot_id=None,
    biases=tuple(name for name in BIASES if name in biases),
  )
  return params, c_S, config
