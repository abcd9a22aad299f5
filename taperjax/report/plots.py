"""Figures of a report: PNG and SVG files, and SVG for inside a page.

matplotlib draws each figure once, in colours for a light page. Inside an HTML
page every colour becomes a CSS variable of `COLOURS`, so that the figure
follows the page into the dark.
"""

from __future__ import annotations

import contextlib
import dataclasses
import html
import math
import pathlib
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from taperjax import drawing as drawing_lib
from taperjax.report import results
from taperjax.report.results import Group

# CSS variable: (on a light page, on a dark one), all at 3:1 or more against
# white and against #16181c. No two light ones are equal.
COLOURS = {
  "text": ("#1c1d1f", "#e4e6e9"),
  "quiet": ("#63676d", "#a3a9b1"),
  "grid": ("#dcdfe3", "#363b42"),
  "baseline": ("#1b1b1d", "#eceef0"),
  "vanilla": ("#1a1a1e", "#edeef1"),
  "internal": ("#0072b2", "#56a8e8"),
  "internal-aux": ("#008a65", "#35c497"),
  "final": ("#c94f00", "#ff8a4c"),
  "all": ("#a8398f", "#e287cd"),
  "all-aux": ("#957200", "#e3b92f"),
  "fakeln": ("#6b52c8", "#a995f5"),
  "outward": ("#c94e01", "#ff8a4d"),
  "inward": ("#0071b3", "#56a8e9"),
}
# With the colour, so that neither colour vision nor a printer is needed.
_DASHES = {
  "baseline": "-", "vanilla": "-", "internal": "-", "internal_aux": (0, (5, 2)),
  "final": (0, (6, 2, 1, 2)), "all": "-", "all_aux": (0, (2, 1.2)),
  "fakeln": (0, (6, 2, 1, 2)),
}
_MORE_DASHES = ("-", (0, (5, 2)), (0, (2, 1.2)), (0, (6, 2, 1, 2)))
MOST_POINTS = 400  # of a curve
_ALL_POINTS = 3_200  # of the curves of a figure together
_LOG_RATIO = 20.0  # of the largest to the smallest, for a log scale
_SPIKE = 3.0  # of the largest to the 95th percentile, for an axis that is cut


@dataclasses.dataclass(frozen=True)
class Figure:
  """A drawn figure.

  Attributes:
    name: of NAME.png and NAME.svg in the report.
    svg: for an HTML page, with CSS variables for colours.
    notes: what was done to the numbers, a sentence each.
  """

  name: str
  title: str
  alt: str
  svg: str
  notes: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Curve:
  """A figure of one metric against the step, a colour for each variant.

  Attributes:
    key: "KIND/NAME" in metrics.jsonl. target: a second one, drawn dotted.
    scale: log, linear, or auto: log where the values span a factor of 20.
    since: draws only steps from this share of the run on.
    zero: draws the line at 0.
    cut: ends the axis below spikes that would flatten all else, with a note.
  """

  name: str
  key: str
  title: str
  unit: str
  scale: str = "linear"
  since: float = 0.0
  target: str | None = None
  zero: bool = False
  cut: bool = False


CURVES = (
  Curve("train_loss", "train/loss", "Training loss", "nats per token",
        cut=True),
  Curve("train_loss_late", "train/loss", "Training loss, second half",
        "nats per token", since=0.5, cut=True),
  Curve("valid_loss", "eval/valid_loss", "Validation loss at the gate",
        "nats per token", cut=True),
  Curve("valid_loss_g0", "eval/valid_loss_g0", "Validation loss at gate 0",
        "nats per token", "auto"),
  Curve("train_logit_norm", "train/logit_norm",
        "Mean logit norm, training", "l2 norm", "log"),
  Curve("valid_logit_norm", "eval/logit_norm",
        "Mean logit norm, validation", "l2 norm", "log"),
  Curve("grad_norm_qkv", "train/grad_norm_qkv", "Gradient norm, QKV",
        "l2 norm", "log"),
  Curve("grad_norm_attn_out", "train/grad_norm_attn_out",
        "Gradient norm, attention output", "l2 norm", "log"),
  Curve("grad_norm_mlp_in", "train/grad_norm_mlp_in",
        "Gradient norm, MLP input", "l2 norm", "log"),
  Curve("grad_norm_mlp_out", "train/grad_norm_mlp_out",
        "Gradient norm, MLP output", "l2 norm", "log"),
  Curve("gate", "train/gate", "Gate", "1: norm, 0: fixed map"),
  Curve("learning_rate", "train/learning_rate", "Learning rate",
        "learning rate"),
  Curve("mean_scale", "train/mean_scale",
        "Mean scale s(h) of the last hidden state", "root mean square",
        "auto", target="train/scale_target"),
  Curve("margin", "eval/margin", "Mean margin", "logits", "linear",
        zero=True),
  Curve("margin_share", "eval/margin_share",
        "Share of tokens with a margin above 0", "share"),
)


