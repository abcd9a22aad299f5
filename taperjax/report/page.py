"""The page of a report: one HTML file without scripts and without a network.

All text that comes from files goes through `_text`, which escapes it.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from taperjax.report import plots, results
from taperjax.report.plots import Figure
from taperjax.report.results import Found, Group, Seed

_STYLE = """
*{box-sizing:border-box}
html{color-scheme:light dark;-webkit-text-size-adjust:100%}
body{margin:0;background:var(--page);color:var(--text);
font:16px/1.5 system-ui,sans-serif;overflow-wrap:break-word}
main,header,footer{max-width:1240px;margin:0 auto;padding:0 16px}
h1{font-size:1.6rem;line-height:1.2;margin:1.5rem 0 .5rem}
h2{font-size:1.25rem;margin:2.5rem 0 .5rem;padding-top:.75rem;
border-top:1px solid var(--grid)}
h3{font-size:1rem;margin:1.5rem 0 .25rem}
p,ul{max-width:72ch;margin:.5rem 0}
li{margin:.15rem 0}
a{color:var(--link)}
nav ul{display:flex;flex-wrap:wrap;gap:.25rem 1rem;list-style:none;padding:0;
max-width:none}
sup{line-height:0}
.wide{overflow-x:auto;margin:.75rem 0;
background:linear-gradient(to right,var(--page) 30%,transparent) left/40px 100%,
linear-gradient(to left,var(--page) 30%,transparent) right/40px 100%,
linear-gradient(to right,var(--grid),transparent) left/12px 100%,
linear-gradient(to left,var(--grid),transparent) right/12px 100%;
background-repeat:no-repeat;background-attachment:local,local,scroll,scroll}
table{border-collapse:collapse;font-size:.9rem;font-variant-numeric:tabular-nums}
caption{text-align:left;font-weight:600;padding:.25rem 0;caption-side:top}
caption span{display:block;position:sticky;left:0;
max-width:calc(100vw - 32px)}
th,td{padding:.3rem .7rem .3rem 0;text-align:left;vertical-align:top;
border-bottom:1px solid var(--grid)}
th{font-weight:600}
thead th{border-bottom:2px solid var(--quiet);vertical-align:bottom}
tbody th{font-weight:400;min-width:7rem}
.n{text-align:right}
td.n{white-space:nowrap}
.paper{background:var(--paper);padding-left:.7rem}
.figures{display:grid;gap:1.5rem;
grid-template-columns:repeat(auto-fill,minmax(min(100%,360px),1fr))}
.figures.two{grid-template-columns:repeat(auto-fill,minmax(min(100%,460px),1fr))}
@media(max-width:500px){table{font-size:.8rem}th,td{padding-right:.5rem}
tbody th{min-width:5.5rem}}
figure{margin:0;min-width:0}
figure svg{display:block;width:100%;max-width:480px;height:auto}
figcaption,.small{font-size:.85rem;color:var(--quiet)}
svg text{font-family:system-ui,sans-serif!important}
.samples{display:grid;gap:1rem;
grid-template-columns:repeat(auto-fill,minmax(min(100%,300px),1fr))}
.samples article{border:1px solid var(--grid);border-radius:6px;
padding:.5rem .75rem;min-width:0}
.samples h3{margin:0 0 .25rem}
.samples p{white-space:pre-wrap;margin:0;overflow-wrap:anywhere}
.mark{font-weight:600;color:var(--outward)}
.key{display:inline-block;width:.8em;height:.8em;border-radius:2px;
margin-right:.4em;vertical-align:-.05em}
details{margin:.75rem 0}
summary{cursor:pointer;color:var(--link)}
:focus-visible{outline:2px solid var(--link);outline-offset:2px}
@media print{details>*{display:block}}
"""
_PAGE_COLOURS = {  # (light, dark)
  "page": ("#ffffff", "#16181c"),
  "link": ("#0b5cad", "#7db8f5"),
  "paper": ("#f1f3f6", "#22262c"),
}
_METRICS = {spec.name: spec.key for spec in plots.CURVES} | {
  "c": "calibration/c/SITE", "residual_rms": "eval/residual_rms/N",
}
_STATUS = {
  "finished": "finished",
  "unfinished": "unfinished, at step {step:,}",
  "diverged": "diverged at step {step:,}",
  "damaged": "damaged, read to step {step:,}",
}


def render(
  found: Found, data: Mapping[str, Any], figures: Mapping[str, Figure]
) -> str:
  """The whole page.

  Args:
    found: what `results.read` gave, and data what `results.to_json` made of it.
    figures: by name, from `plots.draw`.
  """
  groups = list(zip(found.groups, data["groups"], strict=True))
  sections = [
    ("table", "Validation loss", _validation(groups)),
    ("loss", "Loss curves", _loss(figures, data)),
    ("logits", "Logit norm", _curves(
      figures, ("train_logit_norm", "valid_logit_norm"),
      "As Fig. 3 of the paper: the mean l2 norm of a token's logits. A run "
      "without an anchor, final norm gone and no scale loss, can grow it "
      "without end.",
    )),
    ("anchor", "What grows the logits, and what holds them", _anchor(
      groups, figures
    )),
    ("gradients", "Gradient norms by weight type", _curves(
      figures, [f"grad_norm_{n}" for n in
                ("qkv", "attn_out", "mlp_in", "mlp_out")],
      "As Fig. 4 of the paper: the l2 norm of the gradient of a matrix, a mean "
      "over the matrices of a type in all layers, before the clip.",
    )),
    ("schedule", "Gate and learning rate", _curves(
      figures, ("gate", "learning_rate"),
      "1 is the full norm, 0 its fixed map.",
    )),
    ("scale", "Scale and factors", _scale(figures)),
    ("fold", "Fold error", _fold(groups)),
    ("speed", "Decoding speed", _speed(groups)),
    ("samples", "Samples", _samples(groups)),
    ("configs", "Configurations", _configs(found)),
    ("environment", "Runs and environment", _environment(found)),
  ]
  links = "".join(
    f'<li><a href="#{name}">{_text(title)}</a></li>'
    for name, title, _ in sections
  )
  body = "".join(
    f'<section aria-labelledby="{name}"><h2 id="{name}">{_text(title)}</h2>'
    f"{content}</section>"
    for name, title, content in sections
  )
  return (
    '<!DOCTYPE html><html lang="en"><head><meta charset="utf-8">'
    '<meta name="viewport" content="width=device-width,initial-scale=1">'
    '<meta http-equiv="Content-Security-Policy" '
    "content=\"default-src 'none'; style-src 'unsafe-inline'\">"
    '<meta name="generator" content="taperjax report">'
    f"<title>{_text(_title(found))}</title>"
    f"<style>{_variables()}{_STYLE}</style></head><body>"
    f"<header><h1>{_text(_title(found))}</h1>{_opening(found)}"
    f'<nav aria-label="Contents"><ul>{links}</ul></nav></header>'
    f"<main>{body}</main>"
    '<footer><p class="small">Made by taperjax report. All numbers are in '
    '<a href="results.json">results.json</a> and '
    '<a href="results.csv">results.csv</a> beside this page.</p></footer>'
    "</body></html>\n"
  )


def _text(value: object) -> str:
  return html.escape(str(value))


def _variables() -> str:
  colours = plots.COLOURS | _PAGE_COLOURS
  light, dark = (
    "".join(f"--{name}:{pair[i]};" for name, pair in colours.items())
    for i in (0, 1)
  )
  return (
    f":root{{{light}}}@media(prefers-color-scheme:dark){{:root{{{dark}}}}}"
  )


def _title(found: Found) -> str:
  sizes = list(dict.fromkeys(g.config["size"] for g in found.groups))
  variants = dict.fromkeys(g.config["variant"] for g in found.groups)
  shown = ", ".join(sizes[:4]) + (", ..." if len(sizes) > 4 else "")
  return results.clean(f"Report on {shown}: {', '.join(variants)}")


def _opening(found: Found) -> str:
  """What was read, and what could not be."""
  seeds = [seed for group in found.groups for seed in group.seeds]
  counts = [
    f"{n} {status}" for status in _STATUS
    if (n := sum(seed.status == status for seed in seeds))
  ]
  steps = _range(g.config["steps"] for g in found.groups)
  shape = ", ".join((
    f"{steps} steps",
    f"{_range(g.config['batch_size'] for g in found.groups)} windows of "
    f"{_range(g.config['context_len'] for g in found.groups)} tokens a step",
    f"norm {', '.join(sorted({g.config['norm'] for g in found.groups}))}",
  ))
  line = (
    f"{_count(len(found.runs), 'run')} of "
    f"{_count(len(found.groups), 'configuration')}, with "
    f"{_count(len(seeds), 'seed')}: {', '.join(counts)}. {shape}."
  )
  text = f"<p>{_text(line)}</p>"
  damage = [line for run in found.runs for line in run.damage]
  repeats = [
    f"seed {seed.seed} of {group.label} once more in {seed.run}: the run that "
    "got furthest counts"
    for group in found.groups for seed in group.repeats
  ]
  for title, rows in (
    ("Damaged files", damage),
    ("Passed over, being no run", found.passed_over),
    ("Repeated seeds", repeats),
  ):
    if rows:
      items = "".join(f"<li>{_text(row)}</li>" for row in rows)
      text += f'<p class="mark">{title}</p><ul>{items}</ul>'
  return text


def _range(values: Iterable[int]) -> str:
  return " or ".join(f"{value:,}" for value in sorted(set(values)))


def _count(n: int, what: str) -> str:
  return f"{n:,} {what}{'' if n == 1 else 's'}"


def _table(
  caption: str,
  head: Sequence[str],
  rows: Iterable[Sequence[str]],
  *,
  words: Sequence[int] = (),
  paper: Sequence[int] = (),
) -> str:
  """A table that scrolls sideways by itself; its cells are HTML.

  Args:
    words: columns of text besides the first; the others are numbers.
    paper: columns of the paper's numbers.
  """
  def kind(i):
    names = [] if i == 0 or i in words else ["n"]
    names += ["paper"] if i in paper else []
    return f' class="{" ".join(names)}"' if names else ""

  top = "".join(
    f'<th scope="col"{kind(i)}>{_text(name)}</th>'
    for i, name in enumerate(head)
  )
  body = ""
  for row in rows:
    first, *rest = row
    cells = "".join(
      f"<td{kind(i)}>{cell}</td>" for i, cell in enumerate(rest, 1)
    )
    body += f'<tr><th scope="row">{first}</th>{cells}</tr>'
  return (
    f'<div class="wide" role="region" tabindex="0" '
    f'aria-label="{_text(caption)}"><table><caption><span>'
    f"{_text(caption)}</span></caption>"
    f"<thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>"
  )


def _key(group: Group) -> str:
  """The label with the colour of its variant."""
  colour = group.config["variant"].replace("_", "-")
  return (
    f'<span class="key" style="background:var(--{colour})"></span>'
    f"{_text(group.label)}"
  )


def _figure(figure: Figure) -> str:
  notes = " ".join(figure.notes)
  links = (
    f'<a href="figures/{figure.name}.png">PNG</a> '
    f'<a href="figures/{figure.name}.svg">SVG</a>'
  )
  return (
    f"<figure>{figure.svg}<figcaption>{_text(notes)} {links}</figcaption>"
    "</figure>"
  )


def _figures(figures: Sequence[Figure]) -> str:
  two = " two" if len(figures) in (2, 4) else ""
  return f'<div class="figures{two}">{"".join(map(_figure, figures))}</div>'


def _left_out(what: str) -> str:
  return f"<p>No run here has {_text(what)}, so this part is left out.</p>"


def _curves(
  figures: Mapping[str, Figure], names: Sequence[str], *words: str
) -> str:
  """Paragraphs and figures; a figure without numbers is named instead."""
  shown = [figures[name] for name in names if name in figures]
  missing = [name for name in names if name not in figures]
  text = "".join(f"<p>{_text(line)}</p>" for line in words if shown)
  text += _figures(shown) if shown else ""
  if missing:
    keys = (_METRICS.get(name, name) for name in missing)
    text += _left_out(f"numbers of {', '.join(keys)} in its metrics.jsonl")
  return text


def _signed(value: float, digits: int = 2) -> str:
  return f"{value:+.{digits}f}".replace("-", "\u2212")


def _spread(row: Mapping[str, Any], digits: int = 4) -> str:
  """Mean and standard deviation; a dash of nothing."""
  if row["mean"] is None:
    return "\u2013"
  if row["std"] is None:
    return f"{row['mean']:.{digits}f}"
  return f"{row['mean']:.{digits}f} \u00b1 {row['std']:.{digits}f}"


def _validation(groups) -> str:
  """The table of the paper's Table 2, footnotes, and one row for each seed."""
  papers = any(data["paper"] for _, data in groups)
  head = ["Configuration", "Loss", "Gap to baseline, %, and 95 % interval",
          "Seeds"]
  head += ["Paper: loss", "Paper: gap, %"] if papers else []
  rows, notes = [], []
  for group, data in groups:
    row, found = _validation_row(group, data, len(notes))
    notes += found
    rows.append(row + (_paper_cells(data["paper"]) if papers else []))
  text = _table(
    "Validation loss at the end, nats per token: mean \u00b1 standard "
    "deviation over the seeds",
    head, rows, paper=(4, 5) if papers else (),
  )
  if notes:
    items = "".join(
      f"<li>{_mark(i)} {_text(note)}</li>" for i, note in enumerate(notes)
    )
    text += f'<ul class="small" style="list-style:none;padding:0">{items}</ul>'
  words = [
    "Tapered models are scored at gate 0. Seeds that are finished count, and "
    "no other; standard deviations divide by n \u2212 1.",
    "The gap is the mean of the differences to the baseline, seed by seed, "
    "over the seeds that both have, in percent of the baseline's mean; its "
    "interval is Student's t over these differences. With one seed there is "
    "none. The baseline of a row differs from it in nothing but what the "
    "variant does.",
    f"A seed is marked as an outlier if its loss lies more than "
    f"{results.OUTLIER_MADS} scaled median absolute deviations (1.4826 MAD) "
    f"from the median of at least {results.OUTLIER_SEEDS} seeds. It counts in "
    "every number here.",
  ]
  if papers:
    words.append(
      "Columns named Paper are those of arXiv:2602.10408 (v1), Table 2, 6 "
      "seeds each (all_aux of 9m: 5, an outlier dropped). They stand only "
      "where variant, size, steps, context, batch, optimizer and taper are the "
      "paper's. Whether the text is its TinyStories is for the reader to check."
    )
  text += "".join(f'<p class="small">{_text(line)}</p>' for line in words)
  return text + _seed_table(groups)


