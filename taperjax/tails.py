"""What a mean loss does not show: tails, worst tokens, calibration, ranges.

A model without norms may give a few tokens an enormous loss; the mean alone
does not tell these from a bad model. All figures come from one forward pass;
there is no dropout in this package, so none is to be switched off.

Axes: B batch, L context length, T tokens (B and L flattened), V vocabulary,
N layers.
"""

from __future__ import annotations

import functools
import heapq
import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from taperjax import model as model_lib, ranges
from taperjax.config import ModelConfig
from taperjax.data.tokenizer import Tokenizer

BINS = 15  # of the calibration error, equally wide
WORST = 10  # tokens
BEFORE = 40  # characters before each of them
CHUNK = 256  # tokens whose logits are held at once


class Side(NamedTuple):
  """A model as the figures need it; gate 0.0 and 1.0 build one branch."""

  config: ModelConfig
  gate: float
  params: dict
  c: Any


def evaluate(
  model: Side,
  batches: Iterable[tuple[np.ndarray, np.ndarray]],
  *,
  tokenizer: Tokenizer | None = None,
  id_bytes: np.ndarray | None = None,
  reference: Side | None = None,
) -> dict[str, Any]:
  """Figures of one text, means over all scored tokens, in nats.

  Args:
    model: whose predictions are scored.
    batches: (tokens (B, L + 1) int32, mask (B, L)) of one shape; tokens with a
      mask above 0 are scored.
    tokenizer: for the texts of the worst tokens.
    id_bytes: UTF-8 bytes that each token id stands for, (V,).
    reference: a model of the same vocabulary.

  Returns:
    loss, bits_per_byte, tokens, mean_scale, logit_norm as
    `evaluation.evaluate`; median and p99_9, the 99.9th percentile of the loss
    of a token, between two tokens linear; worst, the ten tokens of the largest
    loss, each `nll, window, position, id, token, before`; entropy of the
    predictions; calibration_error (see there); jsd, the Jensen-Shannon
    divergence to the reference, or None; residuals: largest_by_layer, the
    largest |h| behind each block, and float16_margin. What is not finite stays
    so; a loss that is NaN counts as infinite.
  """
  sides = (model,) if reference is None else (model, reference)
  models = tuple((side.config, side.gate) for side in sides)
  weights = jax.device_put(tuple((side.params, side.c) for side in sides))
  parts, worst = [], []
  num_bytes, largest_N, windows = 0.0, 0.0, 0

  def fetch(pending):
    nonlocal largest_N, windows, worst
    tokens_BL1, mask_BL, (found, found_N) = pending
    found = jax.device_get(found)
    nll_BL = found["nll"]
    found["nll"] = nll_BL = np.where(np.isnan(nll_BL), np.inf, nll_BL)
    largest_N = np.maximum(largest_N, found_N)
    scored_BL = mask_BL > 0
    parts.append({name: x_BL[scored_BL] for name, x_BL in found.items()})
    worst = _worst(worst, nll_BL, scored_BL, tokens_BL1, windows)
    windows += len(tokens_BL1)

  pending = None
  for tokens_BL1, mask_BL in batches:
    tokens_BL1, mask_BL = np.asarray(tokens_BL1), np.asarray(mask_BL)
    started = _figures(models, weights, tokens_BL1, mask_BL)
    if id_bytes is not None:
      num_bytes += float(np.sum(id_bytes[tokens_BL1[:, 1:]][mask_BL > 0]))
    if pending is not None:
      fetch(pending)  # one batch late, so the device never waits
    pending = (tokens_BL1, mask_BL, started)
  if pending is not None:
    fetch(pending)
  found = {
    name: np.concatenate([part[name] for part in parts])
    for name in (parts[0] if parts else ())
  }
  if not parts or not len(found["nll"]):
    raise ValueError("nothing to evaluate: no batch held a scored token")
  mean = {
    name: float(np.mean(x_T, dtype=np.float64)) for name, x_T in found.items()
  }
  nll_T = found["nll"].astype(np.float64)
  with np.errstate(invalid="ignore"):  # between two infinite losses
    median, p99_9 = (float(x) for x in np.percentile(nll_T, (50, 99.9)))
  bits = mean["nll"] * len(nll_T) / math.log(2)
  return {
    "loss": mean["nll"],
    "bits_per_byte": bits / num_bytes if num_bytes else None,
    "tokens": len(nll_T),
    "mean_scale": mean["scale"],
    "logit_norm": mean["logit_norm"],
    "median": median,
    "p99_9": p99_9,
    "entropy": mean["entropy"],
    "calibration_error": calibration_error(found["top"], found["correct"]),
    "jsd": mean.get("jsd"),
    "residuals": {
      "largest_by_layer": largest_N.tolist(),
      "float16_margin": ranges.float16_margin(largest_N),
    },
    "worst": [_told(token, tokenizer) for token in worst],
  }


def calibration_error(top_T: np.ndarray, correct_T: np.ndarray) -> float:
  """Expected calibration error of the most likely token.

  Tokens go into 15 equally wide bins ((i / 15, (i + 1) / 15]) by the
  probability of their most likely token; the sum over bins of their share of
  all tokens times |share of right ones - mean probability|. Of several most
  likely tokens the lowest id is the prediction.

  Returns:
    From 0 to 1; NaN where a probability is.
  """
  if not np.all(np.isfinite(top_T)):
    return math.nan
  top_T = top_T.astype(np.float64)
  bin_T = np.clip(np.ceil(top_T * BINS).astype(int) - 1, 0, BINS - 1)
  gaps = np.bincount(bin_T, correct_T - top_T, BINS)
  return float(np.sum(np.abs(gaps)) / len(top_T))