def drawing() -> contextlib.AbstractContextManager[None]:
  """matplotlib with our settings, and without files in the home folder."""
  text, quiet, grid = (COLOURS[n][0] for n in ("text", "quiet", "grid"))
  return drawing_lib.drawing({
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "taperjax",  # the same ids every time
    "font.family": "sans-serif",
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.facecolor": "none",
    "axes.edgecolor": quiet,
    "axes.labelcolor": text,
    "axes.titlecolor": text,
    "text.color": text,
    "xtick.color": quiet,
    "ytick.color": quiet,
    "xtick.labelcolor": text,
    "ytick.labelcolor": text,
    "grid.color": grid,
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "legend.fontsize": 9,
    "legend.handlelength": 2.6,
    "lines.linewidth": 1.5,
  })


def draw(groups: Sequence[Group], folder: pathlib.Path) -> dict[str, Figure]:
  """Draws all that the runs have numbers for, into folder/NAME.png and .svg.

  Returns:
    Figures by name; one without a number to show is left out.
  """
  found: dict[str, Figure | None] = {}
  with drawing():
    for spec in CURVES:
      found[spec.name] = _curve(spec, groups, folder)
    found["c"] = _factors(groups, folder)
    found["residual_rms"] = _residuals(groups, folder)
    for i, figure in enumerate(_anchors(groups, folder)):
      found[f"anchor_{i}"] = figure
  return {name: figure for name, figure in found.items() if figure is not None}


