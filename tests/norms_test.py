"""Each norm against its formula in float64, and the promises of the tapers."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from taperjax import model, norms
from tests import tiny

B, L, D = tiny.B, tiny.L, tiny.D
EPS = 1e-5
# Float32 with about ten operations on numbers up to about ten.
CLOSE = {"rtol": 2e-6, "atol": 4e-6}


def draw(size=1.0, seed=0):
  """Stream, gamma, gamma~, beta: the stream has a mean, as real ones do."""
  rng = np.random.default_rng(seed)
  h = (rng.normal(0.3, 1.0, (B, L, D)) * size).astype(np.float32)
  # Tokens of very different scale: one shared scale cannot pass.
  h *= np.exp(rng.uniform(-1, 1, (B, L, 1))).astype(np.float32)
  gain, taper_gain = np.exp(rng.uniform(-1.2, 1.1, (2, D))).astype(np.float32)
  bias = rng.normal(0, 0.5, D).astype(np.float32)
  return h, gain, taper_gain, bias


def unit(h, kind, eps=EPS):
  """(h or h - mean, its scale) in float64: Eq. 1 and 2, eps in the root."""
  h = np.asarray(h, np.float64)
  if kind == "layer":
    h = h - h.mean(-1, keepdims=True)
  return h, np.sqrt((h**2).mean(-1, keepdims=True) + eps)


# At size 3e-3, r^2 is about eps: eps outside the root, or lost, shows.
SIZES = [1.0, 3e-3, 0.0]


@pytest.mark.parametrize("size", SIZES)
def test_rms_norm_is_equation_2(size):
  """h / sqrt(mean h^2 + eps) gamma; a zero token gives zero, not nan."""
  h, gain, _, _ = draw(size)
  x, r = unit(h, "rms")
  got = norms.rms_norm(h, gain, EPS)
  np.testing.assert_allclose(got, x / r * gain, **CLOSE)
  np.testing.assert_allclose(norms.rms_scale(h, EPS), r, rtol=2e-6)


@pytest.mark.parametrize("size", SIZES)
def test_layer_norm_is_equation_1(size):
  """(h - mean) / sqrt(var + eps) gamma + beta, with the biased variance."""
  h, gain, _, bias = draw(size)
  x, r = unit(h, "layer")
  expected = x / r * gain + bias
  got = norms.layer_norm(h, gain, bias, EPS)
  np.testing.assert_allclose(got, expected, **CLOSE)
  np.testing.assert_allclose(norms.layer_scale(h, EPS), r, rtol=2e-6)


@pytest.mark.parametrize("gate", [1.0, 0.75, 0.2, 0.0])
@pytest.mark.parametrize("size", SIZES)
def test_taper_rms_is_equation_3(size, gate):
  """g h / r gamma + (1 - g) c h gamma~."""
  h, gain, taper_gain, _ = draw(size)
  c = np.float32(0.7)
  x, r = unit(h, "rms")
  expected = gate * x / r * gain + (1 - gate) * c * x * taper_gain
  got = norms.taper_rms(h, gain, taper_gain, c, jnp.float32(gate), EPS)
  np.testing.assert_allclose(got, expected, **CLOSE)


@pytest.mark.parametrize("gate", [1.0, 0.75, 0.2, 0.0])
@pytest.mark.parametrize("size", SIZES)
def test_taper_layer_is_equation_6(size, gate):
  """beta stands outside the gate, and the centring in both branches."""
  h, gain, taper_gain, bias = draw(size)
  c = np.float32(0.7)
  x, r = unit(h, "layer")
  expected = bias + gate * x / r * gain + (1 - gate) * c * x * taper_gain
  got = norms.taper_layer(
    h, gain, taper_gain, bias, c, jnp.float32(gate), EPS
  )
  np.testing.assert_allclose(got, expected, **CLOSE)


@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_tapers_at_both_ends_are_the_plain_and_the_fixed_map_bit_for_bit(kind):
  """One arithmetic for taper and plain norm: the phases join seamlessly."""
  h, gain, taper_gain, bias = draw()
  c = jnp.float32(0.7)
  if kind == "rms":
    taper = lambda g: norms.taper_rms(h, gain, taper_gain, c, g, EPS)
    plain = norms.rms_norm(jnp.asarray(h), gain, EPS)
    fixed = norms.fixed_rms(jnp.asarray(h), taper_gain, c)
  else:
    taper = lambda g: norms.taper_layer(h, gain, taper_gain, bias, c, g, EPS)
    plain = norms.layer_norm(jnp.asarray(h), gain, bias, EPS)
    fixed = norms.fixed_layer(jnp.asarray(h), taper_gain, bias, c)
  np.testing.assert_array_equal(taper(jnp.float32(1)), plain)
  np.testing.assert_array_equal(taper(jnp.float32(0)), fixed)


@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_fixed_maps_are_homogeneous(kind):
  """T(a h) = a T(h) at g = 0, for the layer norm beside beta.

  With a = 4 nothing rounds: the equality is exact for RMS.
  """
  h, _, taper_gain, bias = draw()
  c = jnp.float32(0.7)
  if kind == "rms":
    fixed = lambda h: np.asarray(norms.fixed_rms(h, taper_gain, c))
    np.testing.assert_array_equal(fixed(4 * jnp.asarray(h)), 4 * fixed(h))
    return
  zero = np.zeros_like(bias)
  linear = lambda h: np.asarray(norms.fixed_layer(h, taper_gain, zero, c))
  np.testing.assert_array_equal(linear(4 * jnp.asarray(h)), 4 * linear(h))
  both = np.asarray(norms.fixed_layer(jnp.asarray(h), taper_gain, bias, c))
  np.testing.assert_allclose(both - bias, linear(h), **CLOSE)


@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_bfloat16_streams_are_reduced_in_float32(kind):
  """A bfloat16 mean of 512 numbers is off by percents; the result is cast.

  Bit for bit what float32 gives on the same numbers, rounded once.
  """
  rng = np.random.default_rng(0)
  h = jnp.asarray(rng.normal(1, 1, (B, L, 512)), jnp.bfloat16)
  gain, taper_gain, bias = np.float32(rng.uniform(0.3, 3, (3, 512)))
  c, g = jnp.float32(0.7), jnp.float32(0.4)
  if kind == "rms":
    maps = [
      lambda h: norms.rms_norm(h, gain, EPS),
      lambda h: norms.fixed_rms(h, taper_gain, c),
      lambda h: norms.taper_rms(h, gain, taper_gain, c, g, EPS),
    ]
    scale = norms.rms_scale
  else:
    maps = [
      lambda h: norms.layer_norm(h, gain, bias, EPS),
      lambda h: norms.fixed_layer(h, taper_gain, bias, c),
      lambda h: norms.taper_layer(h, gain, taper_gain, bias, c, g, EPS),
    ]
    scale = norms.layer_scale
  wide = h.astype(jnp.float32)
  for f in maps:
    assert f(h).dtype == jnp.bfloat16
    np.testing.assert_array_equal(f(h), f(wide).astype(jnp.bfloat16))
  assert scale(h, EPS).dtype == jnp.float32
  np.testing.assert_array_equal(scale(h, EPS), scale(wide, EPS))
  sums = lambda h: norms.calibration_sums(
    h, gain, jnp.ones((B, L)), kind, EPS
  )
  np.testing.assert_array_equal(sums(h), sums(wide))


@pytest.mark.parametrize(
  "gate, branch",
  [
    (1.0, "norm"),
    (1, "norm"),
    (0.0, "scale"),
    (0, "scale"),
    (0.5, "taper"),
    (jnp.float32(0.0), "taper"),
    (jnp.float32(1.0), "taper"),
  ],
)
def test_only_a_python_number_fixes_the_branch(gate, branch):
  """A traced gate is never looked at: it must not cost a compilation."""
  assert norms.phase_of(gate) == branch


def norm_calls(config, gate, **kwargs):
  """(name, input, output, sums) of every norm site in one forward pass."""
  calls = []

  def record(call, args, kwargs, context):
    out = call(*args, **kwargs)
    if isinstance(context.module, norms.Norm):
      calls.append(("/".join(context.module.path), args[0], *out))
    return out

  with nn.intercept_methods(record):
    model.Transformer(config).apply(
      {"params": kwargs.pop("params")}, tiny.tokens(), gate=gate, **kwargs
    )
  return calls


@pytest.mark.parametrize("kind", ["rms", "layer"])
@pytest.mark.parametrize("mode", ["norm", "taper"])
@pytest.mark.parametrize("eps", [1e-6, 0.3])
def test_every_site_of_the_model_uses_the_configured_eps(kind, mode, eps):
  """Libraries have ignored it at some sites; 0.3 would show anywhere."""
  config = tiny.model_config(
    norm=kind, internal_norm=mode, final_norm=mode, norm_eps=eps
  )
  params = tiny.params(config)
  calls = norm_calls(config, 1.0, params=params)
  assert len(calls) == tiny.S
  for name, h, out, _ in calls:
    site = params
    for part in name.split("/"):
      site = site[part]
    x, r = unit(h, kind, eps)
    expected = x / r * np.asarray(site["scale"])
    if kind == "layer":
      expected += np.asarray(site["bias"])
    np.testing.assert_allclose(out, expected, err_msg=name, **CLOSE)


@pytest.mark.parametrize("kind", ["rms", "layer"])
@pytest.mark.parametrize("gate", [0.0, 0.4])
def test_every_site_of_the_model_takes_its_own_c_and_gains(kind, gate):
  """A swapped site or a c that is off by one block would pass at unit c."""
  config = tiny.model_config(norm=kind)
  params, c = tiny.params(config), tiny.c(config)
  g = gate if gate == 0.0 else jnp.float32(gate)
  calls = norm_calls(config, g, params=params, c=c)
  names = [name for name, *_ in calls]
  assert names == [
    "block_0/attn_norm",
    "block_0/mlp_norm",
    "block_1/attn_norm",
    "block_1/mlp_norm",
    "final_norm",
  ]
  for site_c, (name, h, out, _) in zip(np.asarray(c), calls, strict=True):
    site = params
    for part in name.split("/"):
      site = site[part]
    site = {k: np.asarray(v) for k, v in site.items()}
    x, r = unit(h, kind)
    expected = gate * x / r * site["scale"]
    expected += (1 - gate) * site_c * x * site["taper_scale"]
    if kind == "layer":
      expected += site["bias"]
    np.testing.assert_allclose(out, expected, err_msg=name, **CLOSE)


@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_gradients_reach_gamma_and_its_copy_only_where_they_act(kind):
  """gamma has none at g = 0, gamma~ none at g = 1, both have between."""
  h, gain, taper_gain, bias = draw()

  def loss(gains, gate):
    if kind == "rms":
      out = norms.taper_rms(h, *gains, jnp.float32(0.7), gate, EPS)
    else:
      out = norms.taper_layer(h, *gains, bias, jnp.float32(0.7), gate, EPS)
    return jnp.sum(jnp.sin(out))

  grad = jax.grad(loss)
  for gate, (plain, fixed) in {
    1.0: (True, False),
    0.5: (True, True),
    0.0: (False, True),
  }.items():
    dgain, dtaper = grad((gain, taper_gain), jnp.float32(gate))
    assert bool(np.all(np.asarray(dgain) != 0)) == plain
    assert bool(np.any(np.asarray(dgain) != 0)) == plain
    assert bool(np.all(np.asarray(dtaper) != 0)) == fixed
    assert bool(np.any(np.asarray(dtaper) != 0)) == fixed


def test_a_folded_site_is_the_identity_and_has_no_parameters():
  """Mode none is what the fold leaves behind."""
  site = norms.Norm("rms", "none", EPS, "norm")
  h = jnp.asarray(draw()[0])
  variables = site.init(jax.random.key(0), h, 1.0, jnp.float32(1), None)
  assert not jax.tree.leaves(variables)
  out, _ = site.apply({}, h, 1.0, jnp.float32(1), None)
  np.testing.assert_array_equal(out, h)
