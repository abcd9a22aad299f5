"""The train step through its three phases, and the calibration between."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from taperjax import calibration, gate as gate_lib, model, optimizer, step
from taperjax.config import VARIANTS
from taperjax.state import abstract, make_tx
from tests import tiny

B, L, D, S = tiny.B, tiny.L, tiny.D, tiny.S
GPT2 = {
  "norm": "layer",
  "model__positions": "learned",
  "model__mlp": "gelu_tanh",
  "model__biases": ("q", "k", "v", "o", "up", "down"),
}
# Llama-like with RMSNorm, GPT-2-like with LayerNorm.
FAMILY = {"rms": {}, "layer": GPT2}


@pytest.fixture(scope="module", autouse=True)
def quick_compilation():
  """Compiling is the cost here: half of it goes without the last passes."""
  jax.config.update("jax_disable_most_optimizations", True)
  yield
  jax.config.update("jax_disable_most_optimizations", False)


@functools.cache
def train_step(config, phase):
  """Compiled once for all tests."""
  return step.make_train_step(config, phase)


def batch(k, size=B):
  """Tokens and a mask with padding, both different at every step."""
  tokens = tiny.tokens(size, L + 1, seed=100 + k)
  return tokens, jnp.roll(tiny.mask(size), k, axis=0)


def numbers(state):
  """A copy of the state as numpy: the original is about to be donated."""
  return jax.tree.map(np.array, state.replace(key=()))


def copy(state):
  return jax.tree.map(jnp.copy, state)


def leaves(params, name):
  return [
    np.asarray(leaf)
    for path, leaf in jax.tree_util.tree_leaves_with_path(params)
    if path[-1].key == name
  ]


@functools.cache
def journey(norm):
  """Ten steps of all_aux: the state before and after each, and its metrics."""
  config = tiny.config(variant="all_aux", **FAMILY[norm])
  state, events = tiny.train_state(config), {}
  for k in range(1, config.steps + 1):
    before, given = numbers(state), state
    run = train_step(config, gate_lib.phase(k, config.taper_steps))
    state, metrics = run(state, *batch(k))
    donated = all(x.is_deleted() for x in jax.tree.leaves(given.params))
    after = numbers(state)
    events[k] = (before, jax.device_get(metrics), after, donated)
    if k == config.taper_steps.start:
      state = step.make_calibrate(config)(state)
      events["calibrate"] = (after, {}, numbers(state), True)
  return config, events


@functools.partial(jax.jit, static_argnums=0)
def plain_aux(config, params, tokens, mask):
  return model.Transformer(config).apply(
    {"params": params}, tokens[:, :-1], mask_BL=mask
  )[1]


@functools.partial(jax.jit, static_argnums=0)
def taper_aux(config, params, tokens, gate, c):
  return model.Transformer(config).apply(
    {"params": params}, tokens[:, :-1], gate=gate, c=c
  )[1]


def mean_sums(config, params, k):
  """Token means of the site statistics and of s(h), from another program."""
  tokens, mask = batch(k)
  aux = plain_aux(config.model, params, tokens, mask)
  count = np.sum(mask)
  sums = np.asarray(aux["sums_S2"], np.float64) / count
  return sums, np.sum(np.asarray(mask) * aux["scale_BL"]) / count


@pytest.mark.parametrize("norm", FAMILY)
def test_gate_and_rate_are_those_of_the_step_counted_from_one(norm):
  """One counter rules both; an off-by-one moves taper start or the peak."""
  config, events = journey(norm)
  assert (config.taper_steps.start, config.taper_steps.end) == (4, 8)
  assert config.warmup_steps == 2
  for k in range(1, 11):
    before, metrics, after, _ = events[k]
    assert (before.step, after.step) == (k - 1, k)
    gate = 1.0 if k <= 4 else 0.0 if k >= 8 else (
      (1 + np.cos(np.pi * (k - 4) / 4)) / 2
    )
    np.testing.assert_allclose(metrics["gate"], gate, rtol=1e-6)
    assert after.gate == metrics["gate"]
    cosine = 1e-3 + 9e-3 * (1 + np.cos(np.pi * (k - 2) / 8)) / 2
    rate = 5e-3 if k == 1 else cosine
    np.testing.assert_allclose(metrics["learning_rate"], rate, rtol=1e-6)
  assert events[1][0].gate == 1 and events[8][2].gate == 0


@pytest.mark.parametrize("norm", FAMILY)
def test_each_phase_compiles_once(norm):
  """The gate is traced and the state keeps its types: never one per step."""
  config, _ = journey(norm)
  for phase in (gate_lib.NORM, gate_lib.TAPER, gate_lib.SCALE):
    assert train_step(config, phase)._cache_size() == 1


@pytest.mark.parametrize("norm", FAMILY)
def test_the_state_is_donated(norm):
  """Two copies of parameters and moments would double the memory."""
  _, events = journey(norm)
  assert all(donated for *_, donated in events.values())


@pytest.mark.parametrize("norm", FAMILY)
def test_metrics_are_finite_scalars(norm):
  """They go to JSON as they are; one name for each quantity of the log."""
  _, events = journey(norm)
  names = {
    "loss", "scale_loss", "mean_scale", "logit_norm", "gate", "learning_rate",
    "scale_target", "grad_norm", "clipped", "grad_norm_qkv",
    "grad_norm_attn_out", "grad_norm_mlp_in", "grad_norm_mlp_out",
  }
  for k in range(1, 11):
    metrics = events[k][1]
    assert set(metrics) == names
    for name, value in metrics.items():
      assert value.shape == () and value.dtype == np.float32, name
      assert np.isfinite(value), name
    assert metrics["clipped"] == (metrics["grad_norm"] > 1.0)


@pytest.mark.parametrize("norm", FAMILY)
def test_statistics_are_collected_through_taper_start_from_before_the_update(
  norm,
):
  """Offline: mu (1 - mu)^(4 - k) of the batch means at steps 1..4.

  Each from the parameters before that step's update, on its own batch, by
  tokens that count. Two float32 programs: 1e-5.
  """
  config, events = journey(norm)
  rate = config.taper.ema_rate
  num, den, scale = np.zeros(S), np.zeros(S), 0.0
  for k in range(1, 5):
    before, metrics, after, _ = events[k]
    sums, mean_scale = mean_sums(config, before.params, k)
    num = (1 - rate) * num + rate * sums[:, 0]
    den = (1 - rate) * den + rate * sums[:, 1]
    scale = (1 - rate) * scale + rate * mean_scale
    np.testing.assert_allclose(metrics["mean_scale"], mean_scale, rtol=1e-5)
    np.testing.assert_allclose(after.taper.num, num, rtol=1e-5)
    np.testing.assert_allclose(after.taper.den, den, rtol=1e-5)
    np.testing.assert_allclose(after.taper.scale, scale, rtol=1e-5)
    assert after.taper.count == k
    assert not np.any(after.taper.c) and after.taper.scale_target == 0
  frozen = events["calibrate"][2].taper
  share = 1 - (1 - rate) ** 4
  np.testing.assert_allclose(frozen.c, num / den, rtol=2e-5)
  np.testing.assert_allclose(frozen.scale_target, scale / share, rtol=2e-5)
  for k in range(5, 11):
    jax.tree.map(np.testing.assert_array_equal, events[k][2].taper, frozen)
    assert events[k][1]["scale_target"] == frozen.scale_target


@pytest.mark.parametrize("norm", FAMILY)
def test_calibration_comes_between_the_last_plain_and_the_first_tapered_step(
  norm,
):
  """It sets gamma~ <- gamma, c and s_tgt, and touches nothing else."""
  _, events = journey(norm)
  before, _, after, _ = events["calibrate"]
  assert before.step == after.step == 4
  assert events[4][1]["gate"] == 1 and 0 < events[5][1]["gate"] < 1
  for old, new, gain in zip(
    leaves(before.params, "taper_scale"),
    leaves(after.params, "taper_scale"),
    leaves(before.params, "scale"),
    strict=True,
  ):
    assert not np.array_equal(old, new)
    np.testing.assert_array_equal(new, gain)
  untouched = lambda state: (
    state.replace(
      taper=(), params=calibration.copy_gains(state.params)
    )
  )
  jax.tree.map(
    np.testing.assert_array_equal, untouched(before), untouched(after)
  )


@pytest.mark.parametrize("norm", FAMILY)
def test_gains_get_gradients_only_where_they_act(norm):
  """Read from Adam's first moment, which is the gradient's average.

  gamma~ has none at g = 1, gamma none at g = 0 (the moment decays by b1), both
  have between, and then both move.
  """
  _, events = journey(norm)
  moment = lambda state, name: leaves(state.opt_state[1].mu, name)
  for k in range(1, 5):
    assert not any(np.any(x) for x in moment(events[k][2], "taper_scale"))
    for old, new in zip(
      leaves(events[k][0].params, "taper_scale"),
      leaves(events[k][2].params, "taper_scale"),
      strict=True,
    ):
      np.testing.assert_array_equal(old, new)
  for k in range(5, 8):
    before, _, after, _ = events[k]
    for name in ("scale", "taper_scale"):
      for old, new in zip(
        leaves(before.params, name), leaves(after.params, name), strict=True
      ):
        assert np.all(old != new)
      for old, new in zip(
        moment(before, name), moment(after, name), strict=True
      ):
        assert np.all(np.abs(new - np.float32(0.9) * old) > 1e-9)
  for k in range(8, 11):
    before, _, after, _ = events[k]
    for old, new in zip(
      moment(before, "scale"), moment(after, "scale"), strict=True
    ):
      np.testing.assert_allclose(new, np.float32(0.9) * old, rtol=2e-7)
    assert any(np.any(x) for x in moment(after, "taper_scale"))


def test_c_and_the_target_are_no_parameters():
  """No gradient, no decay, no moment: they are not in the trees at all."""
  config, events = journey("rms")
  state = events[10][2]
  names = {
    path[-1].key
    for path, _ in jax.tree_util.tree_leaves_with_path(state.params)
  }
  assert names == {"kernel", "embedding", "scale", "taper_scale"}
  assert jax.tree.structure(state.opt_state[1].mu) == jax.tree.structure(
    state.params
  )


@pytest.mark.parametrize("norm", FAMILY)
def test_scale_loss_is_absent_until_taper_start_and_then_equation_5(norm):
  """Mean over the tokens that count, times lambda, from the raw stream."""
  config, events = journey(norm)
  for k in range(1, 5):
    assert events[k][1]["scale_loss"] == 0
  for k in range(5, 11):
    before, metrics, _, _ = events[k]
    tokens, mask = batch(k)
    aux = taper_aux(
      config.model, before.params, tokens, metrics["gate"], before.taper.c
    )
    error = (np.asarray(aux["scale_BL"]) - before.taper.scale_target) ** 2
    expected = 0.1 * np.sum(error * mask) / np.sum(mask)
    assert expected > 1e-6
    np.testing.assert_allclose(metrics["scale_loss"], expected, rtol=1e-4)


def plain_losses(config, params, k, gate, c, target):
  """Cross-entropy and scale loss written out with all logits at once."""
  tokens, mask = batch(k, config.batch_size)
  z, aux = model.Transformer(config.model).apply(
    {"params": params}, tokens[:, :-1], gate=gate, c=c
  )
  nll = -jnp.take_along_axis(
    jax.nn.log_softmax(z), tokens[:, 1:, None], axis=-1
  )[..., 0]
  error = (aux["scale_BL"] - target) ** 2
  count = jnp.sum(mask)
  norm = jnp.sum(mask * jnp.linalg.norm(z, axis=-1)) / count
  return jnp.sum(mask * nll) / count, jnp.sum(mask * error) / count, norm


def close(got, want, rtol, atol):
  """Each leaf, told by name."""
  pairs = zip(
    jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want), strict=True
  )
  for (path, g), w in pairs:
    name = jax.tree_util.keystr(path)
    np.testing.assert_allclose(g, w, rtol=rtol, atol=atol, err_msg=name)


def apart_from_key_biases(got, want, atol, bound):
  """All leaves to `atol`, key biases to `bound`; returns their number.

  With learned positions a key bias shifts all scores of a query alike: its
  gradient is zero but for noise, which Adam makes a step of any size.
  """
  pairs = zip(
    jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want), strict=True
  )
  found = 0
  for (path, g), w in pairs:
    names = [part.key for part in path]
    is_key_bias = names[-2:] == ["k", "bias"]
    found += is_key_bias
    np.testing.assert_allclose(
      g, w, rtol=0, atol=bound if is_key_bias else atol, err_msg=names
    )
  return found


@pytest.mark.parametrize("norm", FAMILY)
def test_add_scale_loss_in_an_optax_chain_gives_the_same_update(norm):
  """Two gradients added before the clip, or one backward pass: the same.

  The cross-entropy, the mask and the sum of both are written out again here.
  Updates are near the rate of 1e-2: 1e-6 is their float32 noise.
  """
  config, events = journey(norm)
  before, metrics, after, _ = events[6]
  args = (metrics["gate"], before.taper.c, before.taper.scale_target)

  @jax.jit
  def foreign(params, opt_state):
    means, pull = jax.vjp(lambda p: plain_losses(config, p, 6, *args), params)
    grads, = pull((1.0, 0.0, 0.0))
    scale_grads, = pull((0.0, 1.0, 0.0))
    tx = optax.chain(
      optimizer.add_scale_loss(config.taper.scale_loss_weight), make_tx(config)
    )
    opt_state = (optimizer.AddScaleLossState(jnp.int32(5)), opt_state)
    updates, _ = tx.update(grads, opt_state, params, scale_grads=scale_grads)
    total = jax.tree.map(lambda g, s: g + 0.1 * s, grads, scale_grads)
    return updates, optax.tree.norm(total), means, step.grad_norms(total)

  updates, grad_norm, means, by_type = foreign(before.params, before.opt_state)
  expected = optax.apply_updates(before.params, updates)
  apart_from_key_biases(after.params, expected, 1e-6, 1e-2)
  np.testing.assert_allclose(metrics["loss"], means[0], rtol=1e-6)
  np.testing.assert_allclose(metrics["scale_loss"], 0.1 * means[1], rtol=1e-5)
  np.testing.assert_allclose(metrics["logit_norm"], means[2], rtol=1e-6)
  np.testing.assert_allclose(metrics["grad_norm"], grad_norm, rtol=1e-5)
  assert metrics["clipped"] == 1  # so the order of loss and clip matters
  for name, value in by_type.items():
    np.testing.assert_allclose(
      metrics[f"grad_norm_{name}"], value, rtol=1e-5, err_msg=name
    )


@pytest.mark.parametrize("norm", FAMILY)
def test_at_gate_one_a_tapered_step_is_the_baseline_step(norm):
  """Loss, gradients and update to 1e-6: the variants share their warm-up.

  Gradients are read from Adam's first moment, 0.1 of the clipped one. Key
  biases have no gradient but noise, which Adam's first step makes a whole
  step: they are bounded by the rate.
  """
  config, events = journey(norm)
  baseline = tiny.config(variant="baseline", **FAMILY[norm])
  given = tiny.train_state(baseline)

  def strip(tree):
    if not isinstance(tree, dict):
      return tree
    return {k: strip(v) for k, v in tree.items() if k != "taper_scale"}

  before, metrics, after, _ = events[1]
  given = given.replace(params=jax.tree.map(jnp.array, strip(before.params)))
  got, plain = train_step(baseline, gate_lib.NORM)(given, *batch(1))
  for name, value in plain.items():
    np.testing.assert_allclose(metrics[name], value, rtol=1e-6, err_msg=name)
  close(got.opt_state[1].mu, strip(after.opt_state[1].mu), 1e-5, 1e-7)
  apart_from_key_biases(strip(after.params), got.params, 2e-6, 1e-2)


@pytest.mark.parametrize("phase", [gate_lib.NORM, gate_lib.TAPER])
def test_micro_batches_equal_one_batch_under_unequal_masks(phase):
  """Sums add up, not means: 6 rows with 1 to 7 tokens each, in 1 or 3 parts.

  Loss, scale loss, statistics and updates. Float32 sums in another order.
  """
  changes = {**GPT2, "batch_size": 6, "model__num_layers": 1}
  whole = tiny.config(**changes)
  parts = tiny.config(**changes, micro_batches=3)
  tokens = tiny.tokens(6, L + 1)
  ends = np.array([1, 2, 7, 7, 3, 1])
  mask = jnp.asarray(np.arange(L)[None] < ends[:, None], jnp.float32)
  taper = calibration.init(3).replace(
    c=tiny.c(whole.model), scale_target=jnp.float32(0.9)
  )
  results = []
  for config in (whole, parts):
    state = tiny.train_state(
      config, step=jnp.int32(5), taper=copy(taper)
    )
    results.append(train_step(config, phase)(state, tokens, mask))
  (a, metrics_a), (b, metrics_b) = results
  assert (metrics_a["scale_loss"] > 0) == (phase == gate_lib.TAPER)
  for name, value in metrics_a.items():
    np.testing.assert_allclose(metrics_b[name], value, rtol=1e-5, err_msg=name)
  assert (a.taper.count == 1) == (phase == gate_lib.NORM)
  close(b.taper, a.taper, 1e-5, 0)
  close(b.opt_state[1].mu, a.opt_state[1].mu, 1e-4, 1e-7)
  # Adam's first step is the gradient's sign: its noise near 0 is amplified.
  assert apart_from_key_biases(b.params, a.params, 5e-5, 2.1e-2) == 1


def test_a_batch_without_any_token_is_no_nan():
  """All padding: the loss is 0 and the parameters stay finite."""
  config, _ = journey("rms")
  state = tiny.train_state(config)
  tokens, mask = batch(1)
  state, metrics = train_step(config, gate_lib.NORM)(state, tokens, 0 * mask)
  assert metrics["loss"] == 0 and metrics["grad_norm"] == 0
  assert all(np.all(np.isfinite(x)) for x in jax.tree.leaves(state.params))


def test_scanned_layers_train_like_unrolled_ones():
  """The same step, weight types and updates, with one tree for all layers."""
  config, events = journey("rms")
  scanned = tiny.config(model__scan_layers=True)
  before, metrics, after, _ = events[6]

  def stack(params):
    params = dict(params)
    blocks = [params.pop(f"block_{n}") for n in range(tiny.N)]
    params["blocks"] = jax.tree.map(lambda *x: jnp.stack(x), *blocks)
    return params

  adam = before.opt_state[1]
  opt_state = (
    before.opt_state[0],
    adam._replace(mu=stack(adam.mu), nu=stack(adam.nu)),
    *before.opt_state[2:],
  )
  state = before.replace(
    params=stack(before.params), opt_state=opt_state, key=jax.random.key(0)
  )
  state = jax.tree.map(jnp.array, state)
  got, metrics_got = train_step(scanned, gate_lib.TAPER)(state, *batch(6))
  for name, value in metrics.items():
    np.testing.assert_allclose(
      metrics_got[name], value, rtol=2e-5, err_msg=name
    )
  close(got.params, stack(after.params), 0, 2e-6)


def test_gradient_norms_are_means_over_matrices_by_weight_type():
  """Fig. 4 of the paper; scanned trees give the same numbers."""
  config = tiny.gpt2_config(mlp="swiglu", num_layers=3)
  grads = tiny.params(config)
  blocks = [grads[f"block_{n}"] for n in range(3)]
  norm = lambda *names: np.mean([
    np.linalg.norm(np.ravel(block[part][name]["kernel"]))
    for block in blocks
    for part, name in (path.split("/") for path in names)
  ])
  expected = {
    "qkv": norm("attn/q", "attn/k", "attn/v"),
    "attn_out": norm("attn/o"),
    "mlp_in": norm("mlp/gate", "mlp/up"),
    "mlp_out": norm("mlp/down"),
  }
  got = jax.jit(step.grad_norms)(grads)
  assert got.keys() == expected.keys()
  stacked = {"blocks": jax.tree.map(lambda *x: jnp.stack(x), *blocks)}
  for tree in (got, jax.jit(step.grad_norms)(stacked)):
    for name, value in expected.items():
      np.testing.assert_allclose(tree[name], value, rtol=1e-6, err_msg=name)


@pytest.mark.parametrize("norm", FAMILY)
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant_has_a_step_for_each_of_its_phases(variant, norm):
  """Traced only, narrow and wide: the state keeps its shapes and types."""
  phases = [gate_lib.NORM]
  if any(VARIANTS[variant][:2]):
    phases += [gate_lib.TAPER, gate_lib.SCALE]
  for phase in phases:
    narrow = "bfloat16" if phase == gate_lib.TAPER else "float32"
    config = tiny.config(
      variant=variant, model__num_layers=1, compute_dtype=narrow, **FAMILY[norm]
    )
    state = abstract(config)
    run = step.make_train_step(config, phase)
    new, metrics = jax.eval_shape(run, state, *batch(1))
    assert new == state
    assert {x.shape for x in metrics.values()} == {()}


@pytest.mark.parametrize(
  "variant, norm, phase, dtype",
  [
    ("internal", "rms", "norm", "float32"),
    ("final", "layer", "norm", "bfloat16"),
    ("internal_aux", "layer", "taper", "bfloat16"),
    ("all", "rms", "taper", "float32"),
    ("final", "rms", "scale", "float32"),
  ],
)
def test_a_variant_tapers_measures_and_anchors_what_table_1_says(
  variant, norm, phase, dtype
):
  """Which sites have statistics, which runs have a scale loss.

  The other combinations differ from these, and from the ten steps of all_aux,
  by nothing but the branch in the norm. All matrices move.
  """
  internal, final, aux = VARIANTS[variant]
  config = tiny.config(
    variant=variant, model__num_layers=1, compute_dtype=dtype, **FAMILY[norm]
  )
  taper = calibration.init(3).replace(c=tiny.c(config.model))
  state = tiny.train_state(config, step=jnp.int32(5), taper=taper)
  before = numbers(state)
  new, metrics = train_step(config, phase)(state, *batch(1))
  assert all(np.isfinite(value) for value in metrics.values())
  assert (metrics["scale_loss"] > 0) == (aux and phase != gate_lib.NORM)
  collected = [False] * 3
  if phase == gate_lib.NORM:
    collected = [internal, internal, final]
  assert (np.asarray(new.taper.num) > 0).tolist() == collected
  assert len(leaves(new.params, "taper_scale")) == 2 * internal + final
  for old, moved in zip(
    leaves(before.params, "kernel"), leaves(new.params, "kernel"), strict=True
  ):
    assert np.all(old != moved)
  np.testing.assert_array_equal(new.taper.c, before.taper.c)


@pytest.mark.parametrize("gate", [1.0, 0.0, 0.3])
def test_eval_step_gives_token_sums(gate):
  """Sums, not means: batches of unequal weight add up to a token mean."""
  config = tiny.config(variant="all")
  params, c = tiny.params(config.model), tiny.c(config.model)
  tokens, mask = batch(3)
  sums = step.make_eval_step(config.model)(params, c, gate, tokens, mask)
  g = gate if gate in (0.0, 1.0) else jnp.float32(gate)

  @jax.jit
  def plain(params):
    _, aux = model.Transformer(config.model).apply(
      {"params": params}, tokens[:, :-1], gate=g, c=c
    )
    return plain_losses(config, params, 3, g, c, 0.0), aux["scale_BL"]

  (nll, _, norm), scale_BL = plain(params)
  count = np.sum(mask)
  assert sums["tokens"] == count < B * L
  np.testing.assert_allclose(sums["nll"], nll * count, rtol=1e-6)
  np.testing.assert_allclose(sums["logit_norm"], norm * count, rtol=1e-6)
  np.testing.assert_allclose(
    sums["scale"], np.sum(mask * np.asarray(scale_BL)), rtol=1e-6
  )


@pytest.mark.parametrize("scan", [False, True])
def test_remat_changes_nothing_but_the_memory(scan):
  """Loss and gradient norms of a step agree to the order of the products."""
  found = []
  for remat in (False, True):
    config = tiny.config(model__remat=remat, model__scan_layers=scan)
    new, metrics = step.make_train_step(config, gate_lib.NORM)(
      tiny.train_state(config), tiny.tokens(length=tiny.L + 1), tiny.mask()
    )
    found.append(jax.device_get((new.params, metrics)))
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=1e-6), *found
  )


def test_a_step_that_is_not_finite_may_be_skipped():
  """A NaN weight makes every gradient NaN; step and gate go on without it."""
  config = tiny.config(nonfinite="skip", model__num_layers=1)
  plain = tiny.config(model__num_layers=1)
  tokens, mask = np.asarray(tiny.tokens(length=L + 1)), np.asarray(tiny.mask())
  new = step.make_train_step(config, gate_lib.NORM)
  state = tiny.train_state(config)
  before = jax.device_get(state)
  bad = mask.copy()
  bad[0, 0] = np.nan
  after, metrics = jax.device_get(new(state, tokens, bad))
  assert metrics["skipped"] == 1.0 and np.isnan(metrics["loss"])
  assert (before.step, after.step, after.gate) == (0, 1, 1.0)
  for name in ("params", "opt_state", "taper"):
    same = jax.tree.map(
      np.array_equal, getattr(before, name), getattr(after, name)
    )
    assert jax.tree.all(same), name
  good, metrics = jax.device_get(new(tiny.train_state(config), tokens, mask))
  want, _ = jax.device_get(
    step.make_train_step(plain, gate_lib.NORM)(
      tiny.train_state(plain), tokens, mask
    )
  )
  assert metrics["skipped"] == 0.0
  jax.tree.map(np.testing.assert_array_equal, good.params, want.params)
