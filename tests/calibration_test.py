"""The statistics, their averages and c against offline recomputations."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from taperjax import calibration, config as config_lib, model, norms
from tests import tiny

B, L, D, S = tiny.B, tiny.L, tiny.D, tiny.S


def site_of(params, name):
  for part in name.split("/"):
    params = params[part]
  return {key: np.asarray(value, np.float64) for key, value in params.items()}


def activations(config, params, mask):
  """Inputs of every norm by name, in float64, and what the model collected."""
  inputs = {}

  def record(call, args, kwargs, context):
    if isinstance(context.module, norms.Norm):
      name = "/".join(context.module.path)
      inputs[name] = np.asarray(args[0], np.float64)
    return call(*args, **kwargs)

  with nn.intercept_methods(record):
    _, aux = model.Transformer(config).apply(
      {"params": params}, tiny.tokens(), mask_BL=mask
    )
  return inputs, np.asarray(aux["sums_S2"])


@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_c_minimizes_the_gap_between_the_branches_on_real_activations(kind):
  """Eq. 4 and 7 by least squares over the tokens that count, in float64.

  A formula without gamma, with E[1/r], or with padding in it, all miss: the
  tokens' scales differ by a factor of two and more.
  """
  config = tiny.model_config(norm=kind)
  params, mask = tiny.params(config), tiny.mask()
  inputs, sums = activations(config, params, mask)
  assert len(inputs) == S
  on = np.asarray(mask, bool)
  assert 0 < on.sum() < on.size
  tokens = on.sum()
  taper = calibration.update(
    calibration.init(S), sums[:, 0] / tokens, sums[:, 1] / tokens, 1.0, 0.1
  )
  c = np.asarray(calibration.solve(taper, 0.1).c)
  spread = 0
  for got, (name, h) in zip(c, inputs.items(), strict=True):
    x = h - h.mean(-1, keepdims=True) if kind == "layer" else h
    r = np.sqrt((x**2).mean(-1, keepdims=True) + config.norm_eps)
    scale = site_of(params, name)["scale"]
    plain, fixed = (x / r * scale)[on].ravel(), (x * scale)[on].ravel()
    best = np.linalg.lstsq(fixed[:, None], plain, rcond=None)[0][0]
    np.testing.assert_allclose(got, best, rtol=1e-5, err_msg=name)
    assert 1 / r[on].max() < got < 1 / r[on].min()
    spread = max(spread, r[on].max() / r[on].min())
  assert spread > 2


@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_masked_tokens_are_not_in_the_statistics(kind):
  """Nor is their own value: a huge padded token changes no bit."""
  rng = np.random.default_rng(0)
  h = jnp.asarray(rng.normal(0.3, 1, (B, L, D)), jnp.float32)
  gain = jnp.asarray(rng.uniform(0.3, 3, D), jnp.float32)
  mask = tiny.mask()
  other = jnp.where(mask[..., None] == 0, 1e4, h)
  sums = lambda h: norms.calibration_sums(h, gain, mask, kind, 1e-5)
  np.testing.assert_array_equal(sums(h), sums(other))


@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_if_all_tokens_share_their_scale_the_branches_agree(kind):
  """Then c = 1/r, and nothing at all happens at taper start.

  Tokens are permutations of one another, so even the rounding is shared up to
  the order of the sums.
  """
  rng = np.random.default_rng(0)
  h = rng.permuted(
    np.tile(rng.normal(0.3, 2, D).astype(np.float32), (B, L, 1)), axis=-1
  )
  gain, bias = rng.uniform(0.3, 3, (2, D)).astype(np.float32)
  x = h - h.mean(-1, keepdims=True) if kind == "layer" else h
  r = np.sqrt((x.astype(np.float64) ** 2).mean(-1) + 1e-5)[0, 0]
  sums = norms.calibration_sums(h, gain, jnp.ones((B, L)), kind, 1e-5)
  taper = calibration.update(
    calibration.init(1), sums[0][None], sums[1][None], jnp.float32(r), 0.01
  )
  c = calibration.solve(taper, 0.01).c[0]
  np.testing.assert_allclose(c, 1 / r, rtol=5e-7)
  if kind == "rms":
    taper = lambda g: norms.taper_rms(h, gain, gain, c, jnp.float32(g), 1e-5)
  else:
    taper = lambda g: norms.taper_layer(
      h, gain, gain, bias, c, jnp.float32(g), 1e-5
    )
  np.testing.assert_allclose(taper(0.0), taper(1.0), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("rate", [0.01, 0.1, 1.0])
@pytest.mark.parametrize("count", [1, 2, 37])
def test_averages_are_those_of_an_offline_recomputation(rate, count):
  """Appendix A.6: s <- (1 - mu) s + mu x, then / (1 - (1 - mu)^n).

  As explicit weights mu (1 - mu)^(n - k) of the samples k, normalized: the
  newest has the largest weight. Float32 of 1 - 0.99 alone costs 1e-6.
  """
  rng = np.random.default_rng(0)
  num, den = rng.uniform(0.5, 8, (2, count, S))
  scale = rng.uniform(0.5, 8, count)
  update = jax.jit(calibration.update, static_argnums=4)
  taper = calibration.init(S)
  for k in range(count):
    taper = update(
      taper, jnp.float32(num[k]), jnp.float32(den[k]), scale[k], rate
    )
  weight = rate * (1 - rate) ** np.arange(count - 1, -1, -1.0)
  np.testing.assert_allclose(taper.num, weight @ num, rtol=1e-5)
  np.testing.assert_allclose(taper.den, weight @ den, rtol=1e-5)
  np.testing.assert_allclose(taper.scale, weight @ scale, rtol=1e-5)
  assert taper.count == count and taper.count.dtype == jnp.int32
  weight /= weight.sum()
  solved = calibration.solve(taper, rate)
  np.testing.assert_allclose(
    solved.c, (weight @ num) / (weight @ den), rtol=1e-5
  )
  np.testing.assert_allclose(solved.scale_target, weight @ scale, rtol=1e-5)


def test_mu_is_the_weight_of_the_new_sample():
  """The swapped weights follow the first batches; c is then wrong."""
  taper = calibration.init(1)
  one = jnp.ones(1)
  taper = calibration.update(taper, one * 2, one * 4, 10.0, 0.1)
  taper = calibration.update(taper, one * 3, one * 5, 20.0, 0.1)
  np.testing.assert_allclose(taper.num, [0.9 * 0.2 + 0.1 * 3], rtol=1e-6)
  np.testing.assert_allclose(taper.den, [0.9 * 0.4 + 0.1 * 5], rtol=1e-6)
  np.testing.assert_allclose(taper.scale, 0.9 * 1.0 + 0.1 * 20, rtol=1e-6)


def test_delta_is_far_below_any_real_statistic():
  """E|h gamma|^2 is 1e-2 at initialization; c must not feel delta there."""
  num, den = jnp.full((1,), 0.3), jnp.full((1,), 1e-2)
  taper = calibration.update(calibration.init(1), num, den, 1.0, 0.01)
  c = calibration.solve(taper, 0.01).c
  np.testing.assert_allclose(c, [30.0], rtol=3e-7)


def test_sites_without_a_taper_keep_c_zero():
  """Their statistics are not collected, and 0 / delta is 0, never nan."""
  config = tiny.model_config(internal_norm="norm")
  _, sums = activations(config, tiny.params(config), tiny.mask())
  assert np.all(sums[:-1] == 0) and np.all(sums[-1] > 0)
  taper = calibration.update(
    calibration.init(S), sums[:, 0], sums[:, 1], 1.0, 0.1
  )
  c = np.asarray(calibration.solve(taper, 0.1).c)
  assert np.all(c[:-1] == 0) and c[-1] > 0


def test_statistics_have_no_gradient():
  """A statistic that trains would pull on the stream it measures."""
  h, gain = jnp.arange(B * L * D, dtype=float).reshape(B, L, D), jnp.ones(D)

  def total(h, gain):
    sums = norms.calibration_sums(h, gain, jnp.ones((B, L)), "layer", 1e-5)
    return sum(sums)

  for grad in jax.grad(total, (0, 1))(h, gain):
    assert not np.any(grad)


@pytest.mark.parametrize("scan", [False, True])
def test_gains_are_copied_at_tapered_sites_and_nothing_else_changes(scan):
  """gamma~ <- gamma; untapered sites have no gamma~ to fill."""
  config = tiny.model_config(
    norm="layer", final_norm="norm", scan_layers=scan
  )
  params = tiny.params(config)
  copied = calibration.copy_gains(params)
  assert jax.tree.structure(copied) == jax.tree.structure(params)
  count = 0
  for path, leaf in jax.tree_util.tree_leaves_with_path(copied):
    names = [part.key for part in path]
    source = params
    for name in names[:-1]:
      source = source[name]
    if names[-1] == "taper_scale":
      assert not np.array_equal(leaf, source["taper_scale"])
      np.testing.assert_array_equal(leaf, source["scale"])
      count += 1
    else:
      assert leaf is source[names[-1]]
  assert count == (2 if scan else S - 1)


def test_site_names_are_in_the_order_of_c():
  """They label c in the log; the model runs its sites in this order."""
  config = tiny.model_config()
  inputs, _ = activations(config, tiny.params(config), None)
  names = [name.replace("/", ".") for name in inputs]
  assert config_lib.site_names(config.num_layers) == names
