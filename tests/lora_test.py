"""Adapters: what they add, what trains, and what is left after merging."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from taperjax import config as config_lib, gate, lora, state as state_lib, step
from tests import tiny

TARGETS = ("q", "k", "v", "o", "gate", "up", "down")
LORA = config_lib.LoraConfig(2, 6.0, TARGETS)


def adapted(seed=3):
  """A tiny tree with random adapters, b not at its neutral zero."""
  config = tiny.model_config(num_kv_heads=1)
  params = tiny.params(config)
  adapters = lora.init(params, LORA, jax.random.key(seed))
  rng = np.random.default_rng(seed)
  adapters = jax.tree.map(
    lambda x: x + jnp.asarray(rng.normal(0, 0.1, x.shape), jnp.float32),
    adapters,
  )
  return params, {**params, lora.BRANCH: adapters}


def run_config():
  """Ten steps from a checkpoint, as `parse` leaves them."""
  config = tiny.config(model__num_kv_heads=1)
  init = config_lib.InitConfig("unused")
  return config.__class__(**{**vars(config), "init": init, "lora": LORA})


def test_fresh_adapters_change_nothing():
  """So the first step starts from the model itself."""
  config = tiny.model_config()
  params = tiny.params(config)
  adapters = lora.init(params, LORA, jax.random.key(0))
  merged = lora.merge({**params, lora.BRANCH: adapters}, LORA)
  assert jax.tree.structure(merged) == jax.tree.structure(params)
  jax.tree.map(np.testing.assert_array_equal, merged, params)


@pytest.mark.parametrize("name", TARGETS)
def test_merging_adds_alpha_over_rank_times_the_product(name):
  """Written out for each projection with its heads: W + 6 / 2 a b."""
  params, tree = adapted()
  module = "attn" if name in "qkvo" else "mlp"
  merged = lora.merge(tree, LORA)
  for block in ("block_0", "block_1"):
    kernel = np.asarray(params[block][module][name]["kernel"], np.float64)
    pair = tree[lora.BRANCH][block][module][name]
    inputs = pair["a"].shape[0]
    delta = np.zeros((inputs, kernel.size // inputs))
    for r in range(2):
      delta += 3.0 * np.outer(pair["a"][:, r], pair["b"][r])
    got = merged[block][module][name]["kernel"]
    expected = kernel + delta.reshape(kernel.shape)
    np.testing.assert_allclose(got, expected, atol=1e-6)
    assert np.abs(delta).max() > 0.01


def test_split_and_join_are_inverse_and_only_adapters_and_gains_train():
  _, tree = adapted()
  trained, frozen = lora.split(tree)
  names = {
    path[-1].key for path, _ in jax.tree_util.tree_leaves_with_path(trained)
  }
  assert names == {"a", "b", "taper_scale"}
  joined = lora.join(trained, frozen)
  assert jax.tree.structure(joined) == jax.tree.structure(tree)
  assert lora.split(tiny.params(tiny.model_config()))[1] == {}


@pytest.mark.parametrize("phase", [gate.NORM, gate.TAPER, gate.SCALE])
def test_a_step_leaves_every_frozen_parameter_bit_for_bit(phase):
  """And moves adapters in all phases, gamma~ once it is in the graph."""
  config = run_config()
  _, tree = adapted()
  state = tiny.train_state(config)
  tx_params = lora.split(tree)[0]
  state = state.replace(
    step=jnp.int32(5),
    params=tree,
    opt_state=state_lib.make_tx(config).init(tx_params),
    taper=state.taper.replace(c=tiny.c(config.model)),
  )
  before = jax.device_get(tree)
  new, metrics = step.make_train_step(config, phase)(
    state, tiny.tokens(length=tiny.L + 1), tiny.mask()
  )
  assert np.isfinite(metrics["loss"])
  after = jax.device_get(new.params)
  for path, leaf in jax.tree_util.tree_leaves_with_path(after):
    old = before
    for key in path:
      old = old[key.key]
    moved = not np.array_equal(old, leaf)
    name = path[-1].key
    trains = name in ("a", "b") or name == "taper_scale" and phase != gate.NORM
    assert moved == trains, path
