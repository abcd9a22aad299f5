"""The order in which the modules may be read, and what an import costs."""

import ast
import pathlib
import subprocess
import sys
import time

import pytest

import taperjax

ROOT = pathlib.Path(taperjax.__file__).parent
# A module imports from the rows above it, never from its own or from below.
# The gate stands above the leaves: a config holds its steps (`TaperSteps`) and
# a norm builds the branch of its phase. A package is one module here.
ROWS = [
  {"errors", "gate", "drawing", "shapes", "hlo"},
  {"config", "norms", "metrics"},
  {"sharding"},
  {
    "losses", "calibration", "attention", "optimizer", "data", "summary",
    "evaluation", "lora", "fakeln", "int8",
  },
  {"model", "workdir"},
  {"packing"},
  {"state", "folding", "decode", "ranges", "anchor"},
  {"step", "checkpoint", "tails"},
  {"saved", "probing", "planning"},
  {"interop", "report"},
  {"loop", "api", "bench"},
  {"reproduce"},
  {"cli"},
]


def module_of(path):
  return path.relative_to(ROOT).with_suffix("").parts[0]


def imported(path):
  """Names of our modules that a file imports, inside functions as well."""
  for node in ast.walk(ast.parse(path.read_text())):
    if isinstance(node, ast.Import):
      names = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom) and node.module:
      assert node.level == 0, f"{path}: imports are absolute"
      names = [f"{node.module}.{alias.name}" for alias in node.names]
    else:
      continue
    for name in names:
      if name.startswith("taperjax."):
        yield name.split(".")[1]


FILES = sorted(
  path for path in ROOT.rglob("*.py") if path != ROOT / "__init__.py"
)


def row_of(name):
  rows = [i for i, row in enumerate(ROWS) if name in row]
  assert len(rows) == 1, f"give taperjax.{name} its row in {__file__}"
  return rows[0]


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_a_module_imports_only_from_the_rows_above(path):
  """So the code can be read from the top, and nothing goes in circles."""
  here = module_of(path)
  for name in imported(path):
    if name != here:
      message = f"taperjax.{here} imports taperjax.{name}"
      assert row_of(name) < row_of(here), message


def test_the_walk_over_the_imports_sees_them():
  """An empty walk would hold any order."""
  seen = {(module_of(path), name) for path in FILES for name in imported(path)}
  assert {
    ("config", "gate"), ("model", "norms"), ("state", "calibration"),
    ("step", "state"), ("data", "errors"),
  } <= seen
  assert row_of("model") < row_of("step")


def test_importing_the_package_is_quick_and_loads_nothing_heavy():
  """The command line answers `--help` and mistakes at once.

  The bound of 3 seconds is generous: the import takes a hundredth of it.
  """
  code = (
    "import sys, taperjax\n"
    "heavy = 'jax flax optax numpy orbax tensorflow torch tensorflow_datasets'"
    "\nprint(*[m for m in heavy.split() if m in sys.modules])"
  )
  start = time.monotonic()
  out = subprocess.run(
    [sys.executable, "-W", "error", "-c", code],
    capture_output=True, text=True, check=True,
  )
  assert time.monotonic() - start < 3
  assert out.stdout.split() == []


def test_no_module_of_the_core_imports_tensorflow_or_torch():
  """Neither is needed, and each takes seconds and gigabytes."""
  code = (
    "import sys\n"
    "from taperjax import attention, calibration, config, gate, losses\n"
    "from taperjax import model, norms, optimizer, state, step\n"
    "import configs.tinystories\n"
    "print(*{'tensorflow', 'torch', 'tensorflow_datasets', 'orbax'}"
    " & set(sys.modules))"
  )
  out = subprocess.run(
    [sys.executable, "-c", code],
    capture_output=True, text=True, check=True, cwd=ROOT.parent,
  )
  assert out.stdout.split() == []