def _mark(i: int) -> str:
  """Footnote sign number i, HTML."""
  return f'<sup class="mark">{i + 1}</sup>'


def _validation_row(group, data, count: int) -> tuple[list[str], list[str]]:
  """Cells, and footnotes; count is how many notes there are before."""
  notes, signs = [], {}

  def note(text, cell):
    comma = "<sup>,</sup>" if cell in signs else ""
    signs[cell] = signs.get(cell, "") + comma + _mark(count + len(notes))
    notes.append(f"{group.label}: {text}")

  states: dict[tuple[str, int], list[Seed]] = {}
  for seed in group.seeds:
    if seed.status != "finished":
      states.setdefault((seed.status, seed.step), []).append(seed)
  for (status, step), seeds in states.items():
    which = ", ".join(str(seed.seed) for seed in seeds)
    which = f"seed{'s' if len(seeds) > 1 else ''} {which}"
    if status == "diverged":
      note(f"{which} diverged at step {step:,}, without a loss.", "seeds")
      continue
    now = [s.values["valid_loss"] for s in seeds if "valid_loss" in s.values]
    last = f"; last validation loss {_each(now)}" if now else ""
    note(
      f"{which}, {_STATUS[status].format(step=step)} of "
      f"{group.config['steps']:,}, without a part in this row{last}.", "seeds",
    )
  losses = group.losses
  for seed, mads in results.outliers(losses).items():
    others = [loss for other, loss in losses.items() if other != seed]
    note(
      f"seed {seed} is an outlier, {losses[seed]:.4f}, "
      f"{_signed(mads, 1)} scaled MADs from the median; it counts. Without it: "
      f"{_spread(results.mean_std(others))}.", "loss",
    )
  gap, interval = "\u2013", ""
  if data["gap"] is not None:
    found = data["gap"]
    gap, interval = _signed(found["percent"]), "one seed: no interval"
    if found["low"] is not None:
      interval = f"{_signed(found['low'])} to {_signed(found['high'])}"
    if len(found["seeds"]) != len(losses):
      shared = ", ".join(map(str, found["seeds"]))
      note(f"the gap is over the seeds that the baseline has too: {shared}.",
           "gap")
  elif data["variant"] in results.BASELINES:
    gap = "baseline"
  else:
    note("no finished baseline here has its configuration and one of its "
         "finished seeds.", "gap")
  number = f"{len(losses)}"
  if len(losses) < len(group.seeds):
    number += f" of {len(group.seeds)}"
  cells = [
    _key(group),
    _spread(data["valid_loss"]) + signs.get("loss", ""),
    gap + signs.get("gap", "") + (
      f'<br><span class="small">{interval}</span>' if interval else ""
    ),
    number + signs.get("seeds", ""),
  ]
  return cells, notes


