"""summary.json: the contract with scripts; and the table for people."""

from __future__ import annotations

import json

import numpy as np
import pytest

from taperjax import config as config_lib, saved, summary
from taperjax.errors import UserError
from tests import runs

TEXT, NUMBER, WHOLE = str, float, int
FOLD = [
  f"{name}_{suffix}"
  for suffix in ("f32", "bf16")
  for name in (
    "max_abs_delta_logit",
    "mean_abs_delta_logit",
    "kl",
    "top1",
    "loss_delta",
    "logit_scale",
  )
]
# Key: type in a tapered run. A baseline has null where BASELINE_NULL says so.
CONTRACT = {
  "variant": TEXT,
  "norm": TEXT,
  "size": TEXT,
  "seed": WHOLE,
  "steps": WHOLE,
  "tokens": WHOLE,
  "params": WHOLE,
  "params_folded": WHOLE,
  "valid_loss": NUMBER,
  "valid_loss_g0": NUMBER,
  "valid_loss_folded": NUMBER,
  "bits_per_byte": NUMBER,
  "scale_target": NUMBER,
  "mean_scale": NUMBER,
  "logit_norm": NUMBER,
  "c": list,
  "fold": dict,
  "decode": dict,
  "wall_s": NUMBER,
  "versions": dict,
  "sample": TEXT,
}
BASELINE_NULL = {"params_folded", "valid_loss_folded", "scale_target", "fold"}


def strict(path):
  """JSON as other languages read it: no NaN, no Infinity, no key twice."""

  def pairs(items):
    assert len(dict(items)) == len(items)
    return dict(items)

  return json.loads(
    path.read_text(encoding="utf-8"),
    parse_constant=lambda name: pytest.fail(f"{name} is no JSON"),
    object_pairs_hook=pairs,
  )


@pytest.fixture(scope="module")
def root(tmp_path_factory):
  return runs.shared_root(tmp_path_factory)


@pytest.mark.parametrize("kind", ["tapered", "baseline"])
def test_summary_holds_every_key_of_the_contract(root, kind):
  """Scripts of others read these names and types."""
  workdir = getattr(runs, kind)(root)
  found = strict(workdir / "summary.json")
  for name, wanted in CONTRACT.items():
    if kind == "baseline" and name in BASELINE_NULL:
      assert found[name] is None, name
    else:
      assert type(found[name]) is wanted, name
  assert found["commit"] is None or type(found["commit"]) is str
  assert found["variant"] == {"tapered": "all_aux"}.get(kind, kind)
  assert (found["norm"], found["size"], found["seed"]) == ("rms", "tiny", 0)
  assert found["tokens"] == runs.STEPS * 3 * 24
  assert found["gate"] == (0.0 if kind == "tapered" else 1.0)
  assert found["valid_loss_g0"] == found["valid_loss"]
  for name in ("taperjax", "jax", "jaxlib", "flax", "optax", "python"):
    assert found["versions"][name]
  speed = found["decode"]
  assert speed["unfolded_tokens_per_s"] > 0
  if kind == "baseline":
    assert speed["folded_tokens_per_s"] is None
    assert found["c"] == []
    return
  assert speed["folded_tokens_per_s"] > 0
  assert all(type(found["fold"][name]) is float for name in FOLD)
  assert [entry["site"] for entry in found["c"]] == [
    "block_0.attn_norm",
    "block_0.mlp_norm",
    "block_1.attn_norm",
    "block_1.mlp_norm",
    "final_norm",
  ]
  assert all(entry["c"] > 0 for entry in found["c"])


def test_c_names_tapered_sites_only(root):
  """The internal variants have no factor of the final norm."""
  workdir = runs.finished(
    root, "layer", variant="internal", norm="layer", model__num_layers=1
  )
  found = strict(workdir / "summary.json")
  names = [entry["site"] for entry in found["c"]]
  assert names == ["block_0.attn_norm", "block_0.mlp_norm"]
  assert found["norm"] == "layer"


def test_folded_model_is_the_unfolded_one(root):
  """1e-5 of the logit scale in float32, and the same loss."""
  found = strict(runs.tapered(root) / "summary.json")
  fold = found["fold"]
  bound = 1e-5 * max(1.0, fold["logit_scale_f32"])
  assert fold["max_abs_delta_logit_f32"] <= bound
  assert found["valid_loss_folded"] == pytest.approx(
    found["valid_loss"], rel=1e-5
  )
  assert found["params_folded"] > found["params"]  # the head is untied


def test_final_gate_and_every_json_of_a_run_are_exact(root):
  """The last gate is 0.0, not 1e-8; no file of a run holds a NaN."""
  workdir = runs.tapered(root)
  assert runs.state(workdir / "checkpoints")[1]["gate"] == 0.0
  for name in ("summary.json", "config.json", "folded/fold.json"):
    assert strict(workdir / name)
  for line in (workdir / "metrics.jsonl").read_text().splitlines():
    json.loads(line, parse_constant=lambda name: pytest.fail(name))
  config = strict(workdir / "config.json")
  assert config_lib.to_dict(config_lib.config_from_dict(config)) == config


def test_table_shows_the_results_on_standard_output(root, capsys):
  """The last thing that a newcomer sees."""
  for workdir in (runs.tapered(root), runs.baseline(root)):
    found = strict(workdir / "summary.json")
    summary.print_table(found)
    out = capsys.readouterr().out
    assert f"tiny {found['variant']}, norm rms" in out
    assert f"{found['valid_loss']:.4f}" in out
    assert f"{found['bits_per_byte']:.4f}" in out
    if found["fold"]:
      assert "sample of the folded model: Once" in out
    else:
      assert "sample: Once" in out and "folded" not in out


def test_table_shows_a_dash_for_what_left_float32(root, capsys):
  """A diverged run ends with its table too."""
  found = strict(runs.tapered(root) / "summary.json")
  found["fold"] = dict.fromkeys(found["fold"])
  summary.print_table(found)
  assert "largest logit difference" in capsys.readouterr().out


def test_json_is_whole_or_not_there(tmp_path):
  """A killed or failed write leaves the old file."""
  path = tmp_path / "a.json"
  summary.write_json(path, {"a": [1.5, None, "\u00e9"]})
  assert strict(path) == {"a": [1.5, None, "\u00e9"]}
  with pytest.raises(TypeError):
    summary.write_json(path, {"a": object()})
  assert strict(path) == {"a": [1.5, None, "\u00e9"]}
  summary.write_json(path, {"a": [float("nan"), (1, float("inf"))]})
  assert strict(path) == {"a": [None, [1, None]]}
  with pytest.raises(UserError, match="cannot be written .*choose a writable"):
    summary.write_json(tmp_path / "none" / "a.json", {})
  assert [p.name for p in tmp_path.iterdir()] == ["a.json"]


def test_commit_is_told_or_none(monkeypatch):
  """Outside a repository, or without git, a run must not stop."""
  commit = summary.commit.__wrapped__  # past its cache
  assert commit() is None or len(commit()) >= 7
  monkeypatch.setenv("PATH", "")
  assert commit() is None


def test_validation_tokens_are_those_of_the_run(root):
  """eval on a run must score the text that the run was scored on."""
  workdir = runs.tapered(root)
  ids = saved.valid_tokens(saved.load(workdir))
  for model in (saved.load(workdir), saved.load(workdir / "folded")):
    np.testing.assert_array_equal(saved.valid_tokens(model), ids)
  assert model.meta["valid_tokens"].startswith("data/")
