"""Runs as plain data: what each seed gave, groups, and their statistics.

A run is a workdir of `train.py`. Runs of one configuration but for the seed are
a group, and their seeds are pooled. S seeds, T steps of a curve.
"""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import math
import pathlib
import re
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from taperjax import config as config_lib, metrics
from taperjax.errors import UserError

MARKER = "results.json"  # marks a folder as a report of ours
FORMAT = "taperjax report 1"
OUTLIER_MADS = 3.5  # scaled median absolute deviations from the median
OUTLIER_SEEDS = 4  # with fewer, no seed is marked
BAND_SEEDS = 3  # with fewer, each seed is a line
BAND = (2.5, 97.5)  # percentiles over the seeds, as in the paper

# Table 2 of arXiv:2602.10408 (v1): mean and std over 6 seeds of the validation
# loss at gate 0, nats per token, and the gap to the baseline in percent.
PAPER = {
  ("1m", "baseline"): (2.1538, 0.0025, None),
  ("1m", "internal_aux"): (2.1852, 0.0040, 1.46),
  ("1m", "all_aux"): (2.1930, 0.0035, 1.82),
  ("3m", "baseline"): (1.7561, 0.0010, None),
  ("3m", "internal_aux"): (1.7828, 0.0029, 1.52),
  ("3m", "all_aux"): (1.7874, 0.0028, 1.78),
  ("9m", "baseline"): (1.4620, 0.0022, None),
  ("9m", "internal_aux"): (1.4837, 0.0016, 1.48),
  ("9m", "all_aux"): (1.4837, 0.0023, 1.48),  # 5 seeds, an outlier dropped
  ("30m", "baseline"): (1.2768, 0.0018, None),
  ("30m", "internal_aux"): (1.2859, 0.0010, 0.71),
  ("30m", "all_aux"): (1.2868, 0.0041, 0.78),
}
# Section 5.1 and Table 5: width and steps by size; the rest is common to all.
_PAPER_SIZES = {
  "1m": (64, 500_000),
  "3m": (128, 500_000),
  "9m": (256, 750_000),
  "30m": (512, 1_000_000),
}
_PAPER_FIELDS = {
  "norm": "rms",
  "batch_size": 16,
  "context_len": 512,
  "model.num_layers": 8,
  "model.num_heads": 16,
  "model.vocab_size": 10_000,
  "model.mlp": "swiglu",
  "optimizer.learning_rate": 3e-4,
  "optimizer.final_learning_rate": 0.0,
  "optimizer.warmup": 0.05,
  "optimizer.weight_decay": 0.0,
  "optimizer.b1": 0.9,
  "optimizer.b2": 0.95,
  "optimizer.clip_norm": 1.0,
  "model.positions": "rope",
  "model.tied": True,
  "model.biases": [],
  "eval.max_windows": None,
  "init.checkpoint": None,
  "lora.rank": 0,
}
# The defaults of later fields are the paper's.
_PAPER_TAPER = config_lib.to_dict(config_lib.TaperConfig(
  start=0.05, end=1.0, ema_rate=0.01, scale_loss_weight=0.1
))

# Fields that say where a run lies and not what it trains.
_PLACES = ("seeds", "data.folder", "checkpoint.")
# What a variant does by itself, or how often a run is looked at: neither makes
# a baseline another one.
_NOT_OF_BASELINE = (
  "variant", "taper.", "fakeln.", "fold.", "model.internal_norm",
  "model.internal_modes", "model.final_norm", "model.eot_id", "log_every",
  "eval.every", "eval.prompt", "eval.sample_tokens",
)
_LARGEST = 1e60  # far beyond float32, and no mean or ratio overflows
BASELINES = ("baseline", "vanilla")

# Of a summary, or of the last evaluation of an unfinished run.
_VALUES = (
  "valid_loss", "valid_loss_g0", "valid_loss_folded", "bits_per_byte",
  "logit_norm", "mean_scale", "scale_target",
)


