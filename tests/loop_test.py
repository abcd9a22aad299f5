"""Whole runs: stopped anywhere they end the same, and no fault goes unsaid."""

from __future__ import annotations

import json
import math
import re
import shutil
import signal
import subprocess

import jax
import pytest

from taperjax import checkpoint, config as config_lib, loop, metrics, saved
from taperjax.errors import UserError
from tests import runs


@pytest.fixture(scope="module")
def root(tmp_path_factory):
  return runs.shared_root(tmp_path_factory)


@pytest.fixture(scope="module")
def halves(root):
  """All runs of STOPS: begun in one process, ended in another one."""
  runs.tapered(root)  # fills the cache
  first = runs.process("halves", root, "first")
  assert first.returncode == 0, first.stderr
  early = [
    stop
    for stop in runs.STOPS
    if (root / f"stop{stop}" / "summary.json").exists()
  ]
  second = runs.process("halves", root, "second")
  assert second.returncode == 0, second.stderr
  return early, first.stderr, second.stderr


@pytest.fixture
def copy(root, tmp_path):
  """A finished run that a test may change."""

  def make(name="tapered"):
    source = getattr(runs, name)(root)
    return shutil.copytree(source, tmp_path / name, dirs_exist_ok=True)

  return make


def again(workdir, root, **changes):
  """Starts a run in a workdir that was used before."""
  return runs.train(root, workdir.absolute(), **changes)


def every(root):
  """A run that logs, evaluates and saves at every step."""
  return runs.finished(
    root, "every", log_every=1, eval__every=1, checkpoint__every=1
  )


@pytest.mark.parametrize("stop", runs.STOPS)
def test_run_stopped_and_resumed_in_a_new_process_is_bit_identical(
  halves, root, stop
):
  """k_s - 1, k_s, k_s + 1, in the taper and at gate 0: the promise of resume.

  Stops fall between log records, evaluations and checkpoints, so sums of an
  interval, the calibration and the batches must all come back.
  """
  early, first, second = halves
  assert not early
  where = f"run {stop}\n"
  assert f"stopped at step {stop} of {runs.STEPS}" in first.split(where)[1]
  assert f"resuming at step {stop} of {runs.STEPS}" in second.split(where)[1]
  runs.assert_same_run(root / f"stop{stop}", runs.tapered(root))


def test_whole_run_loads_neither_tensorflow_nor_torch(halves, root):
  """Both are large, and no dependency; a TFDS import must not bring them."""
  del halves
  for half in ("first", "second"):
    assert json.loads((root / f"loaded-{half}.json").read_text()) == []


@pytest.mark.parametrize(
  "changes",
  [
    runs.BASELINE,
    {"variant": "internal", "norm": "layer", "model__num_layers": 1},
  ],
  ids=["baseline", "layer"],
)
def test_other_models_resume_exactly_too(root, request, changes):
  """A baseline has no phases, LayerNorm has biases: nothing of it is lost."""
  name = request.node.callspec.id
  reference = runs.finished(root, name, **changes)
  assert runs.train(root, f"{name}-stop", 7, **changes) is None
  assert runs.train(root, f"{name}-stop", **changes) is not None
  runs.assert_same_run(root / f"{name}-stop", reference)


@pytest.fixture
def held(root, tmp_path):
  """Starts train.py, which waits before step HOLD; killed at the end."""
  runs.tapered(root)  # fills the cache
  config = tmp_path / "configs" / "tiny.py"
  config.parent.mkdir()
  config.write_text(runs.CONFIG_FILE)
  workdir, log = tmp_path / "run", tmp_path / "stderr"
  path = workdir / "metrics.jsonl"
  with log.open("wb") as file:
    child = subprocess.Popen(
      runs.command(
        "train",
        tmp_path,
        f"--config={config}",
        f"--workdir={workdir}",
        f"--compilation_cache={root / 'cache'}",
      ),
      cwd=runs.REPOSITORY,
      env=runs.environment(),
      stderr=file,
      stdout=subprocess.DEVNULL,
    )

  def logged():
    assert child.poll() is None, log.read_text()
    return path.exists() and any(
      r["step"] == 6 for r in metrics.read_metrics(path)
    )

  runs.wait_for(logged, "the metrics of step 6")
  saved_5 = workdir / "checkpoints" / "5"
  runs.wait_for(saved_5.exists, "the checkpoint of step 5")
  yield child, workdir, log
  child.kill()
  child.wait()


