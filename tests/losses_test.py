"""Cross-entropy against log_softmax, and the scale loss against its formula."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from taperjax import losses, norms
from tests import cross_entropy, tiny

T, D, V = 21, tiny.D, tiny.V


def draw(dtype=jnp.float32):
  """Input of the head, head, bias, targets and weights with zeros among."""
  rng = np.random.default_rng(0)
  h = jnp.asarray(rng.normal(0, 1, (T, D)), dtype)
  kernel = jnp.asarray(rng.normal(0, 1, (D, V)), dtype)
  bias = jnp.asarray(rng.normal(0, 1, V), jnp.float32)
  target = jnp.asarray(rng.integers(0, V, T), jnp.int32)
  weight = jnp.asarray(rng.integers(0, 3, T) / 2, jnp.float32)
  assert np.sum(np.asarray(weight) == 0) > 2
  return h, kernel, bias, target, weight


# 5 and 20 do not divide 21, 7 does, 64 is more than there is.
@pytest.mark.parametrize(
  "chunk, with_bias", [(5, True), (7, False), (20, False), (64, True)]
)
def test_cross_entropy_and_its_gradients_are_those_of_log_softmax(
  chunk, with_bias
):
  """The hand-written gradient is the one thing autodiff does not check.

  Float32 sums over at most 31 terms in another order: 1e-6 of the values.
  """
  h, kernel, bias, target, weight = draw()
  bias = bias if with_bias else None

  def ours(h, kernel, bias):
    nll, norm = losses.token_cross_entropy(
      h, kernel, bias, target, weight, chunk
    )
    return 3.0 * nll, (nll, norm)  # a cotangent of 1 would hide its loss

  def theirs(h, kernel, bias):
    nll, norm = cross_entropy.whole(h, kernel, bias, target, weight)
    return 3.0 * nll, (nll, norm)

  which = (0, 1, 2) if with_bias else (0, 1)
  grad = lambda f: jax.jit(jax.grad(f, which, has_aux=True))
  got, got_sums = grad(ours)(h, kernel, bias)
  want, want_sums = grad(theirs)(h, kernel, bias)
  np.testing.assert_allclose(got_sums, want_sums, rtol=1e-6)
  # Without differentiation another piece of code runs.
  _, sums = jax.jit(ours)(h, kernel, bias)
  np.testing.assert_allclose(sums, want_sums, rtol=1e-6)
  assert len(got) == len(which)
  for g, w in zip(got, want, strict=True):
    assert g.dtype == w.dtype and g.shape == w.shape
    np.testing.assert_allclose(g, w, rtol=1e-5, atol=3e-6)


def test_huge_logits_do_not_overflow():
  """Logit norms grow to 1e5 without an anchor (Fig. 3 of the paper)."""
  h, kernel, bias, target, weight = draw()
  h = h * 1e4

  def loss(h):
    return losses.token_cross_entropy(h, kernel, bias, target, weight)[0]

  value, grad = jax.value_and_grad(loss)(h)
  expected, _ = cross_entropy.whole(h, kernel, bias, target, weight)
  np.testing.assert_allclose(value, expected, rtol=1e-6)
  assert np.all(np.isfinite(grad))


def test_tokens_of_weight_zero_change_nothing():
  """Padding must not reach the loss or any gradient."""
  h, kernel, bias, target, weight = draw()
  off = np.asarray(weight) == 0

  @jax.jit
  def loss(h, kernel, target):
    return losses.token_cross_entropy(h, kernel, bias, target, weight, 5)[0]

  other_h = jnp.where(off[:, None], 7.0, h)
  other_target = jnp.where(off, 3, target)
  np.testing.assert_array_equal(
    loss(h, kernel, target), loss(other_h, kernel, other_target)
  )
  grad = jax.jit(jax.grad(loss, (0, 1)))
  dh, dkernel = grad(h, kernel, target)
  _, other_dkernel = grad(other_h, kernel, other_target)
  np.testing.assert_array_equal(dkernel, other_dkernel)
  assert np.all(np.asarray(dh)[off] == 0)
  assert np.all(np.any(np.asarray(dh)[~off] != 0, axis=-1))


def test_bfloat16_inputs_keep_a_float32_loss():
  """Logits, softmax and sums in float32: the same as the widened inputs.

  The gradient alone is rounded to bfloat16 (2^-8), with one rounding inside.
  """
  h, kernel, bias, target, weight = draw(jnp.bfloat16)
  nll, norm = losses.token_cross_entropy(h, kernel, bias, target, weight, 5)
  assert nll.dtype == norm.dtype == jnp.float32
  expected = cross_entropy.whole(
    h.astype(jnp.float32), kernel.astype(jnp.float32), bias, target, weight
  )
  np.testing.assert_allclose((nll, norm), expected, rtol=1e-6)

  def ours(h, kernel):
    return losses.token_cross_entropy(h, kernel, bias, target, weight, 5)[0]

  def theirs(h, kernel):
    return cross_entropy.whole(h, kernel, bias, target, weight)[0]

  got = jax.jit(jax.grad(ours, (0, 1)))(h, kernel)
  want = jax.jit(jax.grad(theirs, (0, 1)))(
    h.astype(jnp.float32), kernel.astype(jnp.float32)
  )
  for g, w in zip(got, want, strict=True):
    assert g.dtype == jnp.bfloat16
    np.testing.assert_allclose(
      g.astype(jnp.float32), w, rtol=2**-7, atol=2**-7 * float(abs(w).max())
    )


def test_logit_norm_is_a_measurement_without_gradient():
  """It is logged; it must not pull on anything."""
  h, kernel, bias, target, weight = draw()

  def norm(h, kernel):
    return losses.token_cross_entropy(h, kernel, bias, target, weight)[1]

  for grad in jax.grad(norm, (0, 1))(h, kernel):
    assert not np.any(grad)


def test_the_logits_of_all_tokens_never_exist_at_once():
  """At 10,000 pieces and 8,192 tokens they would be 330 MB, and as much back.

  No array in the differentiated program holds T x V numbers.
  """
  h, kernel, bias, target, weight = draw()

  def loss(h, kernel):
    return losses.token_cross_entropy(h, kernel, bias, target, weight, 7)[0]

  jaxpr = jax.make_jaxpr(jax.grad(loss, (0, 1)))(h, kernel)
  sizes = []

  def walk(jaxpr):
    for eqn in jaxpr.eqns:
      sizes.extend(var.aval.size for var in eqn.outvars)
      for sub in jax.tree.leaves(
        list(eqn.params.values()), is_leaf=lambda x: hasattr(x, "eqns")
      ):
        if hasattr(sub, "eqns"):
          walk(getattr(sub, "jaxpr", sub))

  walk(jaxpr.jaxpr)
  assert max(sizes) == D * V > 7 * V  # the gradient of the head itself
  assert D * V < T * V


MASK = jnp.asarray([[1, 1, 0], [1, 0, 0]], jnp.float32)


def test_scale_loss_is_the_masked_sum_of_squared_distances():
  """Eq. 5 without lambda; the padded scales are far off and do not count."""
  scale = jnp.asarray([[1.0, 2.5, 90.0], [4.0, -7.0, 1e6]])
  got = losses.scale_loss(scale, jnp.float32(2.0), MASK)
  assert got == 1.0 + 0.25 + 4.0


@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_gradient_of_the_scale_loss_is_proposition_4_3(kind):
  """2 (s - s_tgt) / (D s) h, with h centred for the layer norm (A.4).

  The sign is what anchors: a scale above the target shrinks. Padded tokens get
  exactly no gradient. Ten float32 operations: 1e-5.
  """
  rng = np.random.default_rng(0)
  h = rng.normal(0.2, 1, (2, 3, D)) * np.array([0.5, 2.0])[:, None, None]
  measure = norms.rms_scale if kind == "rms" else norms.layer_scale
  target = 1.1

  def loss(h):
    scale = measure(h, 1e-5)[..., 0]
    return losses.scale_loss(scale, jnp.float32(target), MASK)

  got = np.asarray(jax.grad(loss)(jnp.asarray(h, jnp.float32)))
  x = h - h.mean(-1, keepdims=True) if kind == "layer" else h
  s = np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5)
  on = np.asarray(MASK)[..., None]
  np.testing.assert_allclose(
    got, on * 2 * (s - target) / (D * s) * x, rtol=1e-5, atol=1e-7
  )
  assert np.all(got[on[..., 0] == 0] == 0)
  radial = (got * x).sum(-1)[on[..., 0] == 1]
  sign = np.sign(s - target)[..., 0][on[..., 0] == 1]
  assert set(sign) == {-1, 1}
  np.testing.assert_array_equal(np.sign(radial), sign)


def test_the_target_of_the_scale_loss_is_a_constant():
  """A moving target would pin no absolute scale."""
  scale = jnp.asarray([[1.0, 2.5, 90.0], [4.0, -7.0, 1e6]])
  grad = jax.grad(lambda t: losses.scale_loss(scale, t, MASK))(jnp.float32(2))
  assert grad == 0