@dataclasses.dataclass(frozen=True)
class Seed:
  """One seed of a run.

  Attributes:
    status: finished, unfinished, diverged, or damaged: no summary to read.
    step: the last one that it reached, or the one at which it diverged.
    values: of the finished seed by the names of summary.json; of others of
      their last evaluation.
    c: factor by tapered site.
    fold: errors of the folded model.
    curves: [(step, value)] by "KIND/NAME", as in metrics.jsonl.
  """

  seed: int
  run: str
  status: str
  step: int
  values: dict[str, float]
  c: dict[str, float]
  fold: dict[str, float]
  sample: str | None
  curves: dict[str, list[tuple[int, float]]]

  @property
  def loss(self) -> float | None:
    """Validation loss of a finished seed; no other loss is compared."""
    finished = self.status == "finished"
    return self.values.get("valid_loss") if finished else None


@dataclasses.dataclass(frozen=True)
class Run:
  """A workdir; damage holds a line for each file that cannot be read."""

  path: str
  config: dict[str, Any]
  summary: dict[str, Any] | None
  damage: list[str]
  seeds: list[Seed]


@dataclasses.dataclass(frozen=True)
class Group:
  """Runs of one configuration; `repeats` are seeds trained once more."""

  label: str
  runs: list[Run]
  seeds: list[Seed]
  repeats: list[Seed]

  @property
  def config(self) -> dict[str, Any]:
    return self.runs[0].config

  @property
  def losses(self) -> dict[int, float]:
    """Of the finished seeds."""
    return {s.seed: s.loss for s in self.seeds if s.loss is not None}


@dataclasses.dataclass(frozen=True)
class Found:
  """All that a report tells: groups in order, and what was passed over."""

  groups: list[Group]
  passed_over: list[str]

  @property
  def runs(self) -> list[Run]:
    return [run for group in self.groups for run in group.runs]


def read(paths: Iterable[str | pathlib.Path]) -> Found:
  """Reads workdirs; writes nothing.

  A folder or file without a config.json that can be read is passed over, with
  a line about it; damage to the other files of a run is told in `Run.damage`.

  Raises:
    UserError: a path does not exist, or none of them is a run.
  """
  runs, passed_over, seen = [], [], set()
  for path in map(pathlib.Path, paths):
    if not path.exists():
      raise UserError(
        f"run {path} does not exist; give a workdir of train.py"
      )
    if (real := path.resolve()) in seen:
      continue
    seen.add(real)
    try:
      runs.append(read_run(path))
    except UserError as error:
      passed_over.append(clean(str(error)))
  if not runs:
    raise UserError(f"there is no run to report: {'; '.join(passed_over)}")
  return Found(make_groups(runs), passed_over)


def read_run(path: pathlib.Path) -> Run:
  """One workdir, finished or not.

  Raises:
    UserError: its config.json is missing or damaged.
  """
  file = path / "config.json"
  if not path.is_dir() or not file.exists():
    raise UserError(f"{path} holds no config.json, so it is no run")
  try:  # a group of fields younger than the run has its defaults there
    config = config_lib.to_dict(config_lib.config_from_dict(_load(file)))
  except UserError as error:
    raise UserError(f"{file} is no configuration of a run: {error}") from error
  damage, records, summary = [], [], None
  try:
    records = metrics.read_metrics(path / "metrics.jsonl")
  except UserError as error:
    damage.append(clean(str(error)))
  if (path / "summary.json").exists():
    try:
      summary = _load(path / "summary.json")
      _check_summary(summary, config, path / "summary.json")
    except UserError as error:
      damage.append(clean(str(error)))
      summary = None
  run = Run(clean(str(path)), config, summary, damage, [])
  count = len(config["seeds"])
  run.seeds.extend(_seed(run, records, i, count) for i in range(count))
  return run


def _load(path: pathlib.Path) -> dict[str, Any]:
  try:
    found = json.loads(path.read_text(encoding="utf-8"))
  except (OSError, ValueError) as error:
    reason = getattr(error, "strerror", None) or "it is not JSON"
    raise UserError(f"{path} cannot be read ({reason})") from error
  if not isinstance(found, dict):
    raise UserError(f"{path} cannot be read (it is no JSON object)")
  return found


