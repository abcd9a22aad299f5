"""Synthetic workdirs for the tests of the report: no training, no jax."""

from __future__ import annotations

import json
import math
import pathlib

import numpy as np

from taperjax import config as config_lib
from tests import tiny

END = {  # validation loss of seed 0, growth of the logits, pull, push back
  "baseline": (2.00, 1.1, 0.0, 0.0),
  "internal": (2.03, 1.2, -0.0001, 0.0),
  "internal_aux": (2.02, 1.1, -0.0001, 0.3),
  "final": (2.06, 9.0, -3.5, 0.0),
  "all": (2.08, 12.0, -4.5, 0.0),
  "all_aux": (2.04, 1.3, -0.9, 0.8),
  "vanilla": (2.00, 1.1, 0.0, 0.0),
  "fakeln": (2.10, 2.0, -0.5, 0.4),
}


def config(variant: str, seeds, **changes) -> dict:
  """A resolved configuration of 1,000 steps, as config.json holds it."""
  fields = tiny.fields(**{
    "variant": variant, "seeds": tuple(seeds), "steps": 1_000, **changes
  })
  return config_lib.to_dict(config_lib.parse(fields))


def loss(variant: str, seed: int) -> float:
  """Validation loss at the end; exact decimals, so tables can be checked."""
  return END[variant][0] + 0.001 * seed


def write(
  folder: pathlib.Path,
  variant: str,
  seeds=(0,),
  *,
  records: int = 50,
  stop: int | None = None,
  losses: dict[int, float] | None = None,
  diverged: dict[int, int] | None = None,
  anchor: bool = True,
  sample: str = "Once upon a time.",
  **changes,
) -> pathlib.Path:
  """A workdir; `stop` leaves it unfinished after that step."""
  fields = config(variant, seeds, **changes)
  folder.mkdir(parents=True)
  many, steps = len(seeds) > 1, fields["steps"]
  diverged, losses = diverged or {}, losses or {}
  tapers = fields["model"]["final_norm"] == "taper" or (
    fields["model"]["internal_norm"] == "taper"
  )
  layers = fields["model"]["num_layers"]
  end, growth, pull, push = END[variant]
  rng = np.random.default_rng(0)
  found = {s: losses.get(s, loss(variant, s)) for s in seeds}
  sites = [f"block_{i}.{n}_norm" for i in range(layers)
           for n in ("attn", "mlp")] + ["final_norm"]

  def by_seed(value, k=0):
    """value(seed) of each, None from where it diverged."""
    row = [None if k >= diverged.get(s, math.inf) else value(s) for s in seeds]
    return row if many else row[0]

  def noisy(value):
    return lambda seed: float(value * (1 + 0.02 * rng.standard_normal()))

  lines, start = [], steps // 20
  for j in range(1, records + 1):
    k = round(j * steps / records)
    if stop is not None and k > stop:
      break
    share = max(0.0, (k - start) / (steps - start))
    gate = (1 + math.cos(math.pi * share)) / 2 if tapers else 1.0
    logits = 50 * (1 + 3 * min(1, k / start)) * growth**share
    level = 2.0 * (growth**share)
    train = {
      "gate": lambda s, g=gate: g,
      "learning_rate": lambda s, x=share: 3e-4 * (1 - x),
      "loss": lambda s, k=k: found[s] + 6 * math.exp(-6 * k / steps)
      + 0.03 * float(rng.standard_normal()),
      "logit_norm": noisy(logits),
      "mean_scale": noisy(level),
      "scale_loss": lambda s: 0.0,
      **{f"grad_norm_{n}": noisy((0.05 + 0.2 * math.exp(-5 * k / steps))
                                 / growth**share)
         for n in ("qkv", "attn_out", "mlp_in", "mlp_out")},
    }
    record = {n: by_seed(v, k) for n, v in train.items()}
    target = by_seed(lambda s: 2.0, k) if tapers and k > start else None
    lines.append({"step": k, "kind": "train", **record,
                  "scale_target": target, "tokens_per_s": 1_000.0})
    if tapers and k >= start and not any(r["kind"] == "calibration"
                                         for r in lines):
      lines.append({
        "step": k, "kind": "calibration",
        "scale_target": by_seed(lambda s: 2.0, k),
        **{f"c/{site}": by_seed(noisy(0.5 / (1 + i)), k)
           for i, site in enumerate(sites)},
      })
    if j % max(1, records // 10) == 0:
      values = {
        "valid_loss": lambda s, k=k: found[s] + 6 * (
          math.exp(-6 * k / steps) - math.exp(-6)),
        "gate": lambda s, g=gate: g,
        "logit_norm": noisy(logits),
        "mean_scale": noisy(level),
        "bits_per_byte": lambda s: found[s] / 2,
        "sample": lambda s, k=k: f"{sample} {s} at {k}",
      }
      values["valid_loss_g0"] = values["valid_loss"]
      if anchor:
        values |= {
          "radial_ce": noisy(pull * share),
          "radial_scale": noisy(push * share),
          "margin": noisy(-1 + share), "margin_share": noisy(0.3 + 0.2 * share),
          **{f"residual_rms/{n}": noisy(0.02 * 3**n)
             for n in range(layers + 1)},
        }
      record = {n: by_seed(v, k) for n, v in values.items()}
      lines.append({"step": k, "kind": "eval", **record})
  (folder / "config.json").write_text(json.dumps(fields))
  (folder / "metrics.jsonl").write_text(
    "".join(json.dumps(line) + "\n" for line in lines)
  )
  if stop is None:
    fold = None
    if tapers:
      fold = {n: by_seed(lambda s: 1e-6 * (1 + s), steps) for n in (
        "max_abs_delta_logit_f32", "kl_f32", "loss_delta_f32",
        "max_abs_delta_logit_bf16", "kl_bf16")}
      fold |= {n: by_seed(lambda s: 1 - 0.01 * s, steps)
               for n in ("top1_f32", "top1_bf16")}
      fold["logit_scale_f32"] = by_seed(lambda s: 20.0, steps)
    of = lambda value: by_seed(value, steps)
    summary = {
      "variant": variant, "norm": fields["norm"], "size": fields["size"],
      "seed": list(seeds) if many else seeds[0], "steps": steps,
      "valid_loss": of(lambda s: found[s]),
      "valid_loss_g0": of(lambda s: found[s]),
      "valid_loss_folded": of(lambda s: found[s]) if tapers else None,
      "bits_per_byte": of(lambda s: found[s] / 2),
      "logit_norm": of(lambda s: 200 * growth),
      "mean_scale": of(lambda s: 2.0 * growth),
      "scale_target": of(lambda s: 2.0) if tapers else None,
      "c": [{"site": site, "c": of(noisy(0.5 / (1 + i)))}
            for i, site in enumerate(sites)] if tapers else [],
      "fold": fold,
      "decode": {
        "unfolded_tokens_per_s": 1_000.0,
        "folded_tokens_per_s": 1_100.0 if tapers else None,
        "batch_size": 1, "prompt_len": 16, "new_tokens": 64, "repeats": 7,
      },
      "sample": of(lambda s: f"{sample} {s}"),
      "wall_s": 4_000.0, "commit": "0123456789ab", "device": "cpu",
      "cpu_count": 2, "versions": {"python": "3.11", "jax": "0.10"},
    }
    if many:
      summary["diverged"] = [diverged.get(s) for s in seeds]
    (folder / "summary.json").write_text(json.dumps(summary))
  return folder
