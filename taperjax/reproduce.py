"""`taperjax reproduce`: a grid of variants and seeds, and its report.

A cell is one run: a variant with one seed or, in one program, with all of them.
What lies in a grid's folder:

    grid.json                what was asked for
    VARIANT/seed_N           workdir of a cell with one seed
    VARIANT/all              workdir of a cell with all seeds
    data/  cache/            shared by the cells
    report/                  from `taperjax report`, at the end

A cell with a summary.json is done and never run again; one that was killed goes
on from its checkpoint, bit for bit.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import pathlib
import time
from collections.abc import Sequence
from typing import Any

from taperjax import config as config_lib, loop, saved, workdir as workdir_lib
from taperjax.config import Config
from taperjax.errors import UserError
from taperjax.summary import say, write_json


@dataclasses.dataclass(frozen=True)
class Cell:
  """One run of a grid."""

  workdir: pathlib.Path
  config: Config


def plan(
  fields: Any,
  folder: pathlib.Path,
  variants: Sequence[str],
  seeds: Sequence[int],
  together: bool,
) -> list[Cell]:
  """The cells of a grid, the variants of a seed beside one another.

  Args:
    fields: a ConfigDict, or a mapping like it; its variant and seeds are set.
    folder: of the grid.
    variants, seeds: what to run.
    together: all seeds of a variant in one program, one cell.

  Raises:
    UserError: as `config.parse`, or a variant or seed that is named twice.
  """
  for name, values in (("variants", variants), ("seeds", seeds)):
    if not values:
      raise UserError(f"--{name} names nothing; give at least one")
    if len(set(values)) < len(values):
      shown = ",".join(map(str, values))
      raise UserError(f"--{name}={shown} repeats one; name each once")
  plain, cells = config_lib.plain(fields), []
  for group in [tuple(seeds)] if together else [(seed,) for seed in seeds]:
    for variant in variants:
      name = "all" if together else f"seed_{group[0]}"
      config = saved.read_config(
        {**plain, "variant": variant, "seeds": group}
      )
      cells.append(Cell(folder / variant / name, config))
  return cells


def reproduce(
  cells: Sequence[Cell], folder: pathlib.Path
) -> tuple[list[Cell], list[Cell]]:
  """Runs what is not done yet, one cell after the other.

  Returns:
    (cells that are done, cells whose run was not finite). Both together are
    fewer than `cells` when a signal stopped the grid.

  Raises:
    UserError: the folder holds another grid, or a run cannot go on.
  """
  folder = workdir_lib.open_workdir(folder, "grid")
  with workdir_lib.lock(folder), workdir_lib.signals() as stop:
    workdir_lib.clean(folder, results=False)
    _check_same_grid(cells, folder)
    done, failed, seconds = [], [], []
    for number, cell in enumerate(cells, 1):
      if (cell.workdir / "summary.json").exists():
        done.append(cell)
        continue
      name = cell.workdir.relative_to(folder)
      left = ""
      if seconds:
        mean = sum(seconds) / len(seconds)
        left = f", about {mean * (len(cells) - number + 1) / 60:.0f} min left"
      say(f"cell {number} of {len(cells)}: {name}{left}")
      cell.workdir.parent.mkdir(exist_ok=True)
      began = time.monotonic()
      try:
        summary = loop.train(
          cell.config,
          cell.workdir,
          compilation_cache=folder / "cache",
          data_folder=folder / "data",
        )
      except loop.NotFinite as error:
        say(f"{name}: {error}")
        failed.append(cell)
        continue
      if summary is not None:
        seconds.append(time.monotonic() - began)
        done.append(cell)
      if stop:  # the run has saved, or was at its end
        break
  return done, failed


def _check_same_grid(cells: Sequence[Cell], folder: pathlib.Path) -> None:
  """Raises where the folder holds cells of another configuration."""
  path = folder / "grid.json"
  now = {
    str(cell.workdir.relative_to(folder)): config_lib.to_dict(cell.config)
    for cell in cells
  }
  before = {}
  if path.exists():
    with contextlib.suppress(OSError, ValueError, TypeError):
      before = dict(json.loads(path.read_text(encoding="utf-8")))
  for name in now.keys() & before.keys():
    config = config_lib.config_from_dict(now[name])
    if different := loop.different_fields(config, before[name]):
      raise UserError(
        f"workdir={folder} holds a grid with other fields "
        f"({'; '.join(different)}); restore them, or choose another --workdir"
      )
  write_json(path, {**before, **now})
