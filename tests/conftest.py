"""Shared set-up: strict jax, warnings as errors, and the real test data."""

import os
import pathlib

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import pytest

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