def _each(values: Sequence[float]) -> str:
  return ", ".join(f"{value:.4f}" for value in values)


def _paper_cells(paper: Mapping[str, Any] | None) -> list[str]:
  if paper is None:
    return ["\u2013", "\u2013"]
  gap = paper["gap_percent"]
  return [
    f"{paper['valid_loss']:.4f} \u00b1 {paper['std']:.4f}",
    "" if gap is None else _signed(gap),
  ]


def _seed_table(groups) -> str:
  rows = []
  for group, _ in groups:
    away = results.outliers(group.losses)
    for seed in (*group.seeds, *group.repeats):
      status = _STATUS[seed.status].format(step=seed.step)
      if any(seed is other for other in group.repeats):
        status += ", a repeat"
      elif seed.seed in away:
        status += f", outlier ({_signed(away[seed.seed], 1)} scaled MADs)"
      rows.append([
        _key(group), str(seed.seed), _text(status),
        *(_value(seed.values, name, form) for name, form in (
          ("valid_loss", ".4f"), ("valid_loss_folded", ".4f"),
          ("bits_per_byte", ".4f"), ("logit_norm", ",.1f"),
        )),
        _text(seed.run),
      ])
  table = _table(
    "Every seed: at the end, or at the last evaluation of one that is not "
    "finished",
    ["Configuration", "Seed", "Status", "Loss", "Loss, folded",
     "Bits per byte", "Mean logit norm", "Run"],
    rows, words=(2, 7),
  )
  return f"<details><summary>Every seed</summary>{table}</details>"


