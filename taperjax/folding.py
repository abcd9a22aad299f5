"""Folds the tapered norms at gate 0 into the matrices that read them.

At g = 0 a tapered norm is a fixed linear (RMSNorm) or affine (LayerNorm) map,
so the next projection can carry it: the folded model has no such norm at all.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from taperjax.config import BIASES, ModelConfig, site_names
from taperjax.errors import UserError
from taperjax.model import Transformer


def fold(
  params: dict, c_S: Any, config: ModelConfig
) -> tuple[dict, ModelConfig]:
  r"""The same model at g = 0 without its tapered norms.

  RMSNorm: W' = c D_gamma~ W. LayerNorm: W' = c (I - 1 1^T / D) D_gamma~ W and
  b' = b + beta W: the stream is centred first, then scaled. Source:
  arXiv:2602.10408 (v1), section 3.3 and appendix B. Attention norms go into
  q, k, v; MLP norms into gate and up; the final norm into the head, which is
  untied from the embedding. Products are taken in float64 and rounded once, to
  the dtype of the leaf.

  Args:
    params: parameters, numpy or jax arrays; left as they are, and no array of
      the result is one of theirs, so either tree may be donated.
    c_S: calibrated factors by site, (2 N + 1,).
    config: the model they belong to, with or without `scan_layers`.

  Returns:
    (params, config): no parameter of a folded norm is left, the modes of the
    folded norms are "none", and `biases` names the projections that gained one.

  Raises:
    UserError: nothing to fold, folded already, or c not calibrated.
  """
  check_config(config)
  c_S = np.asarray(c_S, np.float64)
  check_c(c_S, config)
  folded = jax.tree.map(_copy, params)
  c_N2, modes = c_S[:-1].reshape(config.num_layers, 2), config.modes
  if config.scan_layers:
    _fold_block(folded["blocks"], c_N2.T, modes[:2], config)
  else:
    for n in range(config.num_layers):
      pair = modes[2 * n : 2 * n + 2]
      _fold_block(folded[f"block_{n}"], c_N2[n], pair, config)
  if config.final_norm == "taper":
    if config.tied:
      folded["head"] = {"kernel": folded["embed"]["embedding"].T}
    _fold_linear(folded["head"], folded.pop("final_norm"), c_S[-1], config)
  return folded, folded_config(config)


def folded_config(config: ModelConfig) -> ModelConfig:
  """The configuration that runs the folded parameters."""
  biases, modes = set(config.biases), config.modes
  if config.norm == "layer":
    for i, names in enumerate(_readers(config).values()):
      if "taper" in modes[i:-1:2]:
        biases.update(names)
    if modes[-1] == "taper":
      biases.add("head")
  return config.with_modes(
    ["none" if mode == "taper" else mode for mode in modes]
  ).replace(
    biases=tuple(name for name in BIASES if name in biases),
    tied=config.tied and modes[-1] != "taper",
  )


def check_config(config: ModelConfig) -> None:
  """Raises UserError where the model has no tapered norm to fold."""
  if config.tapered_sites:
    return
  modes = (config.internal_norm, config.final_norm)
  if "fake" in modes:
    raise UserError(
      "internal_norm=fake: the norms of this FakeLN run are not all cut, but "
      "folding needs gate 0; finish the run, then fold"
    )
  if "none" in config.modes:
    raise UserError(
      f"internal_norm={modes[0]} and final_norm={modes[1]}: this model is "
      "folded already; use it as it is"
    )
  raise UserError(
    f"internal_norm={modes[0]} and final_norm={modes[1]}: nothing is tapered, "
    "so nothing can be folded; train a tapered variant, for example "
    "internal_aux"
  )


def check_foldable(
  gate: float, step: int, config: ModelConfig, taper_end: int | None = None
) -> None:
  """Raises UserError unless a run's model is tapered and its gate is 0.

  Args:
    gate: g of the checkpoint.
    step: its step, for the message.
    config: its model.
    taper_end: first step with gate 0, named in the message when known.
  """
  check_config(config)
  gate = float(gate)
  if gate != 0:
    when = "" if taper_end is None else f" (it is 0 from step {taper_end})"
    raise UserError(
      f"gate={gate:.4g} at step {step}, but folding needs gate 0; finish the "
      f"run{when}, then fold"
    )


def check_c(c_S: np.ndarray, config: ModelConfig, then: str = "fold") -> None:
  """Raises UserError where a tapered site has no factor; `then` is the aim."""
  sites = 2 * config.num_layers + 1
  if c_S.shape != (sites,):
    raise ValueError(f"c has shape {c_S.shape}, the model {sites} norm sites")
  names = site_names(config.num_layers)
  for site in config.tapered_sites:
    if not (np.isfinite(c_S[site]) and c_S[site] > 0):
      raise UserError(
        f"c={c_S[site]:g} at {names[site]} is not a calibrated factor, which "
        "is above 0 and finite; calibrate (train past taper start), then "
        f"{then}"
      )


def _readers(config: ModelConfig) -> dict[tuple[str, str], tuple[str, ...]]:
  """(norm, module that reads it) -> its projections, within a block."""
  mlp = ("gate", "up") if config.mlp == "swiglu" else ("up",)
  return {("attn_norm", "attn"): ("q", "k", "v"), ("mlp_norm", "mlp"): mlp}


def _fold_block(
  block: dict, c_2: np.ndarray, modes: Sequence[str], config: ModelConfig
) -> None:
  """Folds the norms of one block, or of all when stacked (c_2 is c_2N).

  Next to a norm that stays, a projection gets a bias of zeros where its likes
  in other blocks gain one, since `biases` holds for all blocks.
  """
  biases = folded_config(config).biases
  for c, mode, ((norm, module), names) in zip(
    c_2, modes, _readers(config).items(), strict=True
  ):
    gains = block.pop(norm) if mode == "taper" else None
    for name in names:
      linear = block[module][name]
      if gains is not None:
        _fold_linear(linear, gains, c, config)
      elif name in biases and "bias" not in linear:
        kernel = linear["kernel"]
        lead = np.ndim(c)
        shape = kernel.shape[:lead] + kernel.shape[lead + 1 :]
        linear["bias"] = _like(np.zeros(shape), kernel)


def _fold_linear(linear: dict, norm: dict, c, config: ModelConfig) -> None:
  """Replaces kernel and bias of a projection (D, ...), or of a stack of them.

  With a leading layer axis N: c is (N,), the gains (N, D), the kernel
  (N, D, ...).
  """
  kernel, c = linear["kernel"], np.asarray(c)
  lead = c.shape
  wide = lambda x: np.asarray(x, np.float64)
  # D x F, whatever the axes behind D are (heads and head size, or one).
  w_DF = wide(kernel).reshape(*lead, config.embed_dim, -1)
  scale_D = c[..., None] * wide(norm["taper_scale"])
  out_DF = scale_D[..., :, None] * w_DF
  if config.norm == "layer":
    # (I - 1 1^T / D) from the left: the mean over the input axis goes.
    out_DF = out_DF - out_DF.mean(axis=-2, keepdims=True)
    bias_F = np.einsum("...D,...DF->...F", wide(norm["bias"]), w_DF)
    bias = bias_F.reshape(*lead, *kernel.shape[len(lead) + 1 :])
    if "bias" in linear:
      bias = wide(linear["bias"]) + bias
    linear["bias"] = _like(bias, kernel)
  linear["kernel"] = _like(out_DF.reshape(kernel.shape), kernel)


def _copy(leaf):
  if isinstance(leaf, np.ndarray):
    return leaf.copy()
  return jnp.array(leaf, copy=True)


def _like(x: np.ndarray, leaf):
  """x rounded once to the dtype of a leaf, in its kind of array."""
  x = x.astype(leaf.dtype)
  return x if isinstance(leaf, np.ndarray) else jnp.asarray(x)


def folded_tensors(config: ModelConfig) -> list[dict[str, str]]:
  """What `fold` replaces: tensor, formula and norm site, one dict for each.

  Args:
    config: the model before folding. A stacked tensor appears once for each
      layer, as name[layer].
  """
  check_config(config)
  layer = config.norm == "layer"
  left = "c (I - 1 1^T / D) diag(taper_scale)" if layer else (
    "c diag(taper_scale)"
  )

  def entries(prefix, name, index, norm, source) -> Iterator[dict[str, str]]:
    path = f"{prefix}/{name}"
    yield {
      "name": f"{path}/kernel{index}",
      "formula": f"W' = {left} {source}",
      "norm": norm,
    }
    if layer:
      had = name in config.biases
      yield {
        "name": f"{path}/bias{index}",
        "formula": f"b' = {'b + ' if had else ''}bias {source}",
        "norm": norm,
      }

  found = []
  readers, sites = list(_readers(config).items()), site_names(config.num_layers)
  for i in config.tapered_sites:
    if i == 2 * config.num_layers:
      continue
    n, (_, module), names = i // 2, *readers[i % 2]
    block, index = f"block_{n}", ""
    if config.scan_layers:
      block, index = "blocks", f"[{n}]"
    for name in names:
      found += entries(f"{block}/{module}", name, index, sites[i], "W")
  if config.final_norm == "taper":
    source = "embedding^T" if config.tied else "W"
    for entry in entries("", "head", "", "final_norm", source):
      found.append({**entry, "name": entry["name"].lstrip("/")})
  return found


@functools.partial(jax.jit, static_argnames=("config", "folded_config"))
def _compare_row(
  params, c_S, folded_params, tokens_L1, mask_L, *, config, folded_config
):
  """Sums and maxima over the scored tokens of one row, float32."""
  tokens_BL, target_L1 = tokens_L1[None, :-1], tokens_L1[1:, None]
  old_BLV, _ = Transformer(config).apply(
    {"params": params}, tokens_BL, gate=0.0, c=c_S
  )
  new_BLV, _ = Transformer(folded_config).apply(
    {"params": folded_params}, tokens_BL, gate=0.0, c=c_S
  )
  old_LV, new_LV = old_BLV[0], new_BLV[0]
  scored_L = mask_L > 0
  mask_L = mask_L.astype(jnp.float32)
  delta_LV = jnp.abs(new_LV - old_LV)
  p_LV, q_LV = jax.nn.log_softmax(old_LV), jax.nn.log_softmax(new_LV)
  x_LV = p_LV - q_LV
  # sum p x = sum p (x + e^-x - 1), since p and q both sum to 1: no term is
  # negative, so the rounding of the sums cannot drown a KL of 1e-12.
  kl_L = jnp.sum(jnp.exp(p_LV) * (x_LV + jnp.expm1(-x_LV)), axis=-1)
  same_L = jnp.argmax(old_LV, axis=-1) == jnp.argmax(new_LV, axis=-1)
  loss_L = jnp.take_along_axis(x_LV, target_L1, axis=-1)[:, 0]
  most = lambda x_LV: jnp.max(jnp.where(scored_L, jnp.max(x_LV, axis=-1), 0.0))
  return {
    "max_abs_delta_logit": most(delta_LV),
    "logit_scale": most(jnp.abs(old_LV)),
    "mean_abs_delta_logit": jnp.sum(mask_L * jnp.mean(delta_LV, axis=-1)),
    "kl": jnp.sum(mask_L * kl_L),
    "top1": jnp.sum(mask_L * same_L),
    "loss_delta": jnp.sum(mask_L * loss_L),
  }


def compare(
  params: dict,
  c_S: Any,
  config: ModelConfig,
  folded_params: dict,
  folded_config: ModelConfig,
  tokens_BL1: Any,
  mask_BL: Any,
) -> dict[str, float]:
  """How far the folded model is from the unfolded one at g = 0.

  Rows run one at a time, so 2 L V logits are held at once, whatever B is.

  Args:
    params, c_S, config: the unfolded model.
    folded_params, folded_config: what `fold` made of it.
    tokens_BL1: int32 ids, L + 1 in each row.
    mask_BL: weight of each predicted token, 0 for padding.

  Returns:
    For suffix f32 and bf16, the dtype both models compute in from the same
    parameters: max_abs_delta_logit; mean_abs_delta_logit; logit_scale, the
    largest unfolded |logit|; kl, mean KL(unfolded || folded) in nats per token;
    top1, share of tokens with the same most likely successor; loss_delta, loss
    folded minus unfolded in nats per token.
  """
  tokens_BL1, mask_BL = np.asarray(tokens_BL1), np.asarray(mask_BL)
  tokens = float(np.sum(mask_BL, dtype=np.float64))
  if not tokens > 0:
    raise ValueError("no token is scored: mask_BL is 0 everywhere")
  c_S = jnp.asarray(c_S, jnp.float32)
  report = {}
  for suffix, dtype in (("f32", "float32"), ("bf16", "bfloat16")):
    configs = {
      "config": config.replace(compute_dtype=dtype),
      "folded_config": folded_config.replace(compute_dtype=dtype),
    }
    rows = []
    for tokens_L1, mask_L in zip(tokens_BL1, mask_BL, strict=True):
      row = _compare_row(
        params, c_S, folded_params, tokens_L1, mask_L, **configs
      )
      rows.append(jax.device_get(row))
    for name in rows[0]:
      values = [float(row[name]) for row in rows]
      if name in ("max_abs_delta_logit", "logit_scale"):
        value = float(np.max(values))  # np.max passes a NaN on, max may not
      else:
        value = sum(values) / tokens
      report[f"{name}_{suffix}"] = value
  return report
