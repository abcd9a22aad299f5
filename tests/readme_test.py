"""The README's own lines: what it shows must run as it stands."""

from __future__ import annotations

import re

import numpy as np
import pytest

from tests import runs

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
  (memory, _) = EXAMPLES
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
  (_, disk) = EXAMPLES
  context = 24  # of the tiny run; the example is for one of 512
  disk = disk.replace("max_new=50", f"max_new={context - 16}")
  exec(disk, {})
  assert capsys.readouterr().out.strip()


@pytest.mark.parametrize("path", re.findall(r"configs/\w+\.py", README))
def test_every_config_that_the_readme_names_is_there(path):
  """A renamed file must not leave the README behind."""
  assert (runs.REPOSITORY / path).is_file()


def test_the_readme_speaks_of_no_machine_of_ours():
  """Its reader has the clone and nothing else."""
  for word in ("/work", "../shared", "/root"):
    assert word not in README
