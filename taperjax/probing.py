"""Which norms of a trained model are free to remove.

Each norm has a fixed map that fits it best, c h gamma with c in closed form
(LayerNorm: c (h - mean) gamma + beta): what TaperNorm is at gate 0 right after
calibration. Measured is how much the loss grows where one norm alone is
replaced by its map, then where all are, one after another in that order.
Nothing is trained, and c is not fitted again on the way.

Axes: S norm sites (2 N + 1), B batch, L context length.
"""

from __future__ import annotations

import contextlib
import functools
import math
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from taperjax import calibration, drawing, evaluation, model, step
from taperjax.config import ModelConfig, site_names
from taperjax.data import files
from taperjax.errors import UserError
from taperjax.metrics import Progress

Batch = tuple[np.ndarray, np.ndarray]


def open_sites(config: ModelConfig, gate: float) -> list[int]:
  """Indices of the sites where a norm still stands.

  Raises:
    UserError: there is none, or the model is on the way from norms to maps.
  """
  if config.internal_norm == "fake":
    raise UserError(
      "this is the middle of a FakeLN run, whose norms are cut one by one; "
      "probe the model that it started from"
    )
  if config.tapered_sites and 0.0 < gate < 1.0:
    raise UserError(
      f"gate={gate:g}: this model is between norms and fixed maps; probe a "
      "checkpoint at gate 1 (every norm stands) or 0"
    )
  standing = ("norm", "taper") if gate == 1.0 else ("norm",)
  found = [i for i, mode in enumerate(config.modes) if mode in standing]
  if not found:
    raise UserError(
      "no norm is left to probe: all of them are fixed maps or folded; probe "
      "the model before its taper"
    )
  return found


