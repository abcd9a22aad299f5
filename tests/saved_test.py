"""Models on disk: what a path means, and what is written beside a model."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import shutil

import numpy as np
import pytest

from taperjax import checkpoint, saved
from taperjax.data import tokenizer, windows
from taperjax.errors import UserError
from tests import runs


@pytest.fixture(scope="module")
def tapered(tmp_path_factory):
  return runs.tapered(runs.shared_root(tmp_path_factory))


def test_path_may_be_a_workdir_a_folder_or_a_step(tapered, tmp_path):
  """The folded model is opened in the same way; latest unless told."""
  for path, step, want in (
    (tapered, None, 10),
    (str(tapered), 5, 5),
    (tapered / "checkpoints", None, 10),
    (tapered / "checkpoints" / "5", None, 5),
    (tapered / "checkpoints" / "5", 5, 5),
    (tapered / "folded", None, 10),
    (tapered / "folded" / "10", None, 10),
  ):
    model = saved.load(path, step)
    assert model.step == want, path
    assert isinstance(model.tokenizer, tokenizer.ByteTokenizer), path
    assert model.tapered == ("folded" not in str(path))


def test_relative_paths_find_what_belongs_to_the_model(tapered, monkeypatch):
  """From inside a run: parents of "." are no parents."""
  for folder, path in (
    (tapered, "."),
    (tapered / "checkpoints", "."),
    (tapered / "checkpoints", "5"),
    (tapered.parent, tapered.name),
  ):
    monkeypatch.chdir(folder)
    model = saved.load(path)
    assert model.tokenizer is not None, path
    assert saved.workdir_of(model.folder) == tapered


def test_workdir_may_be_named_by_a_number(tapered, tmp_path):
  """runs/2 is a run beside others, no step of "runs"."""
  shutil.copytree(tapered, tmp_path / "2")
  assert saved.load(tmp_path / "2").step == 10
  (tmp_path / "1").mkdir()
  (tmp_path / "1" / "config.json").write_text("{}")
  with pytest.raises(UserError, match="1 holds no checkpoint; train first"):
    saved.load(tmp_path / "1")


def test_model_knows_whether_it_is_calibrated(tapered):
  """Half of the factors are not enough: g = 0 would drop the others."""
  model = saved.load(tapered)
  assert model.calibrated
  c = np.array(model.c)
  c[2] = 0.0
  assert not model.replace(c=c).calibrated
  plain = model.config.replace(internal_norm="norm", final_norm="norm")
  assert not model.replace(config=plain).calibrated


def test_other_tokenizer_of_the_same_size_is_refused(tapered, tmp_path):
  """The ids fit, and mean other text: the fingerprint tells."""
  workdir = shutil.copytree(tapered, tmp_path / "run")
  tokenizer.ByteTokenizer(b"other").save(workdir / "tokenizer")
  with pytest.raises(UserError, match="is not the one that the model in"):
    saved.load(workdir)


def rewritten(tapered, folder, change):
  """The checkpoints with other arrays and meta, under good sums."""
  step, tree, meta = checkpoint.load_arrays(tapered / "checkpoints", None, ())
  tree = {name: tree[name] for name in ("params", "taper")}
  change(tree, meta)
  with contextlib.closing(checkpoint.Checkpoints(folder)) as found:
    found.save(step, tree, meta)
  return folder


@pytest.mark.parametrize(
  "change, match",
  [
    (lambda t, m: m.pop("model"), "model=None in its meta must be dict; fet"),
    (lambda t, m: m.update(gate="x"), "gate='x' in its meta must be a number"),
    (lambda t, m: m.update(gate=2), "gate=2 must be from 0 to 1; fetch it ag"),
    (lambda t, m: m.update(diverged=[0]), "seed=0 in its meta must be list"),
    (
      lambda t, m: m.update(diverged=[0], seed=[0, 1]),
      r"seed=\[0, 1\] and diverged=\[0\] must be of one length",
    ),
    (lambda t, m: m.pop("valid_tokens"), "valid_tokens=None in its meta must"),
    (lambda t, m: m["data_hashes"].pop("valid"), "data_hashes in its meta mus"),
    (lambda t, m: m["config"].pop("eval"), "eval is missing"),
    (
      lambda t, m: t.update(taper=np.zeros(3, np.float32)),
      "taper must be a tree of arrays, not one; fetch it again",
    ),
    (lambda t, m: m["model"].update(mlp="x"), "model.mlp='x' is not one of"),
    (
      lambda t, m: m["model"].update(num_layers=10**6),
      "arrays for model.num_layers=1000000",
    ),
    (
      lambda t, m: m["model"].update(vocab_size=9),
      r"embed/embedding is float32\[257, 8\], against float32\[9, 8\] by its",
    ),
    (lambda t, m: t["params"].pop("embed"), "embed/embedding is nothing"),
    (
      lambda t, m: t["params"].update(x=np.float32([1])),
      r"array x is float32\[1\], against nothing",
    ),
    (
      lambda t, m: t["taper"].update(c=np.zeros(3, np.float32)),
      r"array c is float32\[3\], against float32\[5\]",
    ),
    (
      lambda t, m: t["params"]["final_norm"]["scale"].fill(np.nan),
      "array final_norm/scale holds numbers that are not finite; take an earl",
    ),
  ],
)
def test_a_checkpoint_that_taperjax_did_not_write_is_told(
  tapered, tmp_path, change, match
):
  """Its sums are right, as anybody can make them."""
  with pytest.raises(UserError, match=match):
    saved.load(rewritten(tapered, tmp_path / "x", change))


def test_checkpoints_without_a_run_have_no_data(tapered, tmp_path):
  """Moved checkpoints still load; the message says what eval needs."""
  folder = shutil.copytree(tapered / "checkpoints", tmp_path / "a" / "b")
  model = saved.load(folder)
  assert model.tokenizer is None
  with pytest.raises(UserError, match="lies in no workdir.*give --data FILE"):
    saved.valid_tokens(model)


def test_changed_validation_text_is_noticed(tapered, tmp_path):
  """A loss on another text must not pass for the run's."""
  workdir = shutil.copytree(tapered, tmp_path / "run")
  model = saved.load(workdir)
  hashes = model.meta["data_hashes"]
  hashes["valid"]["source_sha256"] = "0" * 64
  with pytest.raises(UserError, match="are not those that the run was valid"):
    saved.valid_tokens(model)
  shutil.rmtree(workdir / "data")
  with pytest.raises(UserError, match="cannot be used: .*give --data FILE"):
    saved.valid_tokens(model)


