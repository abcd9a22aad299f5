"""`taperjax report`: the page, figures and numbers of finished runs."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
from collections.abc import Callable, Iterable
from typing import Any

import taperjax
from taperjax import saved
from taperjax.data import files
from taperjax.errors import UserError
from taperjax.report import page, plots, results
from taperjax.report.results import FORMAT, MARKER
from taperjax.summary import write_json


def write(
  runs: Iterable[str | os.PathLike[str]],
  out: str | os.PathLike[str],
  *,
  log: Callable[[str], object] = lambda line: None,
) -> dict[str, Any]:
  """Writes `out` whole, or not at all, and nothing elsewhere.

  In it: report.html, results.json, results.csv, and figures/NAME.png and .svg.

  Args:
    runs: workdirs of train.py, finished or not.
    out: a new or an empty folder, or an earlier report, which is replaced.
    log: takes lines on what was passed over, or is damaged.

  Returns:
    What results.json holds.

  Raises:
    UserError: there is no run, or `out` is not ours to write.
  """
  out = _check_out(pathlib.Path(out))
  found = results.read(map(pathlib.Path, runs))
  data = {"taperjax": taperjax.__version__, **results.to_json(found)}
  for line in (*data["damage"], *data["passed_over"]):
    log(line)
  with files.whole_folder(out, "the report") as part:
    folder = part / "figures"
    folder.mkdir(parents=True)
    figures = plots.draw(found.groups, folder)
    text = page.render(found, data, figures)
    (part / "report.html").write_text(text, encoding="utf-8")
    (part / "results.csv").write_text(
      results.to_csv(data), encoding="utf-8"
    )
    data["files"] = [*_names(part), MARKER]
    write_json(part / MARKER, data)
  return data


def _names(folder: pathlib.Path) -> list[str]:
  """Files below a folder, and folders that hold none."""
  return sorted(
    path.relative_to(folder).as_posix()
    for path in folder.rglob("*")
    if not path.is_dir() or path.is_symlink() or not any(path.iterdir())
  )


def _check_out(out: pathlib.Path) -> pathlib.Path:
  """Where to write, links resolved; raises unless it is free or a report."""
  out, there = saved.look_out(out)
  if not there:
    return out
  known = _earlier(out)
  if known is None:
    raise UserError(
      f"--out={out} holds {there[0]!r} and no {MARKER} of a report, so it is "
      "no report of ours; choose another folder"
    )
  if other := [name for name in _names(out) if name not in known]:
    raise UserError(
      f"--out={out} holds {other[0]!r}, which that report did not write; take "
      "it away, or choose another folder"
    )
  return out


def _earlier(out: pathlib.Path) -> list[str] | None:
  """Names of the files of a report that lies there, or None."""
  with contextlib.suppress(OSError, ValueError):
    found = json.loads((out / MARKER).read_text(encoding="utf-8"))
    if isinstance(found, dict) and found.get("format") == FORMAT:
      names = found.get("files")
      return names if isinstance(names, list) else []
  return None