def _value(values: Mapping[str, Any], name: str, form: str) -> str:
  value = values.get(name)
  return "\u2013" if value is None else format(value, form)


def _loss(figures, data) -> str:
  """Fig. 2, with what the lines of all curves are."""
  many = any(
    len(group["seeds"]) >= results.BAND_SEEDS for group in data["groups"]
  )
  few = any(
    len(group["seeds"]) < results.BAND_SEEDS for group in data["groups"]
  )
  words = [
    "As Fig. 2 of the paper. A point of the training loss is the mean over the "
    "steps since the record before (log_every); no curve here is smoothed "
    "beyond what is said under it."
  ]
  if many:
    words.append(
      "Bands reach from the 2.5th to the 97.5th percentile over the seeds that "
      "have come to a step, lines are their mean."
    )
  if few:
    words.append(
      f"With fewer than {results.BAND_SEEDS} seeds each one is a line."
    )
  if any(
    seed["status"] == "diverged"
    for group in data["groups"] for seed in group["seeds"]
  ):
    words.append("A cross is where a seed diverged.")
  return _curves(
    figures,
    ("train_loss", "train_loss_late", "valid_loss", "valid_loss_g0"),
    " ".join(words),
  )


def _anchor(groups, figures) -> str:
  """Propositions 4.1 to 4.3 in words, the numbers, and a figure a group."""
  rows = [(group, data["radial"]) for group, data in groups if data["radial"]]
  if not rows:
    return _left_out(
      "the metrics radial_ce and radial_scale, which evaluations log since "
      "they measure the anchor"
    )
  words = (
    "The radial gradient \u27e8d\u2113/dh, h\u27e9 is the derivative of a "
    "token's loss along its own last hidden state h, before the final norm. A "
    "step h \u2212 \u03b7 d\u2113/dh changes |h|\u2060\u00b2 by "
    "\u22122\u03b7 times it: below 0 the step pushes h outward and |h| grows, "
    "above 0 it pulls h inward and |h| shrinks.",
    "With a final norm the cross-entropy cannot push: its radial gradient is 0 "
    "but for the norm's epsilon (Prop. 4.1). Without one, the loss of a token "
    "that is predicted already, margin above 0, still falls as h grows, so its "
    "radial gradient is below 0 (Prop. 4.2); that of a token predicted wrongly "
    "may be above 0. Once the outward pull prevails, it is what grows the "
    "logit norm of a run without an anchor. The scale loss "
    "\u03bb(s(h) \u2212 s_tgt)\u00b2 opposes it: its radial gradient is above "
    "0 wherever s(h) is above the target (Prop. 4.3).",
  )
  cells = []
  for group, row in rows:
    scale = row.get("radial_scale", 0.0)
    total = row.get("radial", row["radial_ce"] + scale)
    cells.append([
      _key(group), _direction(total), _pull(row["radial_ce"]), _pull(scale),
      _pull(total), _value(row, "margin", ".3g"),
      _value(row, "margin_share", ".1%"), _value(row, "logit_norm", ",.1f"),
      _value(row, "over_baseline", ".2f"),
    ])
  table = _table(
    "Radial gradients at the last evaluation, nats, means over tokens and "
    "seeds",
    ["Configuration", "A step moves h", "Cross-entropy", "Scale loss", "Sum",
     "Margin", "Tokens with margin > 0", "Logit norm", "Over the baseline's"],
    cells, words=(1,),
  )
  notes = (
    '<p class="small">A sum within 0.001 nats of 0 moves h neither way. Seeds '
    "that diverged have no part in these means.</p>"
  )
  text = "".join(f"<p>{_text(line)}</p>" for line in words) + table + notes
  shown = [f for name, f in figures.items() if name.startswith("anchor_")]
  text += (
    "<h3>Logit norm above, what pulls below</h3>"
    "<p>The axes are the same in every figure.</p>" + _figures(shown)
  )
  return text + "<h3>Margin</h3>" + _curves(
    figures, ("margin", "margin_share"),
    "The margin is the logit of the right token less the largest of the "
    "others.",
  )