def batches(model):
  tokens = np.arange(60) % 256
  return windows.eval_batches(
    tokens, batch_size=2, context_len=model.config.context_len
  )


def test_failed_fold_leaves_the_old_folder_as_it_was(
  tapered, tmp_path, monkeypatch
):
  """Written whole or not at all, also over an earlier one."""
  model = saved.load(tapered)
  out = tmp_path / "folded"
  saved.write_folded(out, model, lambda: batches(model))
  before = runs.state(out)[1]
  report = (out / "fold.json").read_text()

  def full_disk(*_):
    raise OSError(28, "disk full")

  with monkeypatch.context() as patch:
    patch.setattr(saved, "write_json", full_disk)
    with pytest.raises(UserError, match="cannot be written .*disk full"):
      saved.write_folded(out, model, lambda: batches(model))
  assert os.listdir(tmp_path) == ["folded"]
  rename = pathlib.Path.rename

  def interrupt(path, target):
    """Ctrl-C between the two renames."""
    if target == out and ".part-old-" not in path.name:
      raise KeyboardInterrupt
    return rename(path, target)

  with monkeypatch.context() as patch:
    patch.setattr(pathlib.Path, "rename", interrupt)
    with pytest.raises(KeyboardInterrupt):
      saved.write_folded(out, model, lambda: batches(model))
  assert os.listdir(tmp_path) == ["folded"]
  assert (out / "fold.json").read_text() == report
  for name, array in runs.state(out)[1].items():
    np.testing.assert_array_equal(array, before[name])


def test_fold_into_a_place_that_cannot_be_made_is_told(tapered, tmp_path):
  """A parent that is a file, and not a folder, is a mistake of the user."""
  (tmp_path / "file").write_text("")
  model = saved.load(tapered)
  with pytest.raises(UserError, match="choose a"):
    saved.write_folded(
      tmp_path / "file" / "a" / "b", model, lambda: batches(model)
    )
  with pytest.raises(UserError, match="cannot be written to .*choose a"):
    saved.write_folded(
      pathlib.Path("/proc/none/folded"), model, lambda: batches(model)
    )


def test_refused_fold_reads_no_data(tapered, tmp_path):
  """Batches may cost a tokenization; checks come first."""
  model = saved.load(tapered, 5)
  with pytest.raises(UserError, match="folding needs gate 0"):
    saved.write_folded(
      tmp_path / "out", model, lambda: pytest.fail("data were read")
    )
  assert os.listdir(tmp_path) == []


def test_diverged_fold_report_is_still_json(tapered, tmp_path, monkeypatch):
  """KL of models far apart leaves float32; the folder must come out anyway."""
  model = saved.load(tapered)
  compare = saved.folding.compare
  monkeypatch.setattr(
    saved.folding,
    "compare",
    lambda *args: {**compare(*args), "kl_bf16": float("nan")},
  )
  out = tmp_path / "folded"
  report, folded = saved.write_folded(out, model, lambda: batches(model))
  assert report["errors"]["kl_bf16"] is None
  assert json.loads((out / "fold.json").read_text()) == report
  assert saved.load(out).config == folded.config
