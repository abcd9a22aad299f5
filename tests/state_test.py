"""The fresh state: what the variants share, and its abstract form."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from taperjax import state
from taperjax.config import VARIANTS
from tests import tiny


@functools.cache
def create(variant, seed=0):
  """Not compiled: single operations are, once for all variants."""
  return state.create(tiny.config(variant=variant), seed)


def without_taper(params):
  if not isinstance(params, dict):
    return params
  return {
    name: without_taper(value)
    for name, value in params.items()
    if name != "taper_scale"
  }


@pytest.mark.parametrize("variant", VARIANTS)
def test_variants_start_from_the_same_parameters_bit_for_bit(variant):
  """Table 1: nothing else differs between models of one size and seed."""
  expected = create("baseline").params
  got = create(variant).params
  jax.tree.map(np.testing.assert_array_equal, without_taper(got), expected)
  tapers = sum(VARIANTS[variant][:2]) > 0
  assert (len(jax.tree.leaves(got)) > len(jax.tree.leaves(expected))) == tapers


def test_another_seed_is_another_model():
  """Six seeds with one set of weights would have no spread."""
  a, b = (create("baseline", seed).params["embed"] for seed in (0, 1))
  assert np.all(np.asarray(a["embedding"]) != np.asarray(b["embedding"]))


def test_a_fresh_state_is_at_step_zero_with_gate_one_and_no_sample():
  """Step 1 is the first; nothing is calibrated."""
  fresh = create("all_aux")
  assert fresh.step == 0 and fresh.step.dtype == jnp.int32
  assert fresh.gate == 1 and fresh.gate.dtype == jnp.float32
  assert not any(np.any(x) for x in jax.tree.leaves(fresh.taper))
  assert fresh.taper.c.shape == fresh.taper.num.shape == (tiny.S,)
  assert fresh.taper.count.dtype == jnp.int32


def test_no_two_leaves_of_a_fresh_state_share_a_buffer():
  """A buffer donated twice is an error, on some devices only."""
  leaves = jax.tree.leaves(create("all_aux").replace(key=()))
  pointers = [x.unsafe_buffer_pointer() for x in leaves]
  assert len(set(pointers)) == len(pointers)


@pytest.mark.parametrize("variant", ["baseline", "all_aux"])
def test_the_abstract_state_is_the_shape_of_the_real_one(variant):
  """Checkpoints are restored into it, without making any array."""
  shapes = jax.eval_shape(lambda: create.__wrapped__(variant))
  abstract = state.abstract(tiny.config(variant=variant))
  assert abstract == shapes
  fresh = create(variant)
  assert jax.tree.structure(abstract) == jax.tree.structure(fresh)
  for a, b in zip(
    jax.tree.leaves(abstract), jax.tree.leaves(fresh), strict=True
  ):
    assert isinstance(a, jax.ShapeDtypeStruct)
    assert (a.shape, a.dtype) == (b.shape, b.dtype)


def test_the_schedule_of_a_run_follows_its_steps():
  """Warm-up is a share of the steps: the peak moves with --config.steps."""
  config = tiny.config(steps=100)
  schedule = state.make_schedule(config)
  peak, final = 1e-2, 1e-3
  np.testing.assert_allclose(schedule(20), peak, rtol=1e-6)
  assert schedule(19) < peak and schedule(21) < peak
  np.testing.assert_allclose(schedule(100), final, rtol=1e-6)