def _pull(value: float) -> str:
  sign = "+" if value > 0 else ""
  return sign + plots.number(value).replace("-", "\u2212", int(value < 0))


def _direction(total: float) -> str:
  if abs(total) < 1e-3:
    return "neither way"
  return "outward" if total < 0 else "inward"


def _scale(figures) -> str:
  return _curves(
    figures,
    ("mean_scale", "c", "residual_rms"),
    "s(h) is the root mean square of the last hidden state (its standard "
    "deviation with LayerNorm), a mean over tokens. Dotted: the target s_tgt, "
    "which is set at taper start and which the scale loss holds s(h) to.",
    "c is the factor that takes the place of 1 / s(h) at a norm site. 0a is "
    "the attention norm of block 0, 0m its MLP norm, f the final norm.",
    "The residual stream is shown at the last evaluation: the root of the mean "
    "over tokens of |h|\u2060\u00b2 / D, before the first block and behind "
    "each. A dot is a seed, the line joins their means.",
  )


def _fold(groups) -> str:
  rows = [
    [
      _key(group),
      *(_value(data["fold"], name, form) for name, form in (
        ("max_abs_delta_logit_f32", ".2g"), ("logit_scale_f32", ".1f"),
        ("kl_f32", ".2g"), ("top1_f32", ".2%"), ("loss_delta_f32", ".2g"),
        ("max_abs_delta_logit_bf16", ".2g"), ("kl_bf16", ".2g"),
        ("top1_bf16", ".2%"),
      )),
    ]
    for group, data in groups if data["fold"]
  ]
  if not rows:
    return _left_out("a folded model")
  return _table(
    "The folded model against the unfolded one at gate 0: the worst seed",
    ["Configuration", "Largest logit difference, float32", "Logits up to",
     "Divergence, nats", "Same top token", "Loss difference, nats",
     "Largest, bfloat16", "Divergence, bfloat16", "Same top, bfloat16"],
    rows,
  )


