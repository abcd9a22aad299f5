"""A grid of runs: killed anywhere it ends the same, nothing is done twice."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys

import pytest

from taperjax import (
  cli,
  config as config_lib,
  loop,
  reproduce,
  workdir as workdir_lib,
)
from taperjax.errors import UserError
from tests import runs

CELLS = ("baseline/seed_4", "final/seed_4")


@pytest.fixture(scope="module")
def config(tmp_path_factory):
  """A config file of ten steps with one layer."""
  path = tmp_path_factory.mktemp("grid") / "configs" / "tiny.py"
  path.parent.mkdir()
  text = runs.CONFIG_FILE.replace("variant=variant", "model__num_layers=1")
  path.write_text(text)
  return path


def arguments(config, folder):
  return [
    "reproduce", str(config), "--variants=baseline,final", "--seeds=4",
    f"--workdir={folder}", "--config.taper.end=0.9", "--json",
  ]


def start(config, folder):
  """The command as a program of its own."""
  code = "from taperjax import cli; cli.main()"
  return subprocess.Popen(
    [sys.executable, "-c", code, *arguments(config, folder)],
    cwd=runs.REPOSITORY, env=runs.environment(), text=True,
    stdout=subprocess.PIPE, stderr=subprocess.PIPE,
  )


@pytest.fixture(scope="module")
def grid(config, tmp_path_factory):
  """(folder, result) of a grid that nobody stopped."""
  folder = tmp_path_factory.mktemp("whole") / "grid"
  out, err = start(config, folder).communicate(timeout=runs.LIMIT)
  assert "cell 1 of 2: baseline/seed_4" in err, err
  assert "cell 2 of 2: final/seed_4, about " in err
  return folder, json.loads(out)


def test_a_grid_killed_three_times_ends_the_same(config, grid, tmp_path):
  """In a run, at the start of the next one, and while that one ends."""
  whole, _ = grid
  folder = tmp_path / "grid"
  shutil.copytree(whole / "cache", folder / "cache")
  (folder / ".taperjax").touch()
  moments = [
    folder / CELLS[0] / "checkpoints" / "5",
    folder / CELLS[1] / "config.json",
    folder / CELLS[1] / "folded",
  ]
  for moment in moments:
    child = start(config, folder)
    there = lambda child=child, moment=moment: (
      moment.exists() or child.poll() is not None
    )
    runs.wait_for(there, moment)
    child.kill()
    child.communicate()
    assert child.returncode == -9
    assert not (folder / CELLS[1] / "summary.json").exists()
  out, err = start(config, folder).communicate(timeout=runs.LIMIT)
  assert "cell 1 of 2" not in err and "cell 2 of 2" in err
  assert json.loads(out)["done"] == 2
  for name in CELLS:
    runs.assert_same_run(folder / name, whole / name)


def test_a_finished_grid_runs_nothing(config, grid, monkeypatch, capsys):
  folder, result = grid
  assert result["cells"] == result["done"] == 2
  assert result["not_finite"] == []
  monkeypatch.setattr(loop, "train", None)
  cli.main(arguments(config, folder))
  assert json.loads(capsys.readouterr().out) == result


def test_cells_differ_in_variant_and_seed_alone(grid):
  folder, _ = grid
  first, second = (
    json.loads((folder / name / "config.json").read_text()) for name in CELLS
  )
  assert first["seeds"] == [4] and first["taper"]["end"] == 0.9
  assert (first.pop("variant"), second.pop("variant")) == ("baseline", "final")
  assert first["model"].pop("final_norm") == "norm"
  assert second["model"].pop("final_norm") == "taper"
  assert first == second


def test_seeds_run_apart_or_in_one_program(tmp_path):
  """All variants of a seed come before the next seed: a table soon."""

  def names(together):
    cells = reproduce.plan(
      runs.fields(), tmp_path, ["baseline", "all"], [2, 0], together
    )
    return [
      (str(cell.workdir.relative_to(tmp_path)), cell.config.seeds)
      for cell in cells
    ]

  assert names(True) == [("baseline/all", (2, 0)), ("all/all", (2, 0))]
  assert names(False) == [
    ("baseline/seed_2", (2,)), ("all/seed_2", (2,)),
    ("baseline/seed_0", (0,)), ("all/seed_0", (0,)),
  ]


def test_a_cell_that_is_not_finite_does_not_stop_the_grid(
  tmp_path, monkeypatch, capsys
):
  """It is told; the other cells run."""

  def train(config, workdir, **options):
    if config.variant == "all":
      raise loop.NotFinite("loss=nan at step 3 is not finite")
    workdir.mkdir()
    (workdir / "summary.json").write_text("{}")
    return {}

  monkeypatch.setattr(loop, "train", train)
  cells = reproduce.plan(
    runs.fields(), tmp_path / "g", ["all", "final"], [0], False
  )
  done, failed = reproduce.reproduce(cells, tmp_path / "g")
  assert [c.config.variant for c in done] == ["final"]
  assert [c.config.variant for c in failed] == ["all"]
  assert "all/seed_0: loss=nan at step 3" in capsys.readouterr().err


def test_a_grid_that_is_stopped_says_so(tmp_path, monkeypatch):
  """After a signal the run gives no summary; no other cell begins."""

  def train(*args, **options):
    signal.raise_signal(signal.SIGTERM)

  monkeypatch.setattr(loop, "train", train)
  cells = reproduce.plan(
    runs.fields(), tmp_path / "g", ["all", "final"], [0], False
  )
  assert reproduce.reproduce(cells, tmp_path / "g") == ([], [])


def test_a_signal_in_the_last_step_of_a_cell_stops_the_grid(
  tmp_path, monkeypatch
):
  """The cell ends, as it may, and no other begins."""

  def train(config, workdir, **options):
    with workdir_lib.signals() as inner:
      signal.raise_signal(signal.SIGTERM)
      assert inner == ["SIGTERM"]
    return {}

  monkeypatch.setattr(loop, "train", train)
  cells = reproduce.plan(
    runs.fields(), tmp_path / "g", ["all", "final"], [0], False
  )
  done, failed = reproduce.reproduce(cells, tmp_path / "g")
  assert (done, failed) == (cells[:1], [])


def test_another_grid_in_the_folder_is_refused(config, grid):
  """Half of a table must not be of other steps."""
  folder, _ = grid
  fields = cli.load_config(str(config))
  fields.steps = 11
  fields.taper.end = 0.9
  cells = reproduce.plan(fields, folder, ["baseline"], [4], False)
  with pytest.raises(UserError, match="steps: saved 10, now 11"):
    reproduce.reproduce(cells, folder)


@pytest.mark.parametrize(
  "change, message",
  [
    ("--variants=baseline,bse", "variant='bse' is not one of baseline, in"),
    ("--variants=final,final", "--variants=final,final repeats one; name"),
    ("--seeds=3-1", "--seeds=3-1 must name numbers, as 0-5 or 0,2,7"),
    ("--seeds=0,0", "--seeds=0,0 repeats one; name each once"),
    ("--seeds=a", "--seeds=a must name numbers"),
    ("--config.stesp=3", "stesp is not a config field; did you mean steps?"),
    ("--config.steps=x", "steps='x' must be a whole number"),
    ("--config.steps=0", "steps=0 must be above 0"),
    ("--config.model.biases=q", "model.biases='q' is no tuple; write"),
    ("--config.taper.calibrate", "--config.taper.calibrate has no value; wri"),
    ("--config.seeds=(7,)", "--config.seeds has no effect here; use --seeds"),
    ("--config.variant=all", "--config.variant has no effect here; use --vari"),
    ("--confg.steps=3", "unrecognized arguments: --confg.steps=3"),
  ],
)
def test_mistakes_are_one_line(config, tmp_path, capsys, change, message):
  """Before anything is written."""
  with pytest.raises(SystemExit) as stop:
    cli.main([*arguments(config, tmp_path / "g"), change])
  assert stop.value.code == 2
  err = capsys.readouterr().err
  assert message in err and err.count("\n") == 1
  assert not (tmp_path / "g").exists()


def test_fields_are_set_as_train_py_sets_them(config):
  fields = cli.load_config(str(config))
  flags = ["seeds=(1,2)", "model.tied=False", "data.vocab_size=None",
           "norm=layer", "taper.start=0.3", "model.biases=('q','k')"]
  cli._set_fields(fields, str(config), [f"--config.{flag}" for flag in flags])
  found = config_lib.parse({**config_lib.plain(fields)})
  assert (found.seeds, found.norm, found.taper.start) == ((1, 2), "layer", 0.3)
  assert found.model.biases == ("q", "k") and not found.model.tied