def _check_summary(summary, config, path) -> None:
  """Raises unless it is that of the configuration, seed for seed."""
  seeds = summary.get("seed")
  seeds = seeds if isinstance(seeds, list) else [seeds]
  if seeds != config["seeds"] or summary.get("steps") != config["steps"]:
    raise UserError(f"{path} does not fit config.json beside it")
  for i in range(len(seeds)):
    ended = _number(_pick(summary.get("diverged"), i, len(seeds)))
    loss = _number(_pick(summary.get("valid_loss"), i, len(seeds)))
    if ended is None and loss is None:
      raise UserError(f"{path} has no valid_loss of seed {seeds[i]}")


def _seed(
  run: Run, records: list[dict[str, Any]], i: int, count: int
) -> Seed:
  """Seed number i of the run."""
  curves: dict[str, list[tuple[int, float]]] = {}
  for record in records:
    for name, value in _scalars(record, i, count):
      points = curves.setdefault(f"{record['kind']}/{name}", [])
      points.append((record["step"], value))
  summary = run.summary or {}
  ended = _diverged(summary, records, i, count)
  status = "unfinished"
  if ended is not None:
    status = "diverged"
  elif run.summary is not None:
    status = "finished"
  elif run.damage:
    status = "damaged"
  values, sample = {}, None
  if status == "finished":
    found = {n: _number(_pick(summary.get(n), i, count)) for n in _VALUES}
    values = {n: v for n, v in found.items() if v is not None}
    sample = _pick(summary.get("sample"), i, count)
  else:
    for name in _VALUES:
      if points := curves.get(f"eval/{name}"):
        values[name] = points[-1][1]
    for record in records:
      sample = _pick(record.get("sample"), i, count) or sample
  fold = summary.get("fold")
  fold = fold if isinstance(fold, dict) else {}
  fold = {n: _number(_pick(v, i, count)) for n, v in fold.items()}
  last = ended or max((points[-1][0] for points in curves.values()), default=0)
  if status == "finished":
    last = run.config["steps"]
  return Seed(
    seed=run.config["seeds"][i],
    run=run.path,
    status=status,
    step=last,
    values=values,
    c=_factors(summary, curves, i, count),
    fold={n: v for n, v in fold.items() if v is not None},
    sample=clean(sample) if isinstance(sample, str) else None,
    curves=curves,
  )


def _diverged(summary, records, i: int, count: int) -> int | None:
  """The step at which a seed left the finite numbers, or None."""
  if summary:
    ended = _number(_pick(summary.get("diverged"), i, count))
    return None if ended is None else int(ended)
  last = records[-1] if records else {"kind": None}
  if count == 1:  # the run stopped there
    return last["step"] if last["kind"] == "nonfinite" else None
  if last["kind"] == "nonfinite":  # that of the last seed
    ended = _number(_pick(last.get("diverged"), i, count))
    return None if ended is None else int(ended)
  for record in records:
    loss = record.get("loss")
    if record["kind"] == "train" and isinstance(loss, list):
      others = any(value is not None for value in loss)
      if others and _number(_pick(loss, i, count)) is None:
        return record["step"]
  return None


def _factors(summary, curves, i: int, count: int) -> dict[str, float]:
  """c by site, of the summary or of the calibration."""
  found = {}
  sites = summary.get("c")
  for site in sites if isinstance(sites, list) else []:
    if isinstance(site, dict):
      found[str(site.get("site"))] = _number(_pick(site.get("c"), i, count))
  if not found:
    for name, points in curves.items():
      if name.startswith("calibration/c/"):
        found[name.removeprefix("calibration/c/")] = points[-1][1]
  return {clean(name): c for name, c in found.items() if c is not None}