def test_killed_run_goes_on_from_its_checkpoint(held, root):
  """kill -9 leaves later metrics and half a line; both are cut back."""
  child, workdir, _ = held
  child.kill()
  child.wait()
  path = workdir / "metrics.jsonl"
  assert metrics.read_metrics(path)[-1]["step"] == 6
  with path.open("a") as file:
    file.write('{"step": 7, "kind": "tra')
  (workdir / "folded.part-1").mkdir()
  _, _, err = runs.quiet(again, workdir, root)
  assert f"resuming at step 5 of {runs.STEPS}" in err
  runs.assert_same_run(workdir, runs.tapered(root))
  assert not list(workdir.glob("*.part-*"))


def test_sigterm_saves_and_exits_with_0_and_a_second_run_is_refused(
  held, root, tmp_path
):
  """Schedulers send SIGTERM; two runs in one workdir would mix their files."""
  child, workdir, log = held
  before = sorted(p.name for p in workdir.iterdir())
  for overwrite in (False, True):
    with pytest.raises(UserError, match="is in use by another run; wait"):
      again(workdir, root, overwrite=overwrite)
  assert sorted(p.name for p in workdir.iterdir()) == before
  child.send_signal(signal.SIGTERM)
  runs.wait_for(
    lambda: "stopping after this step" in log.read_text(), "the signal"
  )
  (tmp_path / "go").touch()
  assert child.wait(runs.LIMIT) == 0
  stopped = f"stopped at step {runs.HOLD} of {runs.STEPS} (SIGTERM)"
  assert stopped in log.read_text()
  again(workdir, root)
  runs.assert_same_run(workdir, runs.tapered(root))


def test_finished_run_prints_its_table_and_trains_nothing(
  copy, root, monkeypatch
):
  """The same command twice must not cost a second run."""
  workdir = copy()
  metrics_before = (workdir / "metrics.jsonl").read_bytes()
  monkeypatch.setattr(
    loop.step_lib, "make_train_step", lambda *_: pytest.fail("trains again")
  )
  summary, out, err = runs.quiet(again, workdir, root)
  assert "finished before" in err
  assert "validation loss" in out
  assert summary == json.loads((workdir / "summary.json").read_text())
  assert (workdir / "metrics.jsonl").read_bytes() == metrics_before


def test_damaged_summary_is_made_anew(copy, root):
  """All that it says can be had from the last checkpoint."""
  workdir = copy()
  before = runs.untimed_summary(workdir)
  (workdir / "summary.json").write_text("{")
  _, _, err = runs.quiet(again, workdir, root)
  assert "summary.json is damaged and is made anew" in err
  assert runs.untimed_summary(workdir) == before


def test_workdir_removed_under_the_run_is_told(copy, root, monkeypatch):
  """Half a workdir that says "wrote" would pass for a whole one."""
  workdir = copy()
  (workdir / "summary.json").unlink()
  monkeypatch.setattr(
    loop.Run, "_describe", lambda self: (workdir / ".taperjax").unlink()
  )
  with pytest.raises(UserError, match="was removed while the run was in it"):
    again(workdir, root)
  assert not (workdir / "summary.json").exists()


def test_mistake_leaves_no_new_folder(tmp_path):
  """A typo would otherwise leave an empty run for each try."""
  for kind in ("missing", "tokenizer"):
    changes = {"data__train": "no.txt"} if kind == "missing" else {
      "data__tokenizer": "no.json"
    }
    with pytest.raises(UserError, match="does not exist"):
      loop.train(runs.config(**changes), tmp_path / "new")
  assert not list(tmp_path.iterdir())


