"""Several seeds in one program: each as if alone, none harms another."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from taperjax import api, cli, gate as gate_lib, loop, saved, state, step
from taperjax.errors import UserError
from tests import runs, tiny

SEEDS = (3, 0, 7)
# Their gradient is zero in theory, so Adam scales up what rounding leaves.
KEY_BIAS = "attn/k/bias"


@pytest.fixture(scope="module")
def root(tmp_path_factory):
  return runs.shared_root(tmp_path_factory)


def several(root):
  return runs.finished(root, "several", seeds=SEEDS)


def batch(seed, k):
  rng = np.random.default_rng((seed, k))
  return rng.integers(0, tiny.V, (tiny.B, tiny.L + 1), np.int32)


def train(config, tokens_of, begin, steps):
  """(state, metrics of each step) of a whole run without files."""
  now, found = begin, []
  for k in range(1, config.steps + 1):
    phase = gate_lib.phase(k, config.taper_steps)
    if phase not in steps:
      steps[phase] = step.make_train_step(config, phase)
    now, metrics = steps[phase](now, tokens_of(k), tiny.mask())
    if k == config.taper_steps.start:
      now = step.make_calibrate(config)(now)
    found.append(jax.device_get(metrics))
  return jax.device_get(now), found


@pytest.fixture(scope="module")
def configs():
  """60 steps of LayerNorm with biases: 15 norm, 30 taper, 15 at gate 0."""
  changes = {
    "steps": 60, "norm": "layer", "taper__start": 0.25, "taper__end": 0.75,
    "model__biases": ("q", "k", "v", "o", "up", "down"),
  }
  return [tiny.config(seeds=seeds, **changes) for seeds in (SEEDS, (0,))]


def test_a_seed_beside_others_is_the_seed_alone_to_rounding(configs):
  """The promise of the axis, over all three phases.

  Float32 sums in another order differ by 1e-7 a step; 60 steps of Adam make
  up to 1e-5 of it, and 1e-3 of the key biases.
  """
  together, alone = configs
  tokens_of = lambda k: np.stack([batch(seed, k) for seed in SEEDS])
  begin = jax.jit(state.create_seeds, static_argnums=0)(together)
  got, got_metrics = train(together, tokens_of, begin, {})
  losses, steps = set(), {}
  for i, seed in enumerate(SEEDS):
    begin = jax.jit(state.create, static_argnums=0)(alone, seed)
    tokens_of = lambda k, seed=seed: batch(seed, k)
    want, metrics = train(alone, tokens_of, begin, steps)
    assert got.diverged[i] == 0
    for ours, theirs in zip(got_metrics, metrics, strict=True):
      assert theirs.keys() | {"diverged"} == ours.keys()
      for name, value in theirs.items():
        np.testing.assert_allclose(ours[name][i], value, 3e-5, 1e-6, name)
    losses.add(float(metrics[-1]["loss"]))
    leaves = jax.tree_util.tree_leaves_with_path(want.params)
    mine = jax.tree.leaves(got.params)
    assert len(leaves) > 20
    for (path, leaf), leaf_S in zip(leaves, mine, strict=True):
      name = jax.tree_util.keystr(path, simple=True, separator="/")
      most = 1e-2 if name.endswith(KEY_BIAS) else 2e-5
      np.testing.assert_allclose(leaf_S[i], leaf, 0, most, name)
    np.testing.assert_allclose(got.taper.c[i], want.taper.c, 1e-5)
  assert len(losses) == len(SEEDS)


def test_a_seed_that_diverges_is_frozen_and_the_others_go_on(configs):
  """Nothing of the bad step gets into it, and nothing into the others."""
  config = configs[0]
  train_step = step.make_train_step(config, gate_lib.NORM)
  create = jax.jit(state.create_seeds, static_argnums=0)
  tokens = np.stack([batch(seed, 1) for seed in SEEDS])
  clean, _ = train_step(create(config), tokens, tiny.mask())
  states = create(config)
  bad = states.params["embed"]["embedding"].at[1, 0, 0].set(jnp.inf)
  states.params["embed"]["embedding"] = bad
  before = jax.device_get(state.take_seed(states, 1))
  for k in (1, 2):
    states, metrics = train_step(states, tokens, tiny.mask())
    np.testing.assert_array_equal(metrics["diverged"], [0, 1, 0])
    if k == 1:
      for i in (0, 2):
        pair = (state.take_seed(s, i).params for s in (states, clean))
        jax.tree.map(np.testing.assert_array_equal, *pair)
  after = jax.device_get(state.take_seed(states, 1))
  for name in ("params", "opt_state", "taper"):
    jax.tree.map(
      np.testing.assert_array_equal, getattr(before, name), getattr(after, name)
    )
  np.testing.assert_array_equal(states.step, [2, 2, 2])


@pytest.mark.parametrize("stop", [runs.START, runs.START + 3])
def test_a_run_of_several_seeds_resumes_bit_for_bit(root, stop):
  name = f"several-{stop}"
  assert runs.train(root, name, stop, seeds=SEEDS) is None
  assert runs.train(root, name, seeds=SEEDS) is not None
  for seed in SEEDS:
    ours, want = (
      runs.state(path / "folded" / f"seed_{seed}")[1]
      for path in (root / name, several(root))
    )
    assert ours.keys() == want.keys()
    for leaf, array in ours.items():
      assert array.tobytes() == want[leaf].tobytes(), leaf
  assert runs.records(root / name) == runs.records(several(root))
  summary = runs.untimed_summary(root / name)
  assert summary == runs.untimed_summary(several(root))


def test_files_hold_lists_in_the_order_of_the_seeds(root):
  """A seed alone has the same losses; one of several has its own folder."""
  workdir = several(root)
  summary = json.loads((workdir / "summary.json").read_text())
  assert summary["seed"] == list(SEEDS)
  assert summary["diverged"] == [None] * 3
  alone = runs.finished(root, "alone", seeds=SEEDS[2:])
  want = json.loads((alone / "summary.json").read_text())
  for name in ("valid_loss", "valid_loss_folded", "mean_scale"):
    assert summary[name][2] == pytest.approx(want[name], rel=1e-5), name
  assert summary["params"] == want["params"]
  sites = [site["site"] for site in summary["c"]]
  assert sites == [site["site"] for site in want["c"]]
  for ours, theirs in zip(summary["c"], want["c"], strict=True):
    assert ours["c"][2] == pytest.approx(theirs["c"], rel=1e-5)
  for ours, theirs in zip(
    runs.records(workdir), runs.records(alone), strict=True
  ):
    assert (ours["step"], ours["kind"]) == (theirs["step"], theirs["kind"])
    assert ours.keys() == theirs.keys()
    if "loss" in theirs:
      assert ours["loss"][2] == pytest.approx(theirs["loss"], rel=1e-5)
      assert len(set(ours["loss"])) == 3


def test_one_seed_is_opened_by_its_value(root, capsys):
  """So every command works on any of them."""
  workdir = several(root)
  model = api.load(workdir, seed=7)
  alone = api.load(runs.finished(root, "alone", seeds=SEEDS[2:]), seed=7)
  assert model.meta["seed"] == 7 and "diverged" not in model.meta
  assert model.meta.keys() == alone.meta.keys()
  np.testing.assert_allclose(
    api.apply(model, tiny.tokens()), api.apply(alone, tiny.tokens()), 0, 1e-5
  )
  folded = api.load(workdir / "folded" / "seed_7")
  np.testing.assert_allclose(
    api.apply(model, tiny.tokens()), api.apply(folded, tiny.tokens()), 0, 1e-5
  )

  def run(*arguments):
    capsys.readouterr()
    cli.main([*map(str, arguments), "--json"])
    return json.loads(capsys.readouterr().out)

  losses = json.loads((workdir / "summary.json").read_text())["valid_loss"]
  found = run("eval", workdir)
  assert found["seed"] == list(SEEDS)
  assert found["results"][0]["loss"] == pytest.approx(losses, rel=1e-6)
  one = run("eval", workdir, "--seed", 7)["results"][0]
  assert one["loss"] == pytest.approx(losses[2], rel=1e-6)
  assert run("info", workdir, "--seed", 0)["step"] == runs.STEPS
  text = run("generate", workdir, "--model-seed", 0, "--max-new", 3)
  assert len(text["tokens"]) <= 3


def test_fold_takes_one_seed_or_all(root, tmp_path, capsys):
  workdir, out = several(root), tmp_path / "out"
  for arguments in (["--seed", "7"], []):
    cli.main(["fold", str(workdir), "--out", str(out), *arguments])
    names = sorted(path.name for path in out.iterdir())
    want = SEEDS if not arguments else (7,)
    assert names == sorted(f"seed_{seed}" for seed in want)
  ours, want = (
    runs.state(folder / "seed_3")[1] for folder in (out, workdir / "folded")
  )
  for name, array in ours.items():
    assert array.tobytes() == want[name].tobytes(), name


def test_a_run_of_several_seeds_is_no_start_and_its_folder_no_model(root):
  """One line each that says what to do."""
  with pytest.raises(UserError, match="holds 3 seeds; start from a run of one"):
    saved.read_config(runs.fields(**runs.started(several(root))))
  with pytest.raises(UserError, match="one folded model for each seed; give "):
    saved.load(several(root) / "folded")


@pytest.mark.parametrize(
  "name, seed, message",
  [
    ("several", None, "holds the seeds 3, 0, 7; name one with --seed"),
    ("several", 1, "seed=1 is not in .*several; use one of 3, 0, 7"),
    ("tapered", 1, "seed=1: .*tapered holds seed 0 alone; leave it out"),
  ],
)
def test_a_seed_that_is_not_there_is_one_line(root, name, seed, message):
  workdir = several(root) if name == "several" else runs.tapered(root)
  with pytest.raises(UserError, match=message):
    saved.load(workdir, seed=seed)


def poison(monkeypatch, places):
  """The first weights of these seeds are infinite."""
  start = state.start

  def poisoned(*args):
    states = start(*args)
    embed = states.params["embed"]
    for i in places:
      embed["embedding"] = embed["embedding"].at[i, :, 0].set(jnp.inf)
    return states

  monkeypatch.setattr(loop.state_lib, "start", poisoned)


def test_a_run_goes_on_without_a_seed_that_diverged(
  root, tmp_path, monkeypatch, capsys
):
  """It is marked in every file and cannot be opened; the others are whole."""
  poison(monkeypatch, [0])
  summary = runs.train(tmp_path, "run", seeds=SEEDS)
  err = capsys.readouterr().err
  assert err.count("seed 3: ") == 1 and "nan" not in err
  assert "at step 1 is not finite; this seed is frozen there" in err
  want = json.loads((several(root) / "summary.json").read_text())
  assert summary["diverged"] == [1, None, None]
  assert summary["valid_loss"] == [None, *want["valid_loss"][1:]]
  for record in runs.records(tmp_path / "run"):
    for name, value in record.items():
      if name not in ("step", "kind", "nonfinite") and value is not None:
        assert value[0] is None and None not in value[1:], name
  ended = runs.state(tmp_path / "run" / "checkpoints")[1]
  assert ended["diverged"].tolist() == [1, 0, 0]
  assert np.all(np.isfinite(ended["taper/c"]))  # not calibrated from nothing
  with pytest.raises(UserError, match="seed=3 in .* diverged at step 1; use"):
    saved.load(tmp_path / "run", seed=3)
  cli.main(["eval", str(tmp_path / "run"), "--json"])
  found = json.loads(capsys.readouterr().out)
  assert found["results"][0]["loss"][0] is None
  folders = sorted(p.name for p in (tmp_path / "run" / "folded").iterdir())
  assert folders == ["seed_0", "seed_7"]


def test_a_run_stops_when_every_seed_has_diverged(tmp_path, monkeypatch):
  """The last record says where, for a report."""
  poison(monkeypatch, range(3))
  with pytest.raises(UserError, match="of the last seed at step 1 is not fin"):
    runs.train(tmp_path, "run", seeds=SEEDS)
  last = runs.records(tmp_path / "run")[-1]
  assert (last["kind"], last["diverged"]) == ("nonfinite", [1, 1, 1])


def test_a_run_with_an_ended_seed_resumes_bit_for_bit(tmp_path, monkeypatch):
  """Which seed ended, and where, comes back from the checkpoint."""
  poison(monkeypatch, [1])
  runs.train(tmp_path, "whole", seeds=SEEDS)
  assert runs.train(tmp_path, "cut", runs.START + 1, seeds=SEEDS) is None
  summary = runs.train(tmp_path, "cut", seeds=SEEDS)
  assert summary["diverged"] == [None, 1, None]
  records = [runs.records(tmp_path / name) for name in ("whole", "cut")]
  assert records[0] == records[1]


def test_an_evaluation_that_is_not_finite_ends_its_seed(
  tmp_path, monkeypatch, capsys
):
  """As a loss does; its state stays as it was behind that step."""
  evaluate = loop.Run._evaluate_seed

  def broken(self, one, seed):
    values, now = evaluate(self, one, seed)
    if seed == 0 and int(one.step) == 5:
      values["valid_loss"] = float("nan")
    return values, now

  monkeypatch.setattr(loop.Run, "_evaluate_seed", broken)
  summary = runs.train(tmp_path, "run", seeds=SEEDS)
  assert "seed 0: valid_loss at step 5 is not finite" in capsys.readouterr().err
  assert summary["diverged"] == [None, 5, None]
  ended = runs.state(tmp_path / "run" / "checkpoints", 5)[1]
  assert ended["diverged"].tolist() == [0, 5, 0]