def halves(
  tokens: np.ndarray, context_len: int, max_windows: int | None
) -> tuple[np.ndarray, np.ndarray]:
  """The stream of the first half of its windows, and the rest.

  Windows are those of `data.windows.eval_batches`; of an odd number the second
  half has one more.

  Raises:
    UserError: fewer than two windows.
  """
  count = max(0, -(-(len(tokens) - 1) // context_len))
  if max_windows is not None:
    count = min(count, max_windows)
  if count < 2:
    limit = "" if max_windows is None else f" and max_windows={max_windows}"
    raise UserError(
      f"data holds {len(tokens):,} tokens{limit}, which is fewer than "
      f"two windows of {context_len:,}, one to calibrate on and one to score; "
      "give a longer text, or one to calibrate on"
    )
  middle = count // 2 * context_len
  return tokens[: middle + 1], tokens[middle : count * context_len + 1]


def probe(
  params: dict,
  config: ModelConfig,
  c: Any,
  gate: float,
  calibration_batches: Sequence[Batch],
  batches: Sequence[Batch],
  *,
  show: bool = False,
) -> dict[str, Any]:
  r"""Loss by norm that is replaced, alone and with all before it.

  Source: arXiv:2602.10408 (v1), Eq. 4 and 7: c = E[|h gamma|^2 / r] /
  E[|h gamma|^2], sums over all tokens with every norm in place.

  Args:
    params, config, c, gate: a model, see `saved.Model`.
    calibration_batches: (tokens (B, L + 1), mask (B, L)) for c.
    batches: the same for the losses, all of one shape.
    show: progress on standard error.

  Returns:
    loss, nats per token with every norm in place; tokens, scored;
    calibration_tokens; sites, each `rank, site, c, loss, increase` with the
    norm of the site replaced alone, by increase; cumulative, each `removed,
    site, loss, increase` with the first n of these replaced, the last of them
    named. A loss may be infinite or NaN; such a site comes last.

  Raises:
    UserError: see `open_sites`.
  """
  found = open_sites(config, gate)
  passes = 2 * len(found)  # none, each, and the first 2, 3, ...
  total = len(calibration_batches) + passes * len(batches)
  names = site_names(config.num_layers)
  params = jax.device_put(_with_fixed_gains(params, gate))
  config = config.with_modes(
    ["taper" if mode == "norm" else mode for mode in config.modes]
  )
  gate_S = np.zeros(len(names), bool)
  gate_S[found] = True
  done = 0
  with contextlib.ExitStack() as stack:
    progress = stack.enter_context(Progress(total, 0)) if show else None

    def counted(batches: Sequence[Batch]) -> Iterator[Batch]:
      nonlocal done
      for batch in batches:
        yield batch
        done += 1
        if progress is not None:
          progress.update(done)

    c_S, calibration_tokens = _factors(
      params, config, c, gate_S, found, counted(calibration_batches)
    )
    eval_step = step.make_eval_step(config)

    def score(removed: Sequence[int] = ()) -> dict[str, Any]:
      kept_S = gate_S.copy()
      kept_S[list(removed)] = False
      return evaluation.evaluate(
        eval_step, params, counted(batches), c=c_S, gate=jnp.asarray(kept_S)
      )

    whole = score()
    base = whole["loss"]
    alone = {i: score([i])["loss"] for i in found}
    order = sorted(
      found, key=lambda i: (not math.isfinite(alone[i]), alone[i], i)
    )
    losses = [alone[order[0]]]  # the first one alone is known
    losses += [
      score(order[:n])["loss"] for n in range(2, len(order) + 1)
    ]
  return {
    "loss": base,
    "tokens": whole["tokens"],
    "calibration_tokens": calibration_tokens,
    "sites": [
      {
        "rank": rank,
        "site": names[i],
        "c": float(c_S[i]),
        "loss": alone[i],
        "increase": alone[i] - base,
      }
      for rank, i in enumerate(order, 1)
    ],
    "cumulative": [
      {"removed": n, "site": names[i], "loss": loss, "increase": loss - base}
      for n, (i, loss) in enumerate(zip(order, losses, strict=True), 1)
    ],
  }


def _with_fixed_gains(params: dict, gate: float) -> dict:
  """gamma~ <- gamma at every norm that stands; a fixed map keeps its own."""
  if "scale" in params:
    if gate == 1.0 or "taper_scale" not in params:
      return {**params, "taper_scale": params["scale"]}
    return params
  return {
    name: _with_fixed_gains(value, gate) if isinstance(value, dict) else value
    for name, value in params.items()
  }


def _factors(params, config, c, gate_S, found, batches):
  """(c_S, tokens): that of the model, and for the sites found in closed form.

  The sums are added up in float64.
  """
  sums_S2, tokens = 0.0, 0.0
  for tokens_BL1, mask_BL in batches:
    sums_S2 += np.asarray(
      _sums(config, params, jnp.asarray(c), gate_S, tokens_BL1, mask_BL),
      np.float64,
    )
    tokens += float(np.sum(mask_BL))
  if not tokens:
    raise UserError("nothing to calibrate on: the batches hold no token")
  num_S, den_S = sums_S2.T / tokens
  c_S = np.array(c, np.float32)
  solved_S = num_S / (den_S + calibration.CALIBRATION_EPS)
  c_S[found] = solved_S[found]
  return jnp.asarray(c_S), round(tokens)


@functools.partial(jax.jit, static_argnums=0)
def _sums(config, params, c_S, gate_S, tokens_BL1, mask_BL):
  """Calibration sums of one batch, (S, 2); the head is not run."""
  _, aux = model.Transformer(config).apply(
    {"params": params},
    tokens_BL1[:, :-1],
    gate=gate_S,
    c=c_S,
    mask_BL=mask_BL,
    output="hidden",
  )
  return aux["sums_S2"]


_COLOURS = {"attn_norm": "#3b6fb6", "mlp_norm": "#d98a29", "final_norm": "#777"}
_LABELS = {"attn_norm": "attention", "mlp_norm": "MLP", "final_norm": "final"}


def plot(found: dict[str, Any], title: str, folder: pathlib.Path) -> None:
  """Writes probe.png and probe.svg: the sites as bars, and the way down.

  Args:
    found: from `probe`.
    title: one line.
    folder: exists.
  """
  with drawing.drawing({"svg.hashsalt": "taperjax"}):
    figure = _draw(found, title)
    for kind, metadata in (("png", {}), ("svg", {"Date": None})):
      with files.atomic_write(folder / f"probe.{kind}") as file:
        figure.savefig(file, format=kind, dpi=150, metadata=metadata)


def _draw(found: dict[str, Any], title: str) -> Any:
  """The matplotlib figure of `plot`."""
  from matplotlib.figure import Figure

  sites = found["sites"]
  in_order = sorted(sites, key=lambda site: _position(site["site"]))
  width = max(7.0, 0.17 * len(sites) + 2.0)
  # A figure of its own: no window, and no state of pyplot.
  figure = Figure(figsize=(width, 7.5), layout="constrained")
  bars, curve = figure.subplots(2, 1)
  figure.suptitle(title)
  for kind, colour in _COLOURS.items():
    where = [
      j for j, site in enumerate(in_order) if site["site"].endswith(kind)
    ]
    if where:
      heights = [in_order[j]["increase"] for j in where]
      bars.bar(where, heights, color=colour, label=_LABELS[kind])
  for j, site in enumerate(in_order):
    if not math.isfinite(site["increase"]):
      bars.annotate(
        "not finite", (j, 0), rotation=90, ha="center", va="bottom"
      )
  bars.set_xticks(
    range(len(in_order)),
    [_short(site["site"]) for site in in_order],
    rotation=90,
  )
  bars.set_title("one norm replaced by its fixed map")
  bars.legend(loc="upper left")
  steps = found["cumulative"]
  finite = [row for row in steps if math.isfinite(row["increase"])]
  curve.plot(
    [0, *(row["removed"] for row in finite)],
    [0.0, *(row["increase"] for row in finite)],
    marker="o", markersize=4, color="#333",
  )
  for row in steps:
    if not math.isfinite(row["increase"]):
      curve.annotate(
        "not finite", (row["removed"], 0), rotation=90, ha="center",
        va="bottom",
      )
  curve.set_xticks(
    range(len(steps) + 1),
    ["none", *(_short(row["site"]) for row in steps)],
    rotation=90,
  )
  curve.set_title("all norms up to here replaced, least increase first")
  for axes, rows in ((bars, sites), (curve, steps)):
    heights = [y for row in rows if math.isfinite(y := row["increase"])]
    large = [abs(y) for y in heights if abs(y) >= 1e-4]
    if large and max(large) > 100 * min(large):  # decades, and 0 among them
      decade = 10.0 ** math.floor(math.log10(min(large)))
      axes.set_yscale("symlog", linthresh=decade)
      axes.set_ylim(3 * min(0.0, *heights), 3 * max(0.0, *heights))
    axes.set_ylabel("increase of the loss\n(nats per token)")
    axes.set_axisbelow(True)
    axes.grid(axis="y", alpha=0.3)
    axes.axhline(0.0, color="#333", linewidth=0.8)
  return figure


def _position(site: str) -> tuple[float, bool]:
  """Sites in the order of the model."""
  block, _, kind = site.partition(".")
  number = int(block.removeprefix("block_")) if kind else math.inf
  return number, kind == "mlp_norm"


def _short(site: str) -> str:
  block, _, kind = site.partition(".")
  if not kind:
    return "final"
  return f"{block.removeprefix('block_')} {kind.removesuffix('_norm')}"