def _speed(groups) -> str:
  rows, shapes = [], set()
  for group, data in groups:
    speed = data["decode"]
    if speed is None:
      continue
    shapes.add((speed["batch_size"], speed["prompt_len"], speed["new_tokens"],
                speed["repeats"]))
    rows.append([
      _key(group), _value(speed, "unfolded", ",.0f"),
      _value(speed, "folded", ",.0f"), _value(speed, "ratio", ".2f"),
      str(speed["runs"]), _text(_devices(group)),
    ])
  if not rows:
    return _left_out("a measurement of decoding")
  texts = [
    f"batch of {batch}, prompt of {prompt} tokens, {new} new ones, median of "
    f"{repeats} in turn"
    for batch, prompt, new, repeats in sorted(shapes, key=str)
  ]
  table = _table(
    "Decoding with a cache, tokens per second",
    ["Configuration", "Unfolded", "Folded", "Folded / unfolded", "Runs",
     "Device"],
    rows, words=(5,),
  )
  return table + (
    f'<p class="small">{_text("; ".join(texts))}. Medians over runs. One '
    "measurement at the end of each run, without an interval: small "
    "differences mean nothing.</p>"
  )


def _devices(group: Group) -> str:
  found = (run.summary.get("device") for run in group.runs if run.summary)
  return ", ".join(dict.fromkeys(results.clean(str(d)) for d in found))


