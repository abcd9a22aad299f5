"""What a run says of itself: environment, JSON files, the closing table."""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import json
import math
import os
import pathlib
import platform
import statistics
import subprocess
import sys
import textwrap
from typing import Any

from taperjax.errors import UserError
from taperjax.metrics import Progress


def say(text: str, progress: Progress | None = None) -> None:
  """Prints a line on standard error, above the progress bar if there is one."""
  if progress is not None:
    progress.line(text)
  else:
    print(text, file=sys.stderr, flush=True)


def strict(value: Any) -> Any:
  """The same for JSON, which has no NaN and no infinity: these become None."""
  if isinstance(value, dict):
    return {name: strict(item) for name, item in value.items()}
  if isinstance(value, list | tuple):
    return [strict(item) for item in value]
  if isinstance(value, float) and not math.isfinite(value):
    return None
  return value


def write_json(path: pathlib.Path, value: Any) -> None:
  """Strict JSON, whole or not at all.

  Raises:
    UserError: it cannot be written.
  """
  text = json.dumps(strict(value), indent=2, allow_nan=False) + "\n"
  part = path.with_name(f"{path.name}.part-{os.getpid()}")
  try:
    part.write_text(text, encoding="utf-8")
    part.replace(path)
  except OSError as error:
    raise UserError(
      f"{path} cannot be written ({error.strerror}); make room, or choose a "
      "writable folder"
    ) from error


def by_seed(rows: list[Any]) -> Any:
  """Values of several seeds as lists in their order, None of an ended one.

  Names of sites, and what no seed has, stay single.
  """
  first = next((row for row in rows if row is not None), None)
  if isinstance(first, dict):
    names = {name: None for row in rows for name in row or ()}
    return {
      name: first[name] if name == "site" else (
        by_seed([row and row.get(name) for row in rows])
      )
      for name in names
    }
  sites = isinstance(first, list) and first and isinstance(first[0], dict)
  if sites and "site" in first[0]:
    places = range(len(first))
    return [by_seed([row and row[j] for row in rows]) for j in places]
  return None if first is None else rows


def mean_text(losses: list[float]) -> str:
  """The loss of one seed, or mean and standard deviation of several."""
  if len(losses) == 1:
    return f"{losses[0]:.4f}"
  spread = statistics.stdev(losses)
  return f"{statistics.fmean(losses):.4f} ± {spread:.4f} ({len(losses)} seeds)"


def versions() -> dict[str, str]:
  """Versions of Python and of the packages that compute."""
  names = ("taperjax", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint",
           "numpy")
  found = {"python": platform.python_version()}
  for name in names:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
      found[name] = importlib.metadata.version(name)
  return found


@functools.cache  # of the code that runs, not of what is committed meanwhile
def commit() -> str | None:
  """Commit of the source, with '+' when it was changed; None outside git."""
  here = pathlib.Path(__file__).resolve().parent

  def git(*args):
    done = subprocess.run(
      ("git", "-C", str(here), *args), capture_output=True, text=True,
      check=True, timeout=10,
    )
    return done.stdout.strip()

  try:
    git("ls-files", "--error-unmatch", __file__)  # a repository of ours
    changed = git("status", "--porcelain", "--untracked-files=no")
    return git("rev-parse", "--short=12", "HEAD") + ("+" if changed else "")
  except (OSError, subprocess.SubprocessError):
    return None


def wrap_sample(label: str, text: str) -> str:
  """A sampled text for people: short lines, broken between words."""
  return "\n".join(
    textwrap.fill(line, 78, initial_indent="", subsequent_indent="  ")
    for line in (label + text).splitlines()
  )


def print_table(summary: dict[str, Any]) -> None:
  """The summary as a table on standard output; means over several seeds."""
  from rich.console import Console
  from rich.table import Table

  def number(value, form=".4f"):
    if not isinstance(value, list):
      return "-" if value is None else format(value, form)
    live = [item for item in value if item is not None]
    text = format(statistics.fmean(live), form)
    if len(live) > 1:
      text += f" ± {format(statistics.stdev(live), form)}"
    return text

  s, speed = summary, summary["decode"]
  names = ("python", "jax", "flax")
  packages = ", ".join(f"{n} {s['versions'].get(n)}" for n in names)
  seeds = s["seed"] if isinstance(s["seed"], list) else [s["seed"]]
  ended = s.get("diverged", [None] * len(seeds))
  shown = ", ".join(
    f"{seed}" if step is None else f"{seed} (diverged at step {step})"
    for seed, step in zip(seeds, ended, strict=True)
  )
  table = Table(
    title=f"{s['size']} {s['variant']}, norm {s['norm']}, seed {shown}, "
    f"{s['steps']:,} steps",
    caption=f"commit {s['commit']}, {s['device']}, {packages}",
  )
  folded = s["fold"] is not None
  columns = ["", "gate 0" if folded else "norms", *(["folded"] * folded)]
  for column in columns:
    table.add_column(column, justify="right" if column else "left")

  def row(name, *values):
    table.add_row(name, *values[: len(columns) - 1])

  first = ended.index(None)  # a seed that went all the way
  of_first = lambda value: value[first] if isinstance(value, list) else value
  row(
    f"validation loss, {of_first(s['valid_tokens']):,} tokens (nats per token)",
    number(s["valid_loss"]),
    number(s["valid_loss_folded"]),
  )
  row("bits per byte", number(s["bits_per_byte"]))
  row("parameters", f"{s['params']:,}", number(s["params_folded"], ","))
  row(
    f"decoding, batch of 1, median of {speed['repeats']} (tokens per second)",
    number(speed["unfolded_tokens_per_s"], ",.0f"),
    number(speed["folded_tokens_per_s"], ",.0f"),
  )
  row("mean logit norm", number(s["logit_norm"], ".1f"))
  if folded:
    worst = {name: _worst(name, value) for name, value in s["fold"].items()}
    row(
      "largest logit difference in float32 "
      f"(logits up to {number(worst['logit_scale_f32'], '.1f')})",
      "",
      number(worst["max_abs_delta_logit_f32"], ".2g"),
    )
    row("same most likely token", "", number(worst["top1_f32"], ".2%"))
  row("wall time (s)", number(s["wall_s"], ".0f"))
  console = Console(stderr=False)
  console.print(table)
  label = "sample of the folded model: " if folded else "sample: "
  print(wrap_sample(label, of_first(s["sample"])))


def _worst(name: str, value: Any) -> float | None:
  """Of several seeds the largest error, and the smallest agreement."""
  if not isinstance(value, list):
    return value
  live = [item for item in value if item is not None]
  return (min if name.startswith("top1") else max)(live, default=None)
