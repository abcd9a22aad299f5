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


def print_table(summary: dict[str, Any]) -> None:
  """The summary as a table on standard output."""
  from rich.console import Console
  from rich.table import Table

  def number(value, form=".4f"):
    return "-" if value is None else format(value, form)

  s, speed = summary, summary["decode"]
  packages = ", ".join(f"{k} {v}" for k, v in s["versions"].items())
  table = Table(
    title=f"{s['size']} {s['variant']}, norm {s['norm']}, seed {s['seed']}, "
    f"{s['steps']:,} steps",
    caption=f"commit {s['commit']}, {s['device']}, {packages}",
  )
  for column in ("", "with norms or tapers", "folded"):
    table.add_column(column, justify="left" if not column else "right")
  table.add_row(
    "validation loss (nats per token)",
    number(s["valid_loss"]),
    number(s["valid_loss_folded"]),
  )
  table.add_row("  at gate 0", number(s["valid_loss_g0"]), "")
  table.add_row("bits per byte", number(s["bits_per_byte"]), "")
  table.add_row(
    "parameters",
    f"{s['params'] + s['params_taper']:,}",
    number(s["params_folded"], ","),
  )
  table.add_row(
    "decoding (tokens per second)",
    number(speed["unfolded_tokens_per_s"], ",.0f"),
    number(speed["folded_tokens_per_s"], ",.0f"),
  )
  if s["fold"]:
    largest, top1 = (
      s["fold"][name] for name in ("max_abs_delta_logit_f32", "top1_f32")
    )
    table.add_row("largest logit difference", "", number(largest, ".2g"))
    table.add_row("same most likely token", "", number(top1, ".2%"))
  table.add_row("mean logit norm", number(s["logit_norm"], ".1f"), "")
  table.add_row("wall time (s)", number(s["wall_s"], ".0f"), "")
  console = Console(stderr=False)
  console.print(table)
  console.print("sample: " + s["sample"], markup=False, highlight=False)
