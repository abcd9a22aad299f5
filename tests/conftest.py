"""Shared set-up: strict jax, the real test data, and the command line."""

import json
import os
import pathlib
import signal

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import pytest

from taperjax import cli

jax.config.update("jax_numpy_rank_promotion", "raise")


@pytest.fixture(scope="session")
def test_data() -> pathlib.Path:
  """Folder with real text and weights; unset means skip, missing is a fault."""
  folder = os.environ.get("TAPERJAX_TEST_DATA")
  if not folder:
    pytest.skip("TAPERJAX_TEST_DATA is unset: no real text or weights here")
  path = pathlib.Path(folder)
  if not path.is_dir():
    pytest.fail(f"TAPERJAX_TEST_DATA={folder} is set, but no such folder")
  return path


@pytest.fixture
def ctrl_c():
  """Ctrl-C as in a terminal; a shell starts background jobs without it."""
  before = signal.signal(signal.SIGINT, signal.default_int_handler)
  yield
  signal.signal(signal.SIGINT, before)


@pytest.fixture
def run(capsys):
  """run(argument, ...) -> standard output; with --json the object in it."""

  def call(*arguments):
    arguments = list(map(str, arguments))
    capsys.readouterr()
    cli.main(arguments)
    out = capsys.readouterr().out
    if "--json" not in arguments:
      return out
    [line] = out.splitlines()  # exactly one object, and nothing else
    return json.loads(line)

  return call


@pytest.fixture
def fails(capsys):
  """fails(argument, ...) -> the one line of a command that exits with 2."""

  def call(*arguments):
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
      cli.main(list(map(str, arguments)))
    out, err = capsys.readouterr()
    assert stop.value.code == 2
    assert out == ""
    *before, line = err.splitlines()
    assert before == []
    return line

  return call
