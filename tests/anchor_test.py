"""The propositions of the paper's section 4 in float64, and their measure."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from taperjax import anchor, fakeln, model, norms
from tests import tiny

T, D, V = 11, tiny.D, tiny.V
EPS, WEIGHT, TARGET = 0.05, 0.3, 0.7


@pytest.fixture
def float64():
  """Propositions are exact: rounding must not hide a wrong term."""
  with jax.enable_x64(True):
    yield


def draw(seed=0):
  """h (T, D), gain (D,), bias (D,), kernel (D, V), targets (T,) in float64."""
  rng = np.random.default_rng(seed)
  h_TD = rng.normal(0.3, 1.0, (T, D)) * np.exp(rng.uniform(-2, 2, (T, 1)))
  gain_D, bias_D = rng.uniform(0.3, 3.0, D), rng.normal(0.0, 0.5, D)
  kernel_DV = rng.normal(0.0, 0.5, (D, V))
  target_T = np.argmax(h_TD @ kernel_DV, -1)
  target_T[::2] = rng.integers(0, V, len(target_T[::2]))
  return tuple(map(jnp.asarray, (h_TD, gain_D, bias_D, kernel_DV, target_T)))


def scale_of(kind, h_D):
  """r or sigma of one token, and the stream that it is taken of."""
  x_D = h_D if kind == "rms" else h_D - jnp.mean(h_D)
  return jnp.sqrt(jnp.mean(x_D * x_D) + EPS), x_D


def cross_entropy(z_V, target):
  return jax.nn.logsumexp(z_V) - z_V[target]


def close(got, want):
  assert got.dtype == want.dtype == jnp.float64
  np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_a_norm_leaves_eps_of_the_radial_gradient(float64, kind):
  """Prop. 4.1 with eps: any gain; a bias is not seen, as it does not move."""
  h_TD, gain_D, bias_D, kernel_DV, target_T = draw()

  def normed(h_D):
    scale, x_D = scale_of(kind, h_D)
    return x_D / scale * gain_D

  def loss(h_D, target):
    out_D = normed(h_D) + (bias_D if kind == "layer" else 0.0)
    return cross_entropy(out_D @ kernel_DV, target)

  def behind(out_D, target):
    out_D = out_D + (bias_D if kind == "layer" else 0.0)
    return cross_entropy(out_D @ kernel_DV, target)

  got = anchor.radial(jax.vmap(jax.grad(loss))(h_TD, target_T), h_TD)
  out_TD = jax.vmap(normed)(h_TD)
  behind_T = anchor.radial(
    jax.vmap(jax.grad(behind))(out_TD, target_T), out_TD
  )
  scale_T = jax.vmap(lambda h_D: scale_of(kind, h_D)[0])(h_TD)
  close(got, anchor.norm_radial(behind_T, scale_T, EPS))
  assert jnp.min(jnp.abs(got)) > 1e-6
  if kind == "rms":  # the logits are linear in the output: theirs does as well
    of_logits_T = anchor.logit_radial(out_TD @ kernel_DV, target_T)
    close(got, anchor.norm_radial(of_logits_T, scale_T, EPS))


def test_cross_entropy_pulls_a_predicted_token_outward(float64):
  """Prop. 4.2: the identity, the bound, and the growth of |h|^2 of a step."""
  h_TD, gain_D, _, kernel_DV, target_T = draw(1)
  z_TV = h_TD * gain_D[None] @ kernel_DV
  grad_TD = jax.vmap(
    jax.grad(lambda h_D, y: cross_entropy((h_D * gain_D) @ kernel_DV, y))
  )(h_TD, target_T)
  radial_T = anchor.radial(grad_TD, h_TD)
  p_TV = jax.nn.softmax(z_TV)
  rows = jnp.arange(T)
  z_T = z_TV[rows, target_T]
  close(radial_T, anchor.logit_radial(z_TV, target_T))
  close(radial_T, jnp.sum(p_TV * z_TV, -1) - z_T)
  others_TV = z_TV.at[rows, target_T].set(-jnp.inf)
  margin_T = z_T - jnp.max(others_TV, -1)
  close(anchor.margin(z_TV, target_T), margin_T)
  bound_T = anchor.radial_bound(z_TV, target_T)
  close(bound_T, -(1 - p_TV[rows, target_T]) * margin_T)
  assert jnp.all(radial_T <= bound_T)
  predicted_T = margin_T > 0
  assert 2 < jnp.sum(predicted_T) < T - 2
  assert jnp.all(bound_T[predicted_T] < 0)
  rate = 1e-5
  grown_T = jnp.sum((h_TD - rate * grad_TD) ** 2 - h_TD**2, -1)
  assert jnp.all(grown_T[predicted_T] >= -2 * rate * bound_T[predicted_T])


def test_the_bound_is_met_where_the_other_logits_are_equal(float64):
  """Nothing tighter holds: with two logits bound and gradient are the same."""
  z_TV = jnp.array([[3.0, 1.0], [0.5, 2.0], [-1.0, -1.0]])
  target_T = jnp.array([0, 0, 1])
  close(
    anchor.radial_bound(z_TV, target_T), anchor.logit_radial(z_TV, target_T)
  )


@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_the_scale_loss_pulls_toward_its_target(float64, kind):
  """Prop. 4.3 and A.4: inward above s_tgt, outward below."""
  h_TD = draw(2)[0]

  def loss(h_D):
    return WEIGHT * (scale_of(kind, h_D)[0] - TARGET) ** 2

  scale_T, x_TD = jax.vmap(lambda h_D: scale_of(kind, h_D))(h_TD)
  got_T = anchor.scale_radial(x_TD, scale_T, jnp.float64(TARGET), WEIGHT)
  close(got_T, anchor.radial(jax.vmap(jax.grad(loss))(h_TD), h_TD))
  np.testing.assert_array_equal(jnp.sign(got_T), jnp.sign(scale_T - TARGET))
  assert len(set(np.sign(got_T).tolist())) == 2


MODES = {  # internal norms, final norm, gate
  "baseline": ("norm", "norm", 1.0),
  "internal": ("taper", "norm", 0.0),
  "final": ("norm", "taper", 0.4),
  "all at gate 1": ("taper", "taper", 1.0),
  "all between": ("taper", "taper", 0.4),
  "all at gate 0": ("taper", "taper", 0.0),
  "folded": ("none", "none", 1.0),
  "fakeln": ("fake", "fake", 0.6),
}
KINDS = {
  "rms": tiny.model_config(),
  "layer": tiny.gpt2_config(tied=False, biases=("q", "k", "v", "up", "head")),
}


def modeled(name, kind, **changes):
  """(config, params, c, gate) of a mode."""
  internal, final, gate = MODES[name]
  config = KINDS[kind].replace(
    internal_norm=internal, final_norm=final,
    eot_id=5 if internal == "fake" else None, **changes,
  )
  c = tiny.c(config)
  if internal == "fake":  # a real and a cut norm, by kind of token
    c = fakeln.init(config.num_layers).c
    c = c.at[1:].set(jnp.asarray([[0.4, 0.7, 1.1]])).at[2].set(0.0)
  gate = gate if gate in (0.0, 1.0) else jnp.float32(gate)
  return config, tiny.params(config), c, gate


def measure(config, params, c, gate, target=TARGET, weight=WEIGHT, **batch):
  tokens_BL1 = batch.get("tokens_BL1", tiny.tokens(length=tiny.L + 1))
  mask_BL = batch.get("mask_BL", tiny.mask())
  return anchor.make_anchor(config)(
    params, c, gate, target, weight, tokens_BL1, mask_BL
  )


def by_autodiff(config, params, c, gate):
  """All figures from logits in full and a gradient through the whole model.

  A shift is added to what enters the final norm, wherever the model calls it.
  """
  tokens_BL1, keep_BL = tiny.tokens(length=tiny.L + 1), tiny.mask() > 0
  seen = {}

  def logits(shift_BLD):
    def enter(call, args, kwargs, context):
      name = context.module.name
      if context.method_name == "__call__" and args:
        seen[name] = args[0]
        if name == "final_norm":
          args = (args[0] + shift_BLD, *args[1:])
      return call(*args, **kwargs)

    with nn.intercept_methods(enter):
      return model.Transformer(config).apply(
        {"params": params}, tokens_BL1[:, :-1], gate=gate, c=c
      )[0]

  def loss(shift_BLD):
    z_BLV = logits(shift_BLD)
    nll = jax.nn.logsumexp(z_BLV, -1)
    picked = jnp.take_along_axis(z_BLV, tokens_BL1[:, 1:, None], -1)
    return jnp.sum(nll - picked[..., 0])

  zero_BLD = jnp.zeros((*keep_BL.shape, config.embed_dim))
  grad_BLD = jax.grad(loss)(zero_BLD)
  z_BLV = np.asarray(logits(zero_BLD))
  blocks = [f"block_{n}" for n in range(config.num_layers)]
  streams = [
    np.asarray(seen[name], np.float64)[keep_BL]
    for name in (*blocks, "final_norm")
  ]
  h_TD = streams[-1]
  radial_T = (np.asarray(grad_BLD, np.float64)[keep_BL] * h_TD).sum(-1)
  x_TD = h_TD
  if config.norm == "layer":
    x_TD = h_TD - h_TD.mean(-1, keepdims=True)
  s_T = np.sqrt((x_TD**2).mean(-1) + config.norm_eps)
  scale_T = 2 * WEIGHT * (s_T - TARGET) * (x_TD * h_TD).mean(-1) / s_T
  z_TV, target_T = z_BLV[keep_BL], np.asarray(tokens_BL1)[:, 1:][keep_BL]
  margin_T = np.array([
    z_V[y] - np.delete(z_V, y).max()
    for z_V, y in zip(z_TV, target_T, strict=True)
  ])
  return {
    "radial_ce": radial_T.mean(),
    "radial_scale": scale_T.mean(),
    "radial": (radial_T + scale_T).mean(),
    "margin": margin_T.mean(),
    "margin_share": (margin_T > 0).mean(),
    "residual_rms": [np.sqrt((h_TD**2).mean()) for h_TD in streams],
  }


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", MODES)
def test_every_figure_is_that_of_the_whole_model(name, kind, monkeypatch):
  """Padding left out, whatever the norms; in chunks that do not fit."""
  monkeypatch.setattr(anchor, "CHUNK", 8)
  arguments = modeled(name, kind)
  found, want = measure(*arguments), by_autodiff(*arguments)
  assert found.keys() == want.keys()
  for figure, value in want.items():
    assert found[figure].dtype == jnp.float32
    assert found[figure].shape == np.shape(value)
    np.testing.assert_allclose(
      found[figure], value, rtol=2e-5, atol=2e-6, err_msg=figure
    )
  config = arguments[0]
  kept = config.final_norm == "norm" or name == "all at gate 1"
  # eps is all that a norm leaves; without one the pull is plain.
  assert (abs(found["radial_ce"]) < 1e-2) == kept


@pytest.mark.parametrize("name", ["baseline", "all between", "fakeln"])
def test_stacked_layers_give_the_same(name):
  """A run with scan_layers is measured as it trains."""
  config, params, c, gate = modeled(name, "rms")
  want = measure(config, params, c, gate)
  stacked = model.stack_layers(params, config)
  found = measure(config.replace(scan_layers=True), stacked, c, gate)
  for figure, value in want.items():
    np.testing.assert_allclose(found[figure], value, rtol=1e-6, atol=1e-7)


def test_padding_counts_nowhere_and_no_scale_loss_pulls_not():
  """Neither what stands on padding, nor a target that is not there yet."""
  arguments = modeled("all at gate 0", "layer")
  mask_BL = tiny.mask()
  tokens_BL1 = np.maximum(tiny.tokens(length=tiny.L + 1), 1)
  want = measure(*arguments, 0.0, 0.0, tokens_BL1=tokens_BL1)
  padding_BL = np.asarray(mask_BL) == 0
  assert padding_BL.any()
  tokens_BL1[:, 1:][padding_BL] = 0
  config, params, *rest = arguments
  table_VD = params["embed"]["embedding"].at[0].set(1e6)
  params = {**params, "embed": {"embedding": table_VD}}
  found = measure(config, params, *rest, 0.0, 0.0, tokens_BL1=tokens_BL1)
  for figure, value in want.items():
    np.testing.assert_array_equal(found[figure], value)
  assert found["radial_scale"] == 0.0
  assert found["radial"] == found["radial_ce"] != 0.0


def test_statistics_are_float32_under_bfloat16():
  """Final norm and head run in float32, so that rounding is no pull."""
  config, params, c, gate = modeled("baseline", "rms")
  want = measure(config, params, c, gate)
  seen = []

  def enter(call, args, kwargs, context):
    if isinstance(context.module, norms.Norm):
      seen.append((context.module.name, args[0].dtype))
    return call(*args, **kwargs)

  with nn.intercept_methods(enter):
    found = measure(config.replace(compute_dtype="bfloat16"), params, c, gate)
  assert ("attn_norm", jnp.bfloat16) in seen
  own = {dtype for name, dtype in seen if name is None}
  assert own == {np.dtype(np.float32)}
  for figure, value in found.items():
    assert value.dtype == jnp.float32
    if figure != "margin_share":
      np.testing.assert_allclose(value, want[figure], rtol=0.05, err_msg=figure)


def test_blocks_are_not_differentiated_and_compiled_once():
  """One pair of head products of chunk size, and one program for all gates."""
  config, params, c, gate = modeled("all between", "rms")
  measured = anchor.make_anchor(config)
  batch = (TARGET, WEIGHT, tiny.tokens(length=tiny.L + 1), tiny.mask())
  traces = []
  interceptor = lambda call, args, kwargs, context: (
    traces.append(context.module.name), call(*args, **kwargs)
  )[1]
  with nn.intercept_methods(interceptor):
    for g in (0.3, 0.6):
      measured(params, c, jnp.float32(g), *batch)
  assert traces.count("block_0") == 1
  text = str(jax.make_jaxpr(lambda *a: measured(*a, *batch))(params, c, gate))
  products = text.count("dot_general")
  per_block = 9  # q, k, v, o, gate, up, down and two of the attention
  assert products == per_block * config.num_layers + 2
