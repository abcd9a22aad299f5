"""The README's own lines: what it shows must run as it stands."""

from __future__ import annotations

import re

import numpy as np
import pytest

import taperjax
from taperjax.model import Transformer
from tests import runs, tiny

README = (runs.REPOSITORY / "README.md").read_text(encoding="utf-8")
EXAMPLES = [
  block
  for block in re.findall(r"```python\n(.*?)```", README, re.DOTALL)
  if "import taperjax" in block
]


def test_the_first_lines_are_the_quickstart_and_the_tests():
  """CI takes these two from the README and runs them as written."""
  shell = re.search(r"```sh\n(.*?)```", README, re.DOTALL)[1].splitlines()
  assert shell == [
    "pip install -e . && python train.py --config configs/quickstart.py",
    "pip install -e '.[test]' && pytest",
  ]


def test_the_python_example_calibrates_and_folds(capsys):
  """A reader copies it first; its largest logit difference is rounding."""
  memory = EXAMPLES[0]
  names = {}
  exec(memory, names)  # our own README
  printed = capsys.readouterr().out
  assert "largest logit difference" in printed
  logits = names["taperjax"].apply(names["model"], names["tokens"])
  bound = 1e-5 * max(1.0, float(abs(logits).max()))
  assert float(abs(np.asarray(names["difference"])).max()) <= bound


def test_the_example_with_a_run_on_disk_generates(
  tmp_path_factory, tmp_path, monkeypatch, capsys
):
  """The paths in the README are those of the training command above it."""
  workdir = runs.tapered(runs.shared_root(tmp_path_factory))
  (tmp_path / "runs").mkdir()
  (tmp_path / "runs" / "a").symlink_to(workdir)
  monkeypatch.chdir(tmp_path)
  disk = EXAMPLES[1]
  context = 24  # of the tiny run; the example is for one of 512
  disk = disk.replace("max_new=50", f"max_new={context - 16}")
  exec(disk, {})
  assert capsys.readouterr().out.strip()


def test_the_example_for_a_tree_of_somebody_else_keeps_every_logit():
  """What it renames and reshapes must be the very same model."""
  names = {}
  exec(EXAMPLES[2], names)
  config = tiny.model_config(final_norm="norm")
  params = tiny.params(config)
  theirs = {"embed": params["embed"], "norm": params["final_norm"]}
  d = config.embed_dim
  for n in range(config.num_layers):
    block = params[f"block_{n}"]
    kernels = {k: block["attn"][k]["kernel"] for k in "qkvo"}
    theirs[f"layer_{n}"] = {
      "norm_1": {"scale": block["attn_norm"]["scale"]},
      "norm_2": {"scale": block["mlp_norm"]["scale"]},
      "o": {"kernel": kernels.pop("o").reshape(-1, d)},
      **{k: {"kernel": x.reshape(d, -1)} for k, x in kernels.items()},
      **block["mlp"],
    }
  model = names["wrap"](theirs, config)
  tokens = tiny.tokens()
  want, _ = Transformer(config).apply({"params": params}, tokens)
  got = taperjax.apply(model, tokens)
  np.testing.assert_allclose(got, want, rtol=0, atol=1e-5)  # jit or not


def test_the_optax_example_adds_nothing_before_taper_start():
  """A constant lambda would pull to a target that does not exist yet."""
  (block,) = re.findall(r"```python\n(import optax.*?)```", README, re.DOTALL)
  names = {}
  exec(block, names)
  params = {"w": np.ones(2, np.float32)}
  optimizer = names["optimizer"]
  state = optimizer.init(params)
  zero, one = ({"w": np.full(2, x, np.float32)} for x in (0.0, 1.0))
  updates, _ = optimizer.update(zero, state, params, scale_grads=one)
  assert not np.any(np.asarray(updates["w"]))


def test_no_figure_of_the_readme_is_still_to_come():
  """A placeholder is a promise to the author, not to the reader."""
  assert not re.findall(r"^[A-Z]+_[A-Z_]+$", README, re.MULTILINE)


@pytest.mark.parametrize("path", re.findall(r"configs/\w+\.py", README))
def test_every_config_that_the_readme_names_is_there(path):
  """A renamed file must not leave the README behind."""
  assert (runs.REPOSITORY / path).is_file()


def test_the_readme_speaks_of_no_machine_of_ours():
  """Its reader has the clone and nothing else."""
  for word in ("/work", "../shared", "/root"):
    assert word not in README
