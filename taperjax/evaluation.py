"""Loss on fixed windows: token mean in nats, and bits per byte.

Every token but the first of the stream is scored once. bits_per_byte is the
total nats of the scored tokens / (ln 2 * UTF-8 bytes of the text they stand
for); end-of-text tokens are scored and add no bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import jax
import numpy as np

Batches = Iterable[tuple[np.ndarray, np.ndarray]]


def evaluate(
  eval_step: Callable[..., dict[str, jax.Array]],
  params: dict,
  batches: Batches,
  *,
  c: jax.Array | None,
  gate: float | jax.Array,
  id_bytes: np.ndarray | None = None,
) -> dict[str, float | int | None]:
  """Means over all scored tokens; sums are added up in float64.

  Args:
    eval_step: from `step.make_eval_step`.
    params: parameters. c: calibrated factors, or None without tapers.
    batches: (tokens (B, L + 1) int32, mask (B, L)) of one shape.
    gate: gate of the tapered norms; 0.0 as in the paper (section 5.1).
    id_bytes: UTF-8 bytes that each token id stands for, (V,).

  Returns:
    loss (nats per token), bits_per_byte, tokens (scored), mean_scale (mean
    s(h) before the final norm), logit_norm (mean l2 norm of the logits).
  """
  totals = {"nll": 0.0, "logit_norm": 0.0, "scale": 0.0, "tokens": 0.0}
  num_bytes = 0.0

  def fetch(sums):
    for name, value in jax.device_get(sums).items():
      totals[name] += float(value)

  pending = None
  for tokens_BL1, mask_BL in batches:
    sums = eval_step(params, c, gate, tokens_BL1, mask_BL)
    if id_bytes is not None:
      num_bytes += float(np.sum(id_bytes[tokens_BL1[:, 1:]] * mask_BL))
    if pending is not None:
      fetch(pending)  # one batch late, so the device never waits
    pending = sums
  if pending is not None:
    fetch(pending)
  tokens = totals["tokens"]
  if not tokens:
    raise ValueError("nothing to evaluate: no batch held a scored token")
  bits = totals["nll"] / math.log(2)
  return {
    "loss": totals["nll"] / tokens,
    "bits_per_byte": bits / num_bytes if num_bytes else None,
    "tokens": round(tokens),
    "mean_scale": totals["scale"] / tokens,
    "logit_norm": totals["logit_norm"] / tokens,
  }