def test_run_killed_while_it_folds_ends_the_same(copy, root):
  """The last checkpoint is there, the summary is not: no second eval record."""
  workdir = copy()
  (workdir / "summary.json").unlink()
  shutil.rmtree(workdir / "folded")
  again(workdir, root)
  runs.assert_same_run(workdir, runs.tapered(root))


def test_different_config_stops_with_every_difference(copy, root):
  """One message names all fields, before any data are made for the run."""
  workdir = copy()
  before = sorted(workdir.rglob("*"))
  with pytest.raises(UserError) as error:
    again(
      workdir,
      root,
      steps=20,
      data__corpus_stories=30,
      model__mlp_dim=24,
      optimizer__learning_rate=1e-3,
    )
  text = str(error.value)
  assert "differs from the saved run in 4 field(s)" in text
  assert "steps: saved 10, now 20" in text
  assert "data.corpus_stories: saved 20, now 30" in text
  assert "model.mlp_dim: saved 20, now 24" in text
  assert "optimizer.learning_rate: saved 0.003, now 0.001" in text
  assert "--overwrite" in text
  assert sorted(workdir.rglob("*")) == before


def test_overwrite_starts_afresh(copy, root, monkeypatch):
  """Nothing of the earlier run is left, and foreign files are kept."""
  monkeypatch.delitem(config_lib._MOST, "optimizer.learning_rate")
  workdir = copy()
  (workdir / "notes.txt").write_text("mine")
  with pytest.raises(UserError, match="not finite"):
    again(workdir, root, overwrite=True, optimizer__learning_rate=1e18)
  assert not (workdir / "summary.json").exists()
  assert not (workdir / "folded").exists()
  assert saved.checkpoint.Checkpoints(workdir / "checkpoints").steps() == []
  assert (workdir / "notes.txt").read_text() == "mine"
  assert {r["step"] for r in runs.records(workdir)} <= {1, 2, 3}


def test_workdir_with_other_files_is_refused(tmp_path):
  """A mistyped --workdir must not fill a home folder."""
  (tmp_path / "thesis.tex").write_text("")
  with pytest.raises(UserError, match="holds 'thesis.tex' and no run"):
    loop.train(runs.config(), tmp_path)
  assert [p.name for p in tmp_path.iterdir()] == ["thesis.tex"]


@pytest.mark.parametrize("stop_after", [0, -1, 10, 11])
def test_stop_after_that_would_not_stop_is_refused(tmp_path, stop_after):
  """A setting without effect is a mistake."""
  with pytest.raises(UserError, match="must be from 1 to steps - 1 = 9"):
    loop.train(runs.config(), tmp_path / "run", stop_after=stop_after)
  assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("where", ["loss", "eval", "update"])
def test_nonfinite_number_stops_and_keeps_the_last_good_checkpoint(
  copy, root, monkeypatch, where
):
  """Metrics come a step late: all is checked before a state is saved."""
  workdir = copy()
  shutil.rmtree(workdir / "checkpoints" / "10")
  make_train_step = loop.step_lib.make_train_step

  def broken(config, phase, mesh):
    step = make_train_step(config, phase, mesh)

    def call(state, *batch):
      state, values = step(state, *batch)
      if where == "loss" and int(state.step) == 7:
        values["loss"] = math.nan
      if where != "loss" and int(state.step) == 10:
        bad = math.nan if where == "eval" else math.inf
        params = jax.tree.map(lambda x: x * bad, state.params)
        state = state.replace(params=params)
      return state, values

    return call

  monkeypatch.setattr(loop.step_lib, "make_train_step", broken)
  if where == "update":
    monkeypatch.setattr(loop.Run, "_evaluate", lambda *_: 1.0)
  name = {"loss": "loss=nan at step 7", "eval": "valid_loss=nan at step 10",
          "update": "update=nan at step 10"}[where]
  match = f"{name} is not finite.*last good checkpoint is step 5 in .*lower"
  with pytest.raises(UserError, match=match):
    again(workdir, root)
  assert checkpoint.Checkpoints(workdir / "checkpoints").steps() == [5]
  runs.assert_finite(workdir / "checkpoints")
  assert not (workdir / "summary.json").exists()
  if where == "loss":
    monkeypatch.undo()
    again(workdir, root)
    runs.assert_same_run(workdir, runs.tapered(root))