def _scalars(
  record: Mapping[str, Any], i: int, count: int
) -> Iterator[tuple[str, float]]:
  """Numbers of one seed; a list of its own becomes NAME/0, NAME/1, ..."""
  for name, value in record.items():
    if name in ("step", "kind", "nonfinite"):
      continue
    value = _pick(value, i, count)
    items = {name: value}
    if isinstance(value, list):
      items = {f"{name}/{j}": item for j, item in enumerate(value)}
    for item_name, item in items.items():
      if (number := _number(item)) is not None:
        yield item_name, number


def _pick(value: Any, i: int, count: int) -> Any:
  """Of a run with several seeds the value of seed number i."""
  if count == 1 or not isinstance(value, list):
    return value
  return value[i] if len(value) == count else None


def _number(value: Any) -> float | None:
  """A number, or None for all else that a file may hold."""
  if not isinstance(value, int | float) or isinstance(value, bool):
    return None
  return float(value) if abs(value) < _LARGEST else None


def clean(text: str) -> str:
  """Text that UTF-8, HTML and SVG can hold: no control characters, whole."""
  text = text.encode("utf-8", "replace").decode("utf-8")
  return "".join(
    c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text
  )


def flat(fields: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
  """Nested fields by their dotted names."""
  found = {}
  for name, value in fields.items():
    if isinstance(value, dict):
      found |= flat(value, f"{prefix}{name}.")
    else:
      found[prefix + name] = value
  return found


def _without(fields: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
  """Without fields of these names, and groups of names that end in a dot."""
  groups = tuple(name for name in names if name.endswith("."))
  return {
    name: value
    for name, value in fields.items()
    if name not in names and not name.startswith(groups)
  }


def compared(config: Mapping[str, Any]) -> dict[str, Any]:
  """Fields that make a group: those with an effect on what is trained."""
  fields, variant = flat(config), config["variant"]
  unused = list(_PLACES)
  if variant in BASELINES:
    unused += ["taper.", "fakeln.", "fold."]
  elif variant != "fakeln":
    unused.append("fakeln.")
  if not config_lib.VARIANTS[variant][2]:
    unused += [n for n in fields if n.startswith("taper.scale_loss")]
  return _without(fields, unused)


def make_groups(runs: Iterable[Run]) -> list[Group]:
  """Runs by configuration, ordered by width, norm, variant and label."""
  by_key: dict[str, list[Run]] = {}
  for run in runs:
    key = json.dumps(compared(run.config), sort_keys=True)
    by_key.setdefault(key, []).append(run)
  members = list(by_key.values())
  labels = _labels([group[0].config for group in members])
  groups = []
  for label, group in zip(labels, members, strict=True):
    best: dict[int, Seed] = {}
    all_seeds = [seed for run in group for seed in run.seeds]
    for seed in all_seeds:  # of a repeated one that which got furthest
      rank = (seed.status == "finished", seed.step)
      other = best.get(seed.seed)
      if other is None or rank > (other.status == "finished", other.step):
        best[seed.seed] = seed
    kept = [best[number] for number in sorted(best)]
    repeats = [seed for seed in all_seeds if seed is not best[seed.seed]]
    groups.append(Group(label, group, kept, repeats))
  variants = list(config_lib.VARIANTS)

  def order(group):
    config = group.config
    return (
      config["model"]["embed_dim"], config["size"], config["norm"],
      variants.index(config["variant"]), group.label,
    )

  return sorted(groups, key=order)


def _labels(configs: Sequence[Mapping[str, Any]]) -> list[str]:
  """Variant, with size and norm where these differ, then fields that do."""
  sizes = {config["size"] for config in configs}
  norms = {config["norm"] for config in configs}
  labels = []
  for config in configs:
    size = f"{config['size']} " if len(sizes) > 1 else ""
    norm = f", {config['norm']} norm" if len(norms) > 1 else ""
    labels.append(clean(f"{size}{config['variant']}{norm}"))
  found = []
  for label, config in zip(labels, configs, strict=True):
    alike = [c for other, c in zip(labels, configs, strict=True)
             if other == label]
    different = differences(alike)
    fields = compared(config)
    parts = [f"{n.rpartition('.')[2]} {plain(fields.get(n))}"
             for n in different]
    more = f" and {len(parts) - 3} more" if len(parts) > 3 else ""
    text = ", ".join(parts[:3])
    found.append(clean(f"{label} ({text}{more})") if parts else label)
  return [  # those that fields left out above tell apart get a number
    f"{label} #{found[:i].count(label) + 1}" if found.count(label) > 1 else
    label
    for i, label in enumerate(found)
  ]


def differences(configs: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
  """Fields with an effect that differ, each with its values in order."""
  fields = [compared(config) for config in configs]
  names = sorted({name for one in fields for name in one})
  rows = {name: [one.get(name) for one in fields] for name in names}
  return {
    name: values
    for name, values in rows.items()
    if any(value != values[0] for value in values)
  }


def plain(value: Any) -> str:
  """A value of a configuration for people."""
  if isinstance(value, list):
    return " ".join(map(str, value)) or "()"
  if isinstance(value, float):
    return f"{value:g}"
  return f"{value:,}" if type(value) is int else str(value)


def baseline_of(group: Group, groups: Iterable[Group]) -> Group | None:
  """The baseline that differs in nothing but what a variant does."""
  wanted = _without(compared(group.config), _NOT_OF_BASELINE)
  found = [
    other
    for other in groups
    if other.config["variant"] in BASELINES
    and _without(compared(other.config), _NOT_OF_BASELINE) == wanted
  ]
  found.sort(key=lambda g: (BASELINES.index(g.config["variant"]), g.label))
  return found[0] if found else None


def mean_std(values: Sequence[float]) -> dict[str, float | None]:
  """Mean, and standard deviation with n - 1, of which one value has none."""
  values = list(values)
  if not values:
    return {"mean": None, "std": None, "n": 0}
  spread = statistics.stdev(values) if len(values) > 1 else None
  return {"mean": statistics.fmean(values), "std": spread, "n": len(values)}


def paired_gap(
  losses: Mapping[int, float], baseline: Mapping[int, float]
) -> dict[str, Any] | None:
  """How far losses lie above the baseline, over the seeds that both have.

  The interval is Student's of the per-seed differences d in nats, mean(d) +- t
  s / sqrt(n); the percentages are of the baseline's mean over the same seeds.

  Returns:
    seeds, nats, percent, and low and high, the 95 percent interval in percent,
    None of one pair. None without a pair.
  """
  seeds = sorted(losses.keys() & baseline.keys())
  if not seeds:
    return None
  gaps = [losses[seed] - baseline[seed] for seed in seeds]
  per_nat = 100.0 / statistics.fmean(baseline[seed] for seed in seeds)
  gap = statistics.fmean(gaps)
  low = high = None
  if len(gaps) > 1:
    from scipy.special import stdtrit

    n = len(gaps)
    half = float(stdtrit(n - 1, 0.975)) * statistics.stdev(gaps) / math.sqrt(n)
    low, high = (gap - half) * per_nat, (gap + half) * per_nat
  return {
    "seeds": seeds,
    "nats": gap,
    "percent": gap * per_nat,
    "low": low,
    "high": high,
  }


def outliers(losses: Mapping[int, float]) -> dict[int, float]:
  """Seeds more than 3.5 scaled MADs from the median, of at least 4 seeds.

  The MAD is the median of |loss - median|, times 1.4826, which makes it a
  standard deviation for normal losses; where it is 0 no seed is marked.

  Returns:
    Scaled MADs from the median, with sign, by seed. They are marked, and stay
    in every mean.
  """
  if len(losses) < OUTLIER_SEEDS:
    return {}
  middle = statistics.median(losses.values())
  mad = statistics.median(abs(loss - middle) for loss in losses.values())
  if mad == 0.0:
    return {}
  away = {s: (loss - middle) / (1.4826 * mad) for s, loss in losses.items()}
  return {s: x for s, x in away.items() if abs(x) > OUTLIER_MADS}


def paper_row(config: Mapping[str, Any]) -> dict[str, float | None] | None:
  """The paper's numbers, where the run is the paper's in all that it names."""
  size, variant = config["size"], config["variant"]
  fields = flat(config)
  shape = (fields["model.embed_dim"], config["steps"])
  same = _PAPER_SIZES.get(size) == shape and all(
    fields.get(name) == value for name, value in _PAPER_FIELDS.items()
  )
  if any(config_lib.VARIANTS[variant][:2]):
    same = same and config["taper"] == _PAPER_TAPER
  row = PAPER.get((size, variant)) if same else None
  if row is None:
    return None
  return {"valid_loss": row[0], "std": row[1], "gap_percent": row[2]}


def curve(
  seeds: Sequence[Seed], name: str, most: int
) -> tuple[np.ndarray, np.ndarray]:
  """Curves of several seeds on common steps, averaged to at most `most` points.

  More steps are cut into runs of equal length; a point is the mean of the
  records of a seed in one of them, at the mean of its steps.

  Returns:
    steps_T and values_ST, NaN where a seed has no record.
  """
  steps = sorted({k for s in seeds for k, _ in s.curves.get(name, ())})
  place = {step: i for i, step in enumerate(steps)}
  values_ST = np.full((len(seeds), len(steps)), np.nan)
  for row, seed in zip(values_ST, seeds, strict=True):
    for step, value in seed.curves.get(name, ()):
      row[place[step]] = value
  steps_T = np.asarray(steps, np.float64)
  if len(steps) <= most:
    return steps_T, values_ST
  edges = np.linspace(0, len(steps), most + 1).astype(int)
  parts = list(zip(edges[:-1], edges[1:], strict=True))
  return (
    np.array([steps_T[a:b].mean() for a, b in parts]),
    np.stack([_nanmean(values_ST[:, a:b], 1) for a, b in parts], axis=1),
  )


def _nanmean(values: np.ndarray, axis: int) -> np.ndarray:
  """The mean of what there is; NaN of nothing, without a warning."""
  there = ~np.isnan(values)
  total = np.where(there, values, 0.0).sum(axis)
  count = there.sum(axis)
  return np.where(count > 0, total / np.maximum(count, 1), np.nan)


def band(values_ST: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """Mean and both percentiles of BAND over the seeds with a value, (T,)."""
  mean_T = _nanmean(values_ST, 0)
  low_T, high_T = np.full_like(mean_T, np.nan), np.full_like(mean_T, np.nan)
  for t in np.flatnonzero(~np.isnan(mean_T)):
    there = values_ST[~np.isnan(values_ST[:, t]), t]
    low_T[t], high_T[t] = np.percentile(there, BAND)
  return mean_T, low_T, high_T


def last(seed: Seed, name: str) -> float | None:
  """The last value of a curve."""
  points = seed.curves.get(name)
  return points[-1][1] if points else None


def last_mean(group: Group, name: str) -> float | None:
  """The mean of the last values of the seeds that did not diverge."""
  values = [last(s, name) for s in group.seeds if s.status != "diverged"]
  values = [value for value in values if value is not None]
  return statistics.fmean(values) if values else None


def items(seeds: Iterable[Seed], prefix: str) -> list[str]:
  """Names of the curves PREFIX/0, PREFIX/1, ..., in order."""
  pattern = re.compile(re.escape(prefix) + r"/(\d+)")
  found = {
    int(match[1]): name
    for seed in seeds
    for name in seed.curves
    if (match := pattern.fullmatch(name))
  }
  return [found[j] for j in sorted(found)]


def worst_fold(group: Group) -> dict[str, float]:
  """Over the seeds the largest error, and the smallest agreement."""
  names = {name for seed in group.seeds for name in seed.fold}
  found = {}
  for name in sorted(names):
    values = [s.fold[name] for s in group.seeds if name in s.fold]
    worst = min if name.startswith("top1") else max
    found[name] = worst(values, key=abs)
  return found


def decode_speed(group: Group) -> dict[str, Any] | None:
  """Median over the runs of tokens per second, and of their ratio."""
  rows = [run.summary.get("decode") for run in group.runs if run.summary]
  rows = [row for row in rows if isinstance(row, dict)]
  rates = {"unfolded": [], "folded": [], "ratio": []}
  for row in rows:
    slow = _number(row.get("unfolded_tokens_per_s"))
    fast = _number(row.get("folded_tokens_per_s"))
    rates["unfolded"] += [slow] if slow else []
    rates["folded"] += [fast] if fast else []
    rates["ratio"] += [fast / slow] if fast and slow else []
  if not rates["unfolded"]:
    return None
  shape = {n: rows[0].get(n) for n in
           ("batch_size", "prompt_len", "new_tokens", "repeats")}
  medians = {
    name: statistics.median(values) if values else None
    for name, values in rates.items()
  }
  return medians | shape | {"runs": len(rows)}


def radial_row(group: Group, baseline: Group | None) -> dict[str, float] | None:
  """Radial gradients and logit norm of the last evaluation, means over seeds.

  Seeds that diverged have no part in it. `over_baseline` is the logit norm over
  that of the baseline.
  """
  names = ("radial_ce", "radial_scale", "radial", "margin", "margin_share",
           "logit_norm")
  row = {name: last_mean(group, f"eval/{name}") for name in names}
  row = {name: value for name, value in row.items() if value is not None}
  if "radial_ce" not in row:
    return None
  below = baseline and last_mean(baseline, "eval/logit_norm")
  if below and "logit_norm" in row:
    row["over_baseline"] = row["logit_norm"] / below
  return row


def to_json(found: Found) -> dict[str, Any]:
  """All groups with per-seed values, and every figure of the tables."""
  return {
    "format": FORMAT,
    "groups": [_group_json(group, found.groups) for group in found.groups],
    "passed_over": found.passed_over,
    "damage": [line for run in found.runs for line in run.damage],
  }


def _group_json(group: Group, groups: list[Group]) -> dict[str, Any]:
  config, losses = group.config, group.losses
  baseline = baseline_of(group, groups)
  gap = None
  if baseline is not None and baseline is not group:
    gap = paired_gap(losses, baseline.losses)
  if gap is not None:
    gap = {"baseline": baseline.label, **gap}
  away = outliers(losses)
  return {
    "label": group.label,
    **{n: config[n] for n in ("variant", "size", "norm", "steps",
                              "batch_size", "context_len")},
    "seeds": [
      _seed_json(seed) | {"outlier_mads": away.get(seed.seed)}
      for seed in group.seeds
    ],
    "repeats": [_seed_json(seed) for seed in group.repeats],
    "valid_loss": mean_std(losses.values()),
    "gap": gap,
    "paper": paper_row(config),
    "fold": worst_fold(group) or None,
    "decode": decode_speed(group),
    "radial": radial_row(group, baseline),
    "runs": [
      {"path": run.path, "damage": run.damage, **_environment(run)}
      for run in group.runs
    ],
    "config": config,
  }


def _seed_json(seed: Seed) -> dict[str, Any]:
  return {
    "seed": seed.seed,
    "run": seed.run,
    "status": seed.status,
    "step": seed.step,
    **{name: seed.values.get(name) for name in _VALUES},
    "c": seed.c,
    "fold": seed.fold or None,
    "sample": seed.sample,
  }


def _environment(run: Run) -> dict[str, Any]:
  names = ("wall_s", "commit", "device", "cpu_count", "versions")
  return {name: (run.summary or {}).get(name) for name in names}


def to_csv(results: Mapping[str, Any]) -> str:
  """One row for each group and seed, of what `to_json` gives."""
  out = io.StringIO()
  names = ["group", "variant", "size", "norm", "steps", "seed", "status",
           "step", *_VALUES, "outlier_mads", "max_abs_delta_logit_f32", "run"]
  writer = csv.DictWriter(out, names, lineterminator="\n")
  writer.writeheader()
  for group in results["groups"]:
    for seed in group["seeds"]:
      fields = {**group, **seed, **(seed["fold"] or {})}
      fields["group"], fields["steps"] = group["label"], group["steps"]
      writer.writerow({name: fields.get(name) for name in names})
  return out.getvalue()