def most_points(groups: Sequence[Group]) -> int:
  """Of a curve, so that a page of many groups stays small."""
  lines = sum(
    3 if len(g.seeds) >= results.BAND_SEEDS else len(g.seeds) for g in groups
  )
  return max(60, min(MOST_POINTS, _ALL_POINTS // max(lines, 1)))


def styles(groups: Sequence[Group]) -> list[dict[str, Any]]:
  """Line colour and dashes of each group: the colour is the variant's."""
  found, seen = [], {}
  for group in groups:
    variant = group.config["variant"]
    nth = seen[variant] = seen.get(variant, -1) + 1
    dashes = _DASHES[variant]
    if sum(g.config["variant"] == variant for g in groups) > 1:
      dashes = _MORE_DASHES[nth % len(_MORE_DASHES)]
    colour = COLOURS[variant.replace("_", "-")][0]
    found.append({"color": colour, "linestyle": dashes})
  return found


def _new(rows: int = 1, height: float = 2.5, labels: Sequence[str] = (), **kw):
  """(figure, axes, columns of the legend) at the width of a phone."""
  from matplotlib.figure import Figure as Canvas

  longest = max(map(len, labels), default=0)
  columns = 3 if longest <= 13 else 2 if longest <= 24 else 1
  legend_rows = math.ceil(len(labels) / columns)
  figure = Canvas(
    figsize=(4.2, height + 0.19 * legend_rows), layout="constrained"
  )
  return figure, figure.subplots(rows, 1, squeeze=False, **kw)[:, 0], columns


def _save(figure, name, title, alt, folder, notes=()) -> Figure:
  """Writes NAME.svg and NAME.png, and gives the SVG for a page."""
  path = folder / f"{name}.svg"
  figure.draw_without_rendering()  # places all once, which takes longest
  figure.set_layout_engine("none")
  figure.savefig(path, metadata={"Date": None}, facecolor="#ffffff")
  figure.savefig(folder / f"{name}.png", dpi=160, facecolor="#ffffff")
  svg = _inline(path.read_text(encoding="utf-8"), name, alt)
  return Figure(name, title, alt, svg, tuple(notes))


def _inline(svg: str, name: str, alt: str) -> str:
  """An SVG file as an element of a page, its ids and colours the page's."""
  svg = svg[svg.index("<svg"):]
  svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
  svg = re.sub(r"<!--.*?-->", "", svg, flags=re.DOTALL)
  used = set(re.findall(r'(?:xlink:href="|url\()#([^")]+)', svg))
  svg = re.sub(
    r' id="([^"]+)"',
    lambda m: f' id="{name}-{m[1]}"' if m[1] in used else "",
    svg,
  )
  svg = re.sub(r'(xlink:href="|url\()#', rf"\g<1>#{name}-", svg)
  svg = svg.replace("fill: #ffffff", "fill: none")
  for variable, (light, _) in COLOURS.items():
    svg = svg.replace(light, f"var(--{variable})")
  svg = re.sub(  # a hundredth of a point is enough
    r' (?:d|x|y|points)="[^"]*"',
    lambda m: re.sub(
      r"\s+", " ", re.sub(r"(\.\d\d)\d+", r"\1", m[0])
    ),
    svg,
  )
  box = re.search(r'viewBox="[^"]+"', svg)[0]
  head = (
    f'<svg {box} role="img" aria-label="{html.escape(alt)}" '
    'xmlns:xlink="http://www.w3.org/1999/xlink">'
  )
  return head + re.sub(r"^<svg[^>]*>", "", re.sub(r">\s+<", "><", svg)).strip()


def number(value: float, _position: object = None) -> str:
  """A tick or a value in words: 20k, 0.003, 1e-6, 2e5."""
  if value == 0:
    return "0"
  size = abs(value)
  if 1_000 <= size < 1e6 and float(f"{value:.3g}") % 100 == 0:
    return f"{value / 1_000:.3g}k"
  text = f"{value:.3g}"
  if "e" not in text:
    return text
  digits, exponent = text.split("e")
  return f"{digits}e{int(exponent)}"


def _label(text: str) -> str:
  return text if len(text) <= 52 else text[:51] + "\u2026"


def _scale_axis(axis, values: Sequence[float], wanted: str) -> str:
  """Sets the y scale; returns what to add to the label."""
  values = [value for value in values if math.isfinite(value)]
  positive = bool(values) and min(values) > 0
  spread = positive and max(values) / min(values) > _LOG_RATIO
  if positive and (wanted == "log" or wanted == "auto" and spread):
    from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter

    axis.set_yscale("log")
    decades = math.log10(max(values) / min(values))
    if decades < 0.6:
      axis.yaxis.set_major_locator(MaxNLocator(5))
    elif decades < 4:
      subs = (1, 2, 5) if decades < 2 else (1, 3)
      axis.yaxis.set_major_locator(LogLocator(subs=subs))
    axis.yaxis.set_minor_formatter(NullFormatter())
    axis.yaxis.set_major_formatter(number)
    return ", log scale"
  axis.yaxis.set_major_formatter(number)
  return ""


def _legend(figure, handles, labels, columns) -> None:
  figure.legend(
    handles, labels, loc="outside lower left", ncols=columns,
    columnspacing=1.2,
  )


def _curve(spec: Curve, groups, folder) -> Figure | None:
  """One metric against the step."""
  shown = [g for g in groups if any(spec.key in s.curves for s in g.seeds)]
  if not shown:
    return None
  labels = [_label(g.label) for g in shown]
  figure, (axis,), columns = _new(labels=labels)
  most = most_points(shown)
  style_of = dict(zip(map(id, groups), styles(groups), strict=True))
  handles, values, ends, thinned = [], [], [], False
  for group in shown:
    steps_T, values_ST = results.curve(group.seeds, spec.key, most)
    records = max(len(s.curves.get(spec.key, ())) for s in group.seeds)
    thinned |= records > most
    late_T = steps_T >= spec.since * group.config["steps"]
    steps_T, values_ST = steps_T[late_T], values_ST[:, late_T]
    style = style_of[id(group)]
    drawn = _draw_seeds(axis, group, steps_T, values_ST, style)
    handles.append(axis.plot([], [], **style)[0])
    values += drawn
    if spec.target is not None:
      target_T, targets_ST = results.curve(group.seeds, spec.target, most)
      if len(target_T):
        mean_T = results.band(targets_ST)[0]
        axis.plot(target_T, mean_T, color=style["color"], linestyle=":",
                  linewidth=1.1)
        values += mean_T.tolist()
    if (end := results.last_mean(group, spec.key)) is not None:
      ends.append(f"{group.label} {number(end)}")
  if not values:  # an unfinished run that never came to the second half
    return None
  added = _scale_axis(axis, values, spec.scale)
  if spec.zero:
    axis.axhline(0.0, color=COLOURS["quiet"][0], linewidth=0.8)
  axis.set_title(spec.title)
  axis.set_ylabel(spec.unit + added)
  axis.set_xlabel("step")
  axis.xaxis.set_major_formatter(number)
  _legend(figure, handles, labels, columns)
  alt = (
    f"{spec.title} in {spec.unit}{added} against the step. Last values, means "
    f"over the seeds: {', '.join(ends)}."
  )
  notes = []
  usual = float(np.percentile(values, 95))
  if spec.cut and max(values) > _SPIKE * usual:
    low, top = min(values), 1.25 * usual
    axis.set_ylim(low - 0.05 * (top - low), top)  # as if there were no spike
    notes.append(
      f"The axis ends below the largest value, {number(max(values))}."
    )
  if thinned:
    notes.append(
      f"Averaged over neighbouring records to at most {most} points a curve."
    )
  return _save(figure, spec.name, spec.title, alt, folder, notes)


def _draw_seeds(axis, group, steps_T, values_ST, style) -> list[float]:
  """A band with its mean, or a line for each seed; what was drawn."""
  alone = {"marker": "o", "markersize": 3} if len(steps_T) == 1 else {}
  if len(group.seeds) >= results.BAND_SEEDS:
    mean_T, low_T, high_T = results.band(values_ST)
    axis.fill_between(
      steps_T, low_T, high_T, color=style["color"], alpha=0.18, linewidth=0
    )
    axis.plot(steps_T, mean_T, **style, **alone)
    drawn = np.concatenate([mean_T, low_T, high_T])
  else:
    for value_T in values_ST:
      there = ~np.isnan(value_T)
      axis.plot(
        steps_T[there], value_T[there], **{**style, "linewidth": 1.2}, **alone
      )
    drawn = values_ST.ravel()
  for seed, value_T in zip(group.seeds, values_ST, strict=True):
    there = np.flatnonzero(~np.isnan(value_T))
    if seed.status == "diverged" and len(there):
      axis.plot(
        steps_T[there[-1]], value_T[there[-1]], marker="x", markersize=6,
        color=style["color"], linestyle="none",
      )
  return drawn[~np.isnan(drawn)].tolist()


def _factors(groups, folder) -> Figure | None:
  """c by site, a dot for each seed and a line through their means."""
  shown = [g for g in groups if any(s.c for s in g.seeds)]
  if not shown:
    return None
  sites = sorted(
    {site for g in shown for s in g.seeds for site in s.c}, key=_site_order
  )

  def values(seed):
    return [seed.c.get(site, math.nan) for site in sites]

  return _by_place(
    shown, styles(groups), groups, values, list(map(_short_site, sites)),
    "c", "Factor c by norm site", "c, 1 / scale", "site", folder,
    lambda xs: f"from {number(min(xs))} to {number(max(xs))}",
  )


def _site_order(site: str) -> tuple:
  match = re.match(r"block_(\d+)\.(attn|mlp)", site)
  return (0, int(match[1]), match[2]) if match else (1, 0, site)


def _short_site(site: str) -> str:
  """block_3.attn_norm: 3a, block_3.mlp_norm: 3m, final_norm: f."""
  match = re.match(r"block_(\d+)\.(attn|mlp)", site)
  return f"{match[1]}{match[2][0]}" if match else site[:1]


def _residuals(groups, folder) -> Figure | None:
  """Root mean square of the residual stream by depth."""
  names = results.items(
    (s for g in groups for s in g.seeds), "eval/residual_rms"
  )
  if not names:
    return None

  def values(seed):
    found = [results.last(seed, name) for name in names]
    return [math.nan if value is None else value for value in found]

  shown = [
    g for g in groups
    if any(name in s.curves for s in g.seeds for name in names)
  ]
  return _by_place(
    shown, styles(groups), groups, values, list(map(str, range(len(names)))),
    "residual_rms", "Residual stream by depth", "root mean square",
    "blocks passed", folder,
    lambda xs: f"{number(xs[0])} before the blocks, {number(xs[-1])} behind",
  )


def _by_place(
  shown, all_styles, groups, values: Callable, ticks, name, title, unit, where,
  folder, words,
) -> Figure:
  """A value of each seed at each of a few places, by group."""
  labels = [_label(g.label) for g in shown]
  figure, (axis,), columns = _new(labels=labels)
  style_of = dict(zip(map(id, groups), all_styles, strict=True))
  places, handles, every, ends = range(len(ticks)), [], [], []
  for group in shown:
    rows_SP = np.array([values(seed) for seed in group.seeds])
    mean_P = results.band(rows_SP)[0]
    there = ~np.isnan(mean_P)
    style = style_of[id(group)]
    for row_P in rows_SP:
      axis.plot(places, row_P, ".", color=style["color"], markersize=4)
    xs = np.flatnonzero(there)
    handles += axis.plot(xs, mean_P[there], **{**style, "linewidth": 1.1})
    every += rows_SP[~np.isnan(rows_SP)].tolist()
    ends.append(f"{group.label} {words(mean_P[there].tolist())}")
  added = _scale_axis(axis, every, "auto")
  stride = math.ceil(len(ticks) / 18)
  axis.set_xticks(places[::stride], ticks[::stride])
  axis.set_title(title)
  axis.set_ylabel(unit + added)
  axis.set_xlabel(where)
  _legend(figure, handles, labels, columns)
  alt = f"{title}, {unit}{added}, means over the seeds: {'; '.join(ends)}."
  return _save(figure, name, title, alt, folder)


def _anchors(groups, folder) -> list[Figure]:
  """For each group the logit norm above, and the radial gradients below it."""
  shown = [
    g for g in groups if any("eval/radial_ce" in s.curves for s in g.seeds)
  ]
  most = most_points(shown[:1])
  drawn = []
  for group in shown:
    curves = {
      name: results.curve(group.seeds, f"eval/{name}", most)
      for name in ("logit_norm", "radial_ce", "radial_scale")
    }
    drawn.append((group, curves))
  extent = [_extent(curves["logit_norm"][1]) for _, curves in drawn]
  norms = [value for pair in extent for value in pair if value > 0]
  sizes = [
    max(map(abs, (*_extent(c["radial_ce"][1]), *_extent(c["radial_scale"][1]))))
    for _, c in drawn
  ]
  seen = [size for size in sizes if size > 1e-3]
  symlog = bool(seen) and max(seen) / min(seen) > _LOG_RATIO
  most_pull = 1.15 * max(sizes, default=0.0) or 1.0
  longest = 1.02 * max((g.config["steps"] for g in shown), default=1)
  return [
    _anchor(i, group, curves, norms, most_pull, symlog, longest, folder)
    for i, (group, curves) in enumerate(drawn)
  ]


def _extent(values_ST: np.ndarray) -> tuple[float, float]:
  values = values_ST[~np.isnan(values_ST)]
  return (float(values.min()), float(values.max())) if values.size else (0., 0.)


def _anchor(
  i, group, curves, norms, most_pull, symlog, longest, folder
) -> Figure:
  figure, (above, below), _ = _new(
    2, 3.4, labels=["", ""], sharex=True, height_ratios=(1, 1.3)
  )
  plain = {"color": COLOURS["text"][0], "linestyle": "-"}
  _draw_seeds(above, group, *curves["logit_norm"], plain)
  if norms:
    above.set_ylim(0.8 * min(norms), 1.25 * max(norms))
  added = _scale_axis(above, norms, "log")
  above.set_ylabel(f"mean logit norm\n(l2{added})")
  above.set_title(_label(group.label))
  handles = []
  roles = (
    ("radial_ce", "outward", "-", "cross-entropy"),
    ("radial_scale", "inward", (0, (5, 2)), "scale loss"),
  )
  for name, colour, dashes, _ in roles:
    style = {"color": COLOURS[colour][0], "linestyle": dashes}
    steps_T, values_ST = curves[name]
    _draw_seeds(below, group, steps_T, values_ST, style)
    mean_T = results.band(values_ST)[0]
    below.fill_between(
      steps_T, 0.0, mean_T, color=style["color"], alpha=0.1, linewidth=0
    )
    handles.append(below.plot([], [], **style)[0])
  below.axhline(0.0, color=COLOURS["quiet"][0], linewidth=0.8)
  note = ""
  if symlog:
    below.set_yscale("symlog", linthresh=most_pull / 100)
    note = ", symlog scale"
  below.set_ylim(-most_pull, most_pull)
  below.yaxis.set_major_formatter(number)
  below.xaxis.set_major_formatter(number)
  below.set_ylabel(f"radial gradient\n(nats{note})")
  below.set_xlabel("step")
  below.set_xlim(0, longest)
  for y, where, text in (
    (0.98, "top", "inward: a step shrinks |h|"),
    (0.02, "bottom", "outward: a step grows |h|"),
  ):
    below.text(
      0.01, y, text, transform=below.transAxes, va=where, fontsize=8,
      color=COLOURS["quiet"][0],
    )
  _legend(figure, handles, [role[-1] for role in roles], 2)
  row = results.radial_row(group, None)
  ends = [
    f"{text} {number(row[name])}"
    for name, text in (
      ("radial_ce", "radial gradient of the cross-entropy"),
      ("radial_scale", "of the scale loss"),
      ("logit_norm", "mean logit norm"),
    )
    if name in row
  ]
  title = f"Logit norm and radial gradients, {group.label}"
  alt = f"{title}. Last values, means over the seeds: {', '.join(ends)}."
  return _save(figure, f"anchor_{i}", title, alt, folder)