def test_resuming_falls_back_from_a_damaged_checkpoint_loudly(copy, root):
  """What was lost is named, and the end is the same."""
  workdir = copy()
  runs.damage(workdir, 10)
  _, _, err = runs.quiet(again, workdir, root)
  assert re.search(
    r"WARNING: .*checkpoints/10 is damaged.*Resuming from step 5 instead: the "
    "work of steps 6 to 10 is lost",
    err,
  )
  runs.assert_same_run(workdir, runs.tapered(root))


def test_run_with_no_intact_checkpoint_stops(copy, root):
  """A fresh start would throw the run away without being asked."""
  workdir = copy()
  runs.damage(workdir, 10)
  runs.damage(workdir, 5)
  with pytest.raises(UserError, match="none of the checkpoints .* is intact"):
    again(workdir, root)


def test_evaluations_are_at_the_gate_and_at_gate_0_once_it_exists(root):
  """Before calibration there is no c, so no g = 0: null, not a number."""
  evals = {
    r["step"]: r for r in runs.records(every(root)) if r["kind"] == "eval"
  }
  assert list(evals) == list(range(1, 11))
  for step in (1, 2, 3):
    assert evals[step]["valid_loss_g0"] is None
  assert evals[4]["gate"] == 1.0
  for step in (4, 5, 6, 7):
    assert evals[step]["valid_loss_g0"] != evals[step]["valid_loss"]
  for step in (8, 9, 10):  # the plateau
    assert evals[step]["gate"] == 0.0
    assert evals[step]["valid_loss_g0"] == evals[step]["valid_loss"]
  assert all(r["sample"].startswith("Once") for r in evals.values())


def test_only_checkpoints_at_gate_0_compete_for_best(
  root, tmp_path, monkeypatch
):
  """With norms the loss is often lower: a step before the plateau would win."""
  losses = dict(zip(range(1, 11), (1, 1, 1, 1, 1, 1, 1, 2, 3, 4), strict=True))
  monkeypatch.setattr(
    loop.Run, "_evaluate", lambda self, state: float(losses[int(state.step)])
  )
  workdir = tmp_path / "run"
  again(workdir, root, log_every=1, eval__every=1, checkpoint__every=1)
  found = checkpoint.Checkpoints(workdir / "checkpoints", read_only=True)
  assert found.best_step() == runs.END
  assert found.steps() == [runs.END, 9, 10]
  assert [found.meta(step)["gate"] for step in found.steps()] == [0.0] * 3
  assert saved.load(workdir).step == 10  # the latest unless told


def test_baseline_is_evaluated_as_it_is(root):
  """No taper: its g = 0 is itself, every checkpoint competes."""
  workdir = runs.baseline(root)
  evals = [r for r in runs.records(workdir) if r["kind"] == "eval"]
  assert [r["step"] for r in evals] == [5, 10]
  assert all(r["valid_loss_g0"] == r["valid_loss"] for r in evals)
  assert all(r["gate"] == 1.0 for r in evals)
  assert not [r for r in runs.records(workdir) if r["kind"] == "calibration"]
  assert not (workdir / "folded").exists()


def test_log_tells_means_of_its_interval_and_c_at_calibration(root):
  """Issue point 8; a record is a mean of steps, not one of them."""
  single = [r for r in runs.records(every(root)) if r["kind"] == "train"]
  workdir = runs.tapered(root)
  losses = {r["step"]: r["loss"] for r in single}
  records = [r for r in runs.records(workdir) if r["kind"] == "train"]
  assert [r["step"] for r in records] == [3, 6, 9, 10]
  for record, steps in zip(
    records, [(1, 2, 3), (4, 5, 6), (7, 8, 9), (10,)], strict=True
  ):
    mean = sum(losses[k] for k in steps) / len(steps)
    assert record["loss"] == pytest.approx(mean, rel=1e-6)
  assert set(records[0]) >= {
    "loss", "scale_loss", "gate", "learning_rate", "mean_scale",
    "scale_target", "logit_norm", "grad_norm", "grad_norm_qkv",
    "grad_norm_attn_out", "grad_norm_mlp_in", "grad_norm_mlp_out",
    "clipped_share",
  }
  [calibration] = [
    r for r in runs.records(workdir) if r["kind"] == "calibration"
  ]
  assert calibration["step"] == runs.START
  c = {k: v for k, v in calibration.items() if k.startswith("c/")}
  assert len(c) == 2 * 2 + 1
  assert all(value > 0 for value in c.values())
  raw = metrics.read_metrics(workdir / "metrics.jsonl")
  assert all(r["tokens_per_s"] > 0 for r in raw if r["kind"] == "train")


