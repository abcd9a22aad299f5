"""The same commands in two processes give the same bits, on the CPU.

As a program it is one of the two:

    python -m tests.determinism_test ROOT
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import pathlib
import subprocess
import sys

import pytest

from taperjax import cli
from tests import runs


@pytest.fixture(scope="module")
def two(tmp_path_factory) -> list[pathlib.Path]:
  """Folders of two processes; nothing is shared, compiled programs neither.

  The order of sets and the addresses of objects differ between them.
  """
  roots = [tmp_path_factory.mktemp(f"process{i}") for i in range(2)]
  for i, root in enumerate(roots):
    done = subprocess.run(
      [sys.executable, "-m", "tests.determinism_test", str(root)],
      cwd=runs.REPOSITORY,
      capture_output=True,
      text=True,
      timeout=runs.LIMIT,
      env={**runs.environment(), "PYTHONHASHSEED": str(i)},
    )
    assert done.returncode == 0, done.stderr
  return roots


def test_training_twice_gives_the_same_bits(two):
  """Checkpoints, metrics and summary, all but times."""
  runs.assert_same_run(*(root / "run" for root in two))


def test_folding_twice_gives_the_same_bits(two):
  (step, arrays, _), (other, want, _) = (
    runs.state(root / "folded") for root in two
  )
  assert step == other == runs.STEPS and arrays.keys() == want.keys()
  assert len(arrays) > 10
  for name, array in arrays.items():
    assert array.tobytes() == want[name].tobytes(), name
  first, second = ((root / "folded" / "fold.json").read_text() for root in two)
  assert first == second


def test_generating_twice_gives_the_same_text(two):
  """Sampled, of the model and of the folded one; another seed is another."""
  texts = [json.loads((root / "texts.json").read_text()) for root in two]
  assert texts[0] == texts[1]
  assert len({tuple(row["tokens"]) for row in texts[0]}) > 1


def main(root: pathlib.Path) -> None:
  runs.train(root, "run")
  cli.main(["fold", str(root / "run"), "--out", str(root / "folded")])
  texts = []
  for folder in ("run", "folded"):
    for seed in ("3", "4"):
      with contextlib.redirect_stdout(io.StringIO()) as out:
        cli.main([
          "generate", str(root / folder), "--prompt", "Once",
          "--temperature", "1", "--max-new", "12", "--seed", seed, "--json",
        ])
      found = json.loads(out.getvalue())
      texts.append({name: found[name] for name in ("text", "tokens")})
  (root / "texts.json").write_text(json.dumps(texts))


if __name__ == "__main__":
  os.environ.setdefault("JAX_PLATFORMS", "cpu")
  main(pathlib.Path(sys.argv[1]))