def _samples(groups) -> str:
  """The first seed that has one, beside the other configurations'; all below.

  A damaged file may hold a sample that is no text; that seed has none.
  """
  first, more = "", ""
  for group, _ in groups:
    having = [seed for seed in group.seeds if seed.sample]
    for i, seed in enumerate(having):
      state = _STATUS[seed.status].format(step=seed.step)
      card = (
        f"<article><h3>{_key(group)}, seed {seed.seed}</h3>"
        f'<p class="small">{_text(state)}</p>'
        f"<p>{_text(seed.sample)}</p></article>"
      )
      first, more = (first + card, more) if i == 0 else (first, more + card)
  if not first:
    return _left_out("a sampled text")
  text = (
    "<p>Sampled at the last evaluation, or of the folded model where there is "
    f'one.</p><div class="samples">{first}</div>'
  )
  if more:
    text += (
      "<details><summary>The other seeds</summary>"
      f'<div class="samples">{more}</div></details>'
    )
  return text


def _configs(found: Found) -> str:
  """What differs, and all that is common."""
  configs = [group.config for group in found.groups]
  different = results.differences(configs)
  text = ""
  if different:
    text += _table(
      "Fields that differ; a dash is a field without effect on that variant",
      ["Field", *(group.label for group in found.groups)],
      [
        [_text(name), *(_field(value) for value in values)]
        for name, values in different.items()
      ],
      words=range(len(found.groups) + 1),
    )
  else:
    text += "<p>There is one configuration.</p>"
  common = results.compared(configs[0])
  rows = [
    [_text(name), _field(value)]
    for name, value in sorted(common.items()) if name not in different
  ]
  table = _table(
    "Fields that all configurations share", ["Field", "Value"], rows,
    words=(1,),
  )
  return (
    f"{text}<details><summary>Fields that are the same</summary>{table}"
    "</details>"
  )


def _field(value: Any) -> str:
  return "\u2013" if value is None else _text(
    results.clean(results.plain(value))
  )


def _environment(found: Found) -> str:
  rows, versions = [], {}
  for group in found.groups:
    for run in group.runs:
      summary = run.summary or {}
      states = dict.fromkeys(
        _STATUS[s.status].format(step=s.step) for s in run.seeds
      )
      seeds = ", ".join(str(seed.seed) for seed in run.seeds)
      device = str(summary.get("device", "\u2013"))
      if cores := summary.get("cpu_count"):
        device += f", {cores} cores"
      rows.append([
        _text(run.path), _key(group), _text(seeds), _text("; ".join(states)),
        _clock(summary.get("wall_s")), _text(results.clean(device)),
        _text(results.clean(str(summary.get("commit") or "\u2013"))),
      ])
      known = summary.get("versions")
      if isinstance(known, dict):
        text = ", ".join(f"{name} {value}" for name, value in known.items())
        versions.setdefault(results.clean(text), []).append(run.path)
  text = _table(
    "Runs",
    ["Run", "Configuration", "Seeds", "Status", "Wall time", "Device",
     "Commit"],
    rows, words=(1, 2, 3, 5, 6),
  )
  for names, paths in versions.items():
    which = "all runs that tell them" if len(versions) == 1 else (
      ", ".join(paths)
    )
    text += f'<p class="small">Versions of {_text(which)}: {_text(names)}.</p>'
  text += (
    '<p class="small">A commit with + had changes in the source. The wall time '
    "of a run of several seeds is that of all of them together.</p>"
  )
  return text


def _clock(seconds: Any) -> str:
  if not isinstance(seconds, int | float) or isinstance(seconds, bool):
    return "\u2013"
  minutes, rest = divmod(round(seconds), 60)
  hours, minutes = divmod(minutes, 60)
  if hours:
    return f"{hours} h {minutes:02} min"
  return f"{minutes} min {rest:02} s"