def test_run_leaves_the_settings_of_jax_as_they_were(root):
  """A second run in one process must not write to the first one's folder."""
  runs.tapered(root)
  assert jax.config.jax_compilation_cache_dir != str(root / "cache")


def test_a_run_starts_from_a_finished_one_with_its_weights_and_shape(
  root, tmp_path
):
  """Fine-tuning at rate 0 leaves the weights; the taper still folds away."""
  base = runs.baseline(root)
  changes = runs.started(base, optimizer__learning_rate=1e-30,
                         optimizer__final_learning_rate=0.0)
  summary = runs.train(root, tmp_path / "new", **changes)
  old, new = saved.load(base), saved.load(tmp_path / "new")
  assert new.config.num_layers == old.config.num_layers == 1
  assert new.tokenizer.fingerprint == old.tokenizer.fingerprint
  for path in (("embed", "embedding"), ("block_0", "mlp", "up", "kernel")):
    a, b = old.params, new.params
    for key in path:
      a, b = a[key], b[key]
    assert abs(a - b).max() < 1e-6, path
  assert new.gate == 0.0
  assert summary["valid_loss_folded"] is not None
  assert (new.c > 0).all()


def test_adapters_train_are_merged_and_resume_bit_for_bit(root, tmp_path):
  """The stop lies in the taper; eval, generate and fold see a plain model."""
  changes = runs.started(
    runs.baseline(root),
    lora__rank=2,
    lora__targets=("q", "o", "down"),
  )
  runs.train(root, tmp_path / "whole", **changes)
  runs.train(root, tmp_path / "parts", stop_after=runs.START + 1, **changes)
  runs.train(root, tmp_path / "parts", **changes)
  runs.assert_same_run(tmp_path / "parts", tmp_path / "whole")
  loaded = saved.load(tmp_path / "whole")
  assert "lora" not in loaded.params
  base = saved.load(runs.baseline(root))
  same = lambda *path: all(
    (a == b).all()
    for a, b in zip(*(
      jax.tree.leaves(m.params["block_0"][path[0]][path[1]])
      for m in (base, loaded)
    ), strict=True)
  )
  assert same("attn", "k")
  assert not same("attn", "q")
  assert not same("mlp", "down")


@pytest.mark.parametrize(
  "changes, message",
  [
    ({"model__num_layers": 3}, r"model.num_layers=3 differs .* which has 1"),
    ({"context_len": 25}, r"context_len=25 differs .* at most that"),
    ({"data__tokenizer": "bytes"}, "data.tokenizer='bytes' with init.check"),
    ({"lora__rank": -1}, r"lora.rank=-1 must be 0"),
    (
      {"lora__rank": 2, "optimizer__weight_decay": 0.1},
      "optimizer.weight_decay=0.1 with lora.rank=2 decays nothing",
    ),
    ({"lora__rank": 2, "lora__targets": ()}, r"lora.targets=\(\) with"),
    ({"init__checkpoint": "nowhere"}, "nowhere does not exist"),
  ],
)
def test_mistakes_about_the_start_of_a_run_are_one_line(root, changes, message):
  base = runs.baseline(root)
  with pytest.raises(UserError, match=message):
    runs.config(**runs.started(base, **changes))


def test_a_run_cannot_start_from_a_tapered_model(root):
  with pytest.raises(UserError, match="internal_norm=taper: a run starts from"):
    runs.config(**runs.started(runs.tapered(root)))


