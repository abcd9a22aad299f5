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
  """The summary as a table on standard output."""
  from rich.console import Console
  from rich.table import Table

  def number(value, form=".4f"):
    return "-" if value is None else format(value, form)

  s, speed = summary, summary["decode"]
  names = ("python", "jax", "flax")
  packages = ", ".join(f"{n} {s['versions'].get(n)}" for n in names)
  table = Table(
    title=f"{s['size']} {s['variant']}, norm {s['norm']}, seed {s['seed']}, "
    f"{s['steps']:,} steps",
    caption=f"commit {s['commit']}, {s['device']}, {packages}",
  )
  folded = s["fold"] is not None
  columns = ["", "gate 0" if folded else "norms", *(["folded"] * folded)]
  for column in columns:
    table.add_column(column, justify="right" if column else "left")

  def row(name, *values):
    table.add_row(name, *values[: len(columns) - 1])

  row(
    f"validation loss, {s['valid_tokens']:,} tokens (nats per token)",
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
    fold = s["fold"]
    row(
      "largest logit difference in float32 "
      f"(logits up to {number(fold['logit_scale_f32'], '.1f')})",
      "",
      number(fold["max_abs_delta_logit_f32"], ".2g"),
    )
    row("same most likely token", "", number(fold["top1_f32"], ".2%"))
  row("wall time (s)", number(s["wall_s"], ".0f"))
  console = Console(stderr=False)
  console.print(table)
  label = "sample of the folded model: " if folded else "sample: "
  print(wrap_sample(label, s["sample"]))