def train_spike(
  records: Iterable[Mapping[str, Any]], last_step: int
) -> dict[str, Any] | None:
  """Largest rise of the logged training loss above its lowest value before.

  Args:
    records: of a metrics.jsonl; each loss is the mean of the steps since the
      record before it.
    last_step: later records are of no concern to the model.

  Returns:
    rise (0 if the loss only fell), and where: step, loss, lowest_before. None
    without a record.
  """
  train = [
    r for r in records if r["kind"] == "train" and r["step"] <= last_step
  ]
  if not train:
    return None
  losses = np.array([r["loss"] for r in train], np.float64)
  lowest = np.minimum.accumulate(losses)
  i = int(np.argmax(losses - lowest))
  return {
    "rise": float(losses[i] - lowest[i]),
    "step": train[i]["step"],
    "loss": float(losses[i]),
    "lowest_before": float(lowest[i]),
  }


@functools.partial(jax.jit, static_argnums=0)
def _figures(models, weights, tokens_BL1, mask_BL):
  """({figure: (B, L)}, largest_N) of one batch; logits exist by the chunk."""
  hidden, heads = [], []
  for i, ((config, gate), (params, c_S)) in enumerate(
    zip(models, weights, strict=True)
  ):
    hidden_BLD, aux, found_N = ranges.hidden_and_residuals(
      params, c_S, gate, config, tokens_BL1[:, :-1], mask_BL
    )
    hidden.append(hidden_BLD.reshape(-1, config.embed_dim))
    kernel_DV, bias_V = model_lib.head_weights(params, config)
    heads.append((kernel_DV.astype(hidden_BLD.dtype), bias_V))
    if i == 0:
      scale_BL, largest_N = aux["scale_BL"], found_N

  def token(h_target):
    *rows, target = h_target
    logits = [
      _logits(h_D, *head) for h_D, head in zip(rows, heads, strict=True)
    ]
    return _token(target, *logits)

  found = jax.lax.map(
    token, (*hidden, tokens_BL1[:, 1:].reshape(-1)), batch_size=CHUNK
  )
  found = {name: x_T.reshape(mask_BL.shape) for name, x_T in found.items()}
  return {**found, "scale": scale_BL}, largest_N


def _logits(h_D, kernel_DV, bias_V):
  z_V = jnp.dot(h_D, kernel_DV, preferred_element_type=jnp.float32)
  return z_V if bias_V is None else z_V + bias_V


def _token(target, z_V, other_V=None):
  """Figures of one prediction, float32; other_V: logits of the reference.

  The prediction is the lowest id of the largest logit; jnp.argmax is slow on a
  CPU, so it is right if no id below the target has that logit.
  """
  top, picked = jnp.max(z_V), z_V[target]
  e_V = jnp.exp(z_V - top)
  total = jnp.sum(e_V)
  lower = jnp.max(jnp.where(jnp.arange(len(z_V)) < target, z_V, -jnp.inf))
  found = {
    "nll": jnp.log(total) + (top - picked),
    "entropy": jnp.log(total) - jnp.sum(e_V * (z_V - top)) / total,
    "top": 1 / total,
    "correct": jnp.float32((picked == top) & (lower < top)),
    "logit_norm": jnp.sqrt(jnp.sum(z_V * z_V)),
  }
  if other_V is not None:
    found["jsd"] = _jsd(jax.nn.log_softmax(z_V), jax.nn.log_softmax(other_V))
  return found


def _jsd(logp_V, logq_V):
  """Jensen-Shannon divergence, by log m - log p with m = (p + q) / 2.

  Both logarithms are 0 where p = q, so that no rounding is left there. Where p
  is nothing beside q, how small it is does not count.
  """
  d_V = jnp.minimum(logq_V - logp_V, 60.0)
  m_V = jnp.log((1 + jnp.exp(d_V)) / 2)
  p_V, q_V = jnp.exp(logp_V), jnp.exp(logq_V)
  return jnp.sum(q_V * (d_V - m_V) - p_V * m_V) / 2


def _worst(worst, nll_BL, scored_BL, tokens_BL1, first_window):
  """The ten largest of those so far and of a batch; the earlier of two equal.

  A token is (nll, window, position, ids up to it): position 0 is the first id
  of a window, which is not scored.
  """
  losses_T = np.where(scored_BL, nll_BL, -np.inf).ravel()
  order = np.argsort(-losses_T, kind="stable")[:WORST]
  length = nll_BL.shape[1]
  found = []
  for row, i in zip(*np.divmod(order, length), strict=True):
    if scored_BL[row, i]:
      ids = tokens_BL1[row, : i + 2].tolist()
      found.append((
        float(nll_BL[row, i]), first_window + int(row), int(i) + 1, ids
      ))
  key = lambda token: (-token[0], *token[1:3])
  return heapq.nsmallest(WORST, [*worst, *found], key=key)


def _told(token, tokenizer):
  """A worst token as the result has it."""
  nll, window, position, ids = token
  told = {"nll": nll, "window": window, "position": position, "id": ids[-1]}
  if tokenizer is None:
    return {**told, "token": None, "before": None}
  # A row of a padded embedding stands for no text.
  *before, last = ([i] if i < tokenizer.vocab_size else [] for i in ids)
  text = tokenizer.decode(sum(before[-4 * BEFORE :], []))
  return {
    **told,
    "token": tokenizer.decode(last, continues=True),
    "before": text[-BEFORE:],
  }