def test_adapters_and_the_tokenizer_init_need_a_checkpoint():
  with pytest.raises(UserError, match="lora.rank=2 needs trained weights"):
    runs.config(lora__rank=2)
  with pytest.raises(UserError, match="data.tokenizer=init is that of"):
    runs.config(data__tokenizer="init")


def test_a_gate_0_loss_that_is_not_finite_in_the_taper_does_not_stop_a_run(
  root, tmp_path, monkeypatch
):
  """The model is not there yet; at gate 0 itself it would stop."""
  loss = loop.Run._loss

  def exploding(self, params, c, gate, eval_step=None):
    found = loss(self, params, c, gate, eval_step)
    if self.gates and self.gates[-1] not in (0.0, 1.0) and gate == 0.0:
      found["loss"] = math.nan
    self.gates.append(float(gate))
    return found

  monkeypatch.setattr(loop.Run, "_loss", exploding)
  monkeypatch.setattr(loop.Run, "gates", [], raising=False)
  assert runs.train(root, tmp_path / "run", log_every=1) is not None
  evals = [
    record
    for record in metrics.read_metrics(tmp_path / "run" / "metrics.jsonl")
    if record["kind"] == "eval"
  ]
  assert [record["valid_loss_g0"] is None for record in evals] == [True, False]


def _with_bad_steps(monkeypatch, bad):
  broken = runs.with_bad_steps(bad)
  monkeypatch.setattr(loop.step_lib, "make_train_step", broken)


def test_skipped_steps_are_recorded_and_a_resumed_run_knows_them(
  root, tmp_path, monkeypatch
):
  """Steps 3 and 6; the run stops between them and goes on. Means leave them
  out, and the parameters are the same bits either way.
  """
  _with_bad_steps(monkeypatch, {3, 6})
  changes = {**runs.BASELINE, "nonfinite": "skip"}
  whole = runs.train(root, tmp_path / "whole", **changes)
  assert whole["skipped_steps"] == 2
  rows = runs.records(tmp_path / "whole")
  skipped = [(r["step"], r["skipped"]) for r in rows if r["kind"] == "skipped"]
  assert skipped == [(3, 1), (6, 2)]
  assert all(
    math.isfinite(r["loss"]) for r in rows if r["kind"] == "train"
  )
  runs.train(root, tmp_path / "parts", 5, **changes)
  parts = runs.train(root, tmp_path / "parts", **changes)
  assert parts["skipped_steps"] == 2
  runs.assert_same_run(tmp_path / "parts", tmp_path / "whole")


def test_ten_skipped_steps_in_a_row_stop_the_run(root, tmp_path, monkeypatch):
  _with_bad_steps(monkeypatch, set(range(1, 11)))
  with pytest.raises(loop.NotFinite, match="10 steps in a row, at step 10"):
    runs.train(root, tmp_path / "run", nonfinite="skip", variant="baseline",
               eval__every=10, checkpoint__every=10)


def test_without_a_finite_step_there_is_no_calibration(
  root, tmp_path, monkeypatch
):
  _with_bad_steps(monkeypatch, {1, 2, 3, 4})
  with pytest.raises(loop.NotFinite, match="scale_target=nan at step 4"):
    runs.train(root, tmp_path / "run", nonfinite="skip", eval__every=10,
               checkpoint__every=10)


def test_a_run_that_skips_keeps_a_last_model_whose_loss_is_not_finite(
  root, tmp_path, monkeypatch
):
  """Single windows may overflow where training goes well."""
  loss = loop.Run._loss
  monkeypatch.setattr(
    loop.Run, "_loss", lambda *args: loss(*args) | {"loss": math.nan}
  )
  match = "at step 10 .*checkpoint is step 10"
  with pytest.raises(loop.NotFinite, match=match):
    runs.train(root, tmp_path / "run", nonfinite="skip")
  assert saved.load(tmp_path / "run").step == 10
  kinds = [r["kind"] for r in runs.records(tmp_path / "run")]
  assert kinds.count("skipped") == 1  # the evaluation of step 5
