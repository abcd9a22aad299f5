"""The optimizer chain: order, decay by name, schedule, and add_scale_loss."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from taperjax import optimizer
from tests import tiny

CONFIG = tiny.config().optimizer


def make(schedule=lambda k: 0.01, **changes):
  config = dataclasses.replace(CONFIG, **changes)
  return optimizer.make_optimizer(config, schedule)


def toy():
  return {
    "attn": {"kernel": jnp.ones((2, 3)), "bias": jnp.full(3, 2.0)},
    "norm": {"scale": jnp.full(3, 3.0)},
  }


@pytest.mark.parametrize("scan", [False, True])
@pytest.mark.parametrize("family", [tiny.model_config, tiny.gpt2_config])
def test_only_matrices_and_embeddings_decay(family, scan):
  """By name: a mask by rank hits stacked gains, one by "norm" misses others.

  Head and biases are included by an untied model.
  """
  config = family(tied=False, biases=("q", "down", "head"), scan_layers=scan)
  mask = optimizer.decay_mask(tiny.params(config))
  seen = {}
  for path, decays in jax.tree_util.tree_leaves_with_path(mask):
    seen.setdefault(path[-1].key, set()).add(decays)
  expected = {
    "kernel": {True},
    "embedding": {True},
    "scale": {False},
    "taper_scale": {False},
    "bias": {False},
  }
  assert seen == expected
  assert len(jax.tree.leaves(mask)) > 12


def test_decay_is_decoupled_from_adam():
  """Without a gradient p <- p (1 - lr wd), exactly; not so gains and biases.

  Decay added before Adam would move everything by lr instead.
  """
  params = toy()
  tx = make(lambda k: 0.25, weight_decay=0.5)
  updates, _ = tx.update(jax.tree.map(jnp.zeros_like, params), tx.init(params),
                         params)
  new = optax.apply_updates(params, updates)
  np.testing.assert_array_equal(new["attn"]["kernel"], 1 - 0.25 * 0.5)
  np.testing.assert_array_equal(new["attn"]["bias"], 2.0)
  np.testing.assert_array_equal(new["norm"]["scale"], 3.0)


def test_no_decay_is_no_decay():
  """optax's own adamw decays by 1e-4 unless told; the paper has none."""
  params = toy()
  tx = make()
  zero = jax.tree.map(jnp.zeros_like, params)
  updates, _ = tx.update(zero, tx.init(params), params)
  assert not any(np.any(x) for x in jax.tree.leaves(updates))


def test_three_steps_are_clipped_adamw_in_numpy():
  """Clip by the global norm, Adam with bias correction, decay, rate of k.

  The gradients are above and below the clip; the schedule sees k = 1, 2, 3.
  """
  params = toy()
  rates = {1: 0.1, 2: 0.03, 3: 0.2}
  tx = make(
    lambda k: jnp.asarray([9.0, *rates.values()])[k],
    weight_decay=0.2, clip_norm=1.5, eps=1e-3,
  )
  state = tx.init(params)
  rng = np.random.default_rng(0)
  want = jax.tree.map(lambda p: np.asarray(p, np.float64), params)
  m = v = jax.tree.map(np.zeros_like, want)
  for k, rate in rates.items():
    size = {1: 3.0, 2: 0.1, 3: 1.0}[k]
    grads = jax.tree.map(lambda p, s=size: rng.normal(0, s, p.shape), want)
    norm = np.sqrt(sum((g**2).sum() for g in jax.tree.leaves(grads)))
    assert (norm > 1.5) == (k != 2)
    updates, state = tx.update(jax.tree.map(jnp.float32, grads), state, params)
    params = optax.apply_updates(params, updates)
    g = jax.tree.map(lambda g, n=norm: g * min(1, 1.5 / n), grads)
    m = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, m, g)
    v = jax.tree.map(lambda v, g: 0.95 * v + 0.05 * g**2, v, g)
    step = jax.tree.map(
      lambda m, v, k=k: (m / (1 - 0.9**k))
      / (np.sqrt(v / (1 - 0.95**k)) + 1e-3), m, v
    )
    step["attn"]["kernel"] += 0.2 * want["attn"]["kernel"]
    want = jax.tree.map(lambda p, s, r=rate: p - r * s, want, step)
  for got, expected in zip(
    jax.tree.leaves(params), jax.tree.leaves(want), strict=True
  ):
    np.testing.assert_allclose(got, expected, rtol=2e-6, atol=2e-7)


def test_add_scale_loss_adds_lambda_times_the_gradient():
  """First in the chain: what is clipped is the sum of both gradients."""
  params = toy()
  rng = np.random.default_rng(0)
  draw = lambda: jax.tree.map(
    lambda p: jnp.asarray(rng.normal(0, 3, p.shape), jnp.float32), params
  )
  grads, scale_grads = draw(), draw()
  clip = optax.clip_by_global_norm(1.0)
  tx = optax.chain(optimizer.add_scale_loss(0.1), clip)
  got, _ = tx.update(
    grads, tx.init(params), params, scale_grads=scale_grads
  )
  total = jax.tree.map(lambda g, s: g + 0.1 * s, grads, scale_grads)
  want, _ = clip.update(total, clip.init(params))
  jax.tree.map(np.testing.assert_array_equal, got, want)
  np.testing.assert_allclose(optax.tree.norm(got), 1.0, rtol=1e-6)


def test_add_scale_loss_takes_a_schedule_of_the_step_from_one():
  """0 up to taper start k_s = 2, then lambda: the target exists from there."""
  params = {"kernel": jnp.zeros(3)}
  zero, one = params, {"kernel": jnp.ones(3)}
  tx = optimizer.add_scale_loss(lambda k: jnp.where(k > 2, 0.1, 0.0))
  state, values = tx.init(params), []
  update = jax.jit(tx.update)
  for _ in range(4):
    updates, state = update(zero, state, params, scale_grads=one)
    values.append(round(float(updates["kernel"][0]), 6))
  assert values == [0.0, 0.0, 0.1, 0.1]
  assert state.count == 4


def test_add_scale_loss_insists_on_its_gradient():
  """Leaving scale_grads out must not silently train without the loss."""
  params = toy()
  tx = optax.chain(optimizer.add_scale_loss(0.1), optax.sgd(1.0))
  with pytest.raises(TypeError, match="scale_grads"):
    tx.update(params, tx.init(params), params)
