"""FakeLN: hard cuts, frozen divisors, and the faults of the original code."""

import dataclasses
import functools
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from taperjax import (
  api,
  config as config_lib,
  decode,
  fakeln,
  folding,
  gate as gate_lib,
  loop,
  metrics,
  model,
  norms,
  saved,
  step,
)
from taperjax.errors import UserError
from taperjax.interop import exporting
from tests import model_test, runs, tiny

B, L, N, D, M = tiny.B, tiny.L, tiny.N, tiny.D, tiny.M
P = 3 * N + 1
EOT = 5
FAKE = {"internal_norm": "fake", "final_norm": "fake", "eot_id": EOT}
CONFIGS = {
  "rms": tiny.model_config(num_heads=6, num_kv_heads=2, rotary_dim=2, **FAKE),
  "layer": tiny.gpt2_config(biases=("q", "up"), tied=False, **FAKE),
}
LAYER = {
  "norm": "layer",
  "model__positions": "learned",
  "model__mlp": "gelu_tanh",
  "model__biases": ("q", "k", "v", "o", "up", "down"),
}


@pytest.fixture(scope="module", autouse=True)
def quick_compilation():
  """Compiling is the cost here: half of it goes without the last passes."""
  jax.config.update("jax_disable_most_optimizations", True)
  yield
  jax.config.update("jax_disable_most_optimizations", False)


def factors(cut=range(P), seed=3):
  """c_P3, different by kind of token, with zeros where a norm is real."""
  c_P3 = np.random.default_rng(seed).uniform(0.5, 1.5, (P, 3))
  c_P3[[i for i in range(P) if i not in cut]] = 0.0
  return np.asarray(c_P3, np.float32)


HALF = factors((2, 5, 0, 3, 1))  # MLP norms, queries and keys, one value


@functools.partial(jax.jit, static_argnames=("config", "output"))
def apply(params, config, tokens, c, mask=None, output="logits"):
  return model.Transformer(config).apply(
    {"params": params}, tokens, c=c, mask_BL=mask, output=output
  )


def plain(params, config, tokens, c):
  """The model in float64, and s(h) of each norm."""
  params = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
  tokens = np.asarray(tokens)
  kind = np.where(tokens == EOT, 2, 0)
  kind[:, 0] = 1
  seen = []

  def norm(site, h, *rows):
    x = h - h.mean(-1, keepdims=True) if config.norm == "layer" else h
    s = np.sqrt((x**2).mean(-1) + config.norm_eps)
    seen.append(s)
    outs = []
    for row in rows:
      given = c[row].astype(np.float64)[kind]
      s_here = np.where(given > 0, 1 / np.where(given > 0, given, 1), s)
      unit = x / s_here[..., None]
      outs.append(unit * site["scale"] + site.get("bias", 0.0))
    return outs if len(rows) > 1 else outs[0]

  embedding = params["embed"]["embedding"]
  h = embedding[tokens]
  if config.positions == "learned":
    h = h + params["position_embed"]["embedding"][: h.shape[1]]
  for n in range(config.num_layers):
    block = params[f"block_{n}"]
    x, value = norm(block["attn_norm"], h, 3 * n, 3 * n + 1)
    h = h + model_test.np_attention(block["attn"], x, config, value)
    x = norm(block["mlp_norm"], h, 3 * n + 2)
    h = h + model_test.np_mlp(block["mlp"], x, config)
  x = norm(params["final_norm"], h, len(c) - 1)
  if config.tied:
    return x @ embedding.T, seen, kind
  return model_test.np_linear(params["head"], x), seen, kind


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("c", [0 * HALF, HALF, factors()], ids=["0", "5", "7"])
def test_model_is_the_textbook_one_at_every_stage_of_the_cuts(name, c):
  """Real and fake inputs of one norm, own divisors by kind of token."""
  config = CONFIGS[name]
  params, tokens = tiny.params(config), tiny.tokens(50)
  mask = tiny.mask(50)
  expected, seen, kind = plain(params, config, tokens, c)
  assert 0.2 < expected.std() < 5
  assert np.sum(kind == 2) > 5
  got, aux = apply(params, config, tokens, c, mask)
  scale = max(1.0, expected.std())
  np.testing.assert_allclose(got, expected, rtol=0, atol=3e-5 * scale)
  weights = np.stack([mask * (kind == 0), mask * (kind == 1)])
  np.testing.assert_array_equal(np.moveaxis(aux["weight_BL2"], -1, 0), weights)
  sums = [[np.sum(w * s) for w in weights] for s in seen]
  np.testing.assert_allclose(aux["sums_S2"], sums, rtol=1e-5)


def test_scanned_layers_are_unrolled_ones():
  """One tree for all layers: factors and sums go by layer there, too."""
  config = CONFIGS["layer"]
  params, tokens = tiny.params(config), tiny.tokens()
  blocks = [params[f"block_{n}"] for n in range(N)]
  stacked = {k: v for k, v in params.items() if not k.startswith("block")}
  stacked["blocks"] = jax.tree.map(lambda *x: jnp.stack(x), *blocks)
  scanned = config.replace(scan_layers=True)
  want, want_aux = apply(params, config, tokens, HALF, tiny.mask())
  got, aux = apply(stacked, scanned, tokens, HALF, tiny.mask())
  np.testing.assert_allclose(got, want, rtol=0, atol=1e-5)
  np.testing.assert_allclose(aux["sums_S2"], want_aux["sums_S2"], rtol=1e-6)
  c = np.repeat(factors()[:, :1], 3, axis=1)
  one, c_S, config = fakeln.to_taper(params, c, config)
  all_at_once, same, scanned = fakeln.to_taper(stacked, c, scanned)
  np.testing.assert_array_equal(c_S, same)
  assert scanned == config.replace(scan_layers=True)
  for n in range(N):
    jax.tree.map(
      np.testing.assert_array_equal,
      jax.tree.map(lambda x, n=n: x[n], all_at_once["blocks"]),
      one[f"block_{n}"],
    )


@pytest.mark.parametrize(
  "name, biases",
  [
    ("rms", ("v",)),
    ("layer", ("q", "up")),
    ("layer", ("q", "v", "up", "down")),
  ],
)
def test_the_result_is_a_tapered_model_exactly(name, biases):
  """v takes what differs between its divisor and that of q and k: 1e-5.

  The folded model has the same logits, so no form of it has a norm.
  """
  config = CONFIGS[name].replace(biases=biases)
  params, tokens = tiny.params(config), tiny.tokens(50)
  c = np.repeat(factors()[:, :1], 3, axis=1)
  want, _ = apply(params, config, tokens, c)
  new, c_S, tapered = fakeln.to_taper(params, c, config)
  assert tapered.tapered_sites == list(range(2 * N + 1))
  assert tapered.eot_id is None
  gained = {"v"} if name == "layer" else set()
  assert set(tapered.biases) == set(biases) | gained
  assert c_S.shape == (2 * N + 1,)
  got = model_test.jitted(tapered, 0.0)(new, tokens, 0.0, c_S, None)[0]
  bound = 1e-5 * max(1.0, np.max(np.abs(want)))
  np.testing.assert_allclose(got, want, rtol=0, atol=bound)
  folded, folded_config = folding.fold(new, c_S, tapered)
  got = model_test.jitted(folded_config)(folded, tokens, 1.0, c_S, None)[0]
  np.testing.assert_allclose(got, want, rtol=0, atol=bound)
  never = np.array(c)
  never[4] = 0.0
  with pytest.raises(UserError, match=r"c=0 at block_1\.v: no regular token"):
    fakeln.to_taper(params, never, config)


# --- The train step.


def batch(k, size=B):
  """Tokens with ends of text, and a mask with padding."""
  tokens = np.array(tiny.tokens(size, L + 1, seed=100 + k))
  tokens[1, 2 + k % 3] = EOT
  return jnp.asarray(tokens), jnp.roll(tiny.mask(size), k, axis=0)


def config_of(**changes):
  config = tiny.config(variant="fakeln", **changes)
  return config.with_vocab(tiny.V, EOT)


def numbers(state):
  return jax.tree.map(np.array, state.replace(key=()))


@functools.cache
def journey():
  """Ten steps through all cuts: the state before and after each."""
  config = config_of(**LAYER)
  state, events = tiny.train_state(config), {}
  run = step.make_train_step(config, gate_lib.NORM)
  for k in range(1, config.steps + 1):
    assert gate_lib.phase(k, config.taper_steps) == gate_lib.NORM
    before = numbers(state)
    state, values = run(state, *batch(k))
    events[k] = before, jax.device_get(values), numbers(state)
  return config, events, run._cache_size()


def test_one_compiled_step_serves_the_whole_schedule():
  """The cuts are data: a compilation for each would cost more than training."""
  _, events, compiled = journey()
  assert compiled == 1
  assert [events[k][1]["cut"] for k in range(1, 11)] == [
    0, 1, 2, 3, 4, 5, 6, 7, 7, 7
  ]
  shares = np.array([9, 8, 7, 6, 5, 4, 3, 2, 1, 0]) / 9
  gates = [events[k][2].gate for k in range(1, 11)]
  np.testing.assert_allclose(gates, shares, rtol=1e-6)
  assert gates[0] == 1.0 and gates[-1] == 0.0
  assert all(events[k][1]["gate"] == events[k][2].gate for k in events)


def test_loss_and_scale_loss_are_those_of_the_factors_of_the_step():
  """All tokens are pulled to the mean of the regular ones of this batch."""
  config, events, _ = journey()
  for k in (1, 4, 6, 8, 9, 10):
    before, values, after = events[k]
    tokens, mask = batch(k)
    want = fakeln.factors(before.taper.std, k, config.cut_steps)
    np.testing.assert_allclose(after.taper.c, want, rtol=1e-6)
    assert (np.sum(after.taper.c > 0, axis=1) == 3).sum() == values["cut"]
    logits, seen, kind = plain(
      before.params, config.model, tokens[:, :-1], np.asarray(after.taper.c)
    )
    top = logits.max(-1, keepdims=True)
    lse = np.log(np.exp(logits - top).sum(-1)) + top[..., 0]
    picked = np.take_along_axis(logits, np.array(tokens)[:, 1:, None], -1)
    nll = lse - picked[..., 0]
    mask = np.asarray(mask)
    mean = lambda x, w: np.sum(x * w) / np.sum(w)
    np.testing.assert_allclose(values["loss"], mean(nll, mask), rtol=2e-5)
    target = mean(seen[-1], mask * (kind == 0))
    assert abs(target - mean(seen[-1], mask)) > 1e-4
    error = 0.1 * mean((seen[-1] - target) ** 2, mask)
    np.testing.assert_allclose(values["scale_loss"], error, rtol=2e-4)
    np.testing.assert_allclose(values["scale_target"], target, rtol=2e-5)
    assert after.taper.scale_target == values["scale_target"]


SMALL = {
  "batch_size": 6, "model__num_layers": 1, "taper__scale_loss_weight": 0.0,
}


@functools.cache
def small_step(config):
  return step.make_train_step(config, gate_lib.NORM)


def test_the_target_has_no_gradient_and_a_weight_of_0_turns_the_loss_off():
  """Otherwise the streams would grow or shrink together for nothing."""
  scale = jnp.asarray([[1.0, 2.0, 4.0]])
  weight = jnp.asarray([[[0.0, 1.0], [1.0, 0.0], [1.0, 0.0]]])
  assert fakeln.moving_target(scale, weight) == 3.0
  assert not np.any(jax.grad(fakeln.moving_target)(scale, weight))
  assert fakeln.moving_target(scale, 0 * weight) == 1.0
  vanilla = tiny.config(variant="vanilla", **SMALL)
  (a, got), (b, want) = (
    small_step(c)(tiny.train_state(c), *batch(1, 6))
    for c in (config_of(**SMALL), vanilla)
  )
  assert got["scale_loss"] == 0
  for part in ("loss", "grad_norm", "mean_scale", "logit_norm"):
    np.testing.assert_allclose(got[part], want[part], rtol=1e-5)
  # Before the first cut the model is the plain one, and so are its gradients.
  for x, y in zip(
    jax.tree.leaves(a.opt_state[1].mu), jax.tree.leaves(b.opt_state[1].mu),
    strict=True,
  ):
    np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-7)


def test_micro_batches_give_the_same_means_and_gradients():
  """Sums add up; only the moving target is that of each part."""
  (a, got), (b, want) = (
    small_step(c)(tiny.train_state(c, step=jnp.int32(3)), *batch(1, 6))
    for c in (
      config_of(**SMALL, micro_batches=3), config_of(**SMALL)
    )
  )
  np.testing.assert_allclose(got["loss"], want["loss"], rtol=1e-5)
  np.testing.assert_allclose(a.taper.std, b.taper.std, rtol=1e-5)
  assert np.any(a.taper.std > 0)
  for x, y in zip(
    jax.tree.leaves(a.opt_state[1].mu), jax.tree.leaves(b.opt_state[1].mu),
    strict=True,
  ):
    np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-7)


# --- The faults of the original code.


def test_fault_1_nothing_is_dropped_in_evaluation_nor_in_training():
  """Their attention drops a tenth in evaluation; ours has no dropout."""
  config, events, _ = journey()
  before, values, after = events[5]
  tokens, mask = batch(5)
  evaluate = step.make_eval_step(config.model)
  sums = [
    evaluate(before.params, after.taper.c, 1.0, tokens, mask) for _ in range(2)
  ]
  assert sums[0]["nll"] == sums[1]["nll"]
  mean = sums[0]["nll"] / sums[0]["tokens"]
  np.testing.assert_allclose(mean, values["loss"], rtol=1e-5)


def test_fault_2_position_0_is_a_position_and_not_a_feature():
  """Their vector has the length of the width, and treats feature 0."""
  config = CONFIGS["rms"]
  params, tokens = tiny.params(config), tiny.tokens()
  c = np.repeat(factors()[:, :1], 3, axis=1)
  special = np.array(c)
  special[-1, 1] *= 2.0  # the final norm: no later token reads it
  want, _ = apply(params, config, tokens, c, output="hidden")
  got, _ = apply(params, config, tokens, special, output="hidden")
  np.testing.assert_array_equal(got[:, 1:], want[:, 1:])
  np.testing.assert_allclose(got[:, 0], 2 * want[:, 0], rtol=1e-6)
  # And it is the position that counts, wherever it stands in the array.
  at = lambda place: norms.token_kinds(
    jnp.array([[EOT, 1, EOT]]), jnp.array([place]), EOT
  ).tolist()
  assert at([0, 1, 2]) == [[1, 0, 2]]
  assert at([4, 5, 0]) == [[2, 0, 1]]
  assert norms.token_kinds(jnp.array([[1, 2]]), jnp.array([[0, 1]]), None)[
    0
  ].tolist() == [1, 0]


def test_fault_3_the_special_treatments_act_and_end():
  """Theirs are documented, printed and never acted on."""
  cuts = gate_lib.cut_steps(N, 1, 1, 1, 1, 2, 3)
  assert cuts.sites == (3, 5, 1, 4, 6, 2, 7)
  assert (cuts.eot, cuts.position0) == (9, 12)
  std = np.stack([np.arange(2.0, 2.0 + P), np.arange(20.0, 20.0 + P)], axis=1)
  values = (1, 4)
  for k in range(1, 15):
    c = np.asarray(fakeln.factors(jnp.float32(std), k, cuts))
    for site, last in enumerate(cuts.sites):
      regular, first = 1 / std[site]
      want = [
        regular,
        first if k <= 12 else regular,
        first if k <= 9 and site in values else regular,
      ]
      np.testing.assert_allclose(
        c[site], want if k > last else [0, 0, 0], rtol=1e-6, err_msg=(k, site)
      )
  # In the model: ends of text change with their factor, and only they and
  # what attends to them.
  config = CONFIGS["rms"]
  params = tiny.params(config)
  tokens = np.array(tiny.tokens())
  tokens[tokens == EOT] = EOT + 1
  tokens[1, 3] = EOT
  c = np.repeat(factors()[:, :1], 3, axis=1)
  special = np.array(c)
  special[values, 2] *= 2.0
  want, _ = apply(params, config, tokens, c)
  got, _ = apply(params, config, tokens, special)
  changed = np.any(np.asarray(got) != want, axis=-1)
  expected = np.zeros((B, L), bool)
  expected[1, 3:] = True
  np.testing.assert_array_equal(changed, expected)


def test_fault_4_statistics_move_once_a_step_and_in_training_alone():
  """Theirs move in evaluation, too, and three times in an attention norm.

  Replayed from another program: the mean over regular tokens and that over
  position 0, 0.9 of the old, and frozen from the cut on.
  """
  config, events, _ = journey()
  std = np.zeros((P, 2))
  norm_of = [0, 0, 1, 2, 2, 3, 4]
  for k in range(1, 11):
    before, _, after = events[k]
    tokens, mask = batch(k)
    _, seen, kind = plain(
      before.params, config.model, tokens[:, :-1], np.asarray(after.taper.c)
    )
    for site, last in enumerate(config.cut_steps.sites):
      for i in (0, 1):
        weight = np.asarray(mask) * (kind == i)
        new = np.sum(weight * seen[norm_of[site]]) / np.sum(weight)
        if k <= last:
          old = std[site, i]
          std[site, i] = 0.9 * old + 0.1 * new if k > 1 else new
    np.testing.assert_allclose(after.taper.std, std, rtol=3e-5)
    assert np.all(np.abs(std[:, 0] - std[:, 1]) > 1e-4)
  final = events[10][2].taper
  np.testing.assert_allclose(final.c, 1 / std[:, [0, 0, 0]], rtol=3e-5)
  # Evaluation has nothing to move them with: it asks for no sums.
  _, aux = apply(before.params, config.model, tokens[:, :-1], final.c)
  assert not np.any(aux["sums_S2"]) and aux["weight_BL2"] is None


@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_fault_5_a_norm_without_bias_is_centred_and_divided_all_the_same(kind):
  """Theirs returns x w then, by the precedence of its operators."""
  x = np.random.default_rng(0).normal(1.0, 2.0, (B, L, D)).astype(np.float32)
  gain = np.linspace(0.5, 2.0, D, dtype=np.float32)
  params = {"scale": gain}
  if kind == "layer":
    params["bias"] = np.zeros(D, np.float32)
  c = np.full((1, 3), 0.25, np.float32)
  (out,), _ = norms.FakeNorm(kind, 1e-5).apply(
    {"params": params}, jnp.asarray(x), c, np.zeros((B, L), np.int32), None
  )
  if kind == "layer":
    x = x - x.mean(-1, keepdims=True)
  np.testing.assert_allclose(out, x * 0.25 * gain, rtol=0, atol=1e-6)


@functools.partial(jax.jit, static_argnames="config")
def one_step(params, config, token_B1, place_B1, cache, c):
  logits, aux = model.Transformer(config).apply(
    {"params": params}, token_B1, c=c, cache=cache, position_BL=place_B1
  )
  return logits, aux["cache"]


def test_fault_6_masks_positions_and_the_cache_hold_in_the_middle():
  """Theirs ignores all three: no padding, no generation from a checkpoint."""
  config = CONFIGS["rms"]
  params = tiny.params(config)
  tokens = np.array(tiny.tokens())
  tokens[0, 3] = tokens[2, 5] = EOT
  want, _ = apply(params, config, tokens, HALF)
  cache = model.init_cache(config, B, M)
  for i in range(L):
    place = jnp.full((B, 1), i, jnp.int32)
    got, cache = one_step(
      params, config, tokens[:, i : i + 1], place, cache, HALF
    )
    np.testing.assert_allclose(got[:, 0], want[:, i], rtol=0, atol=2e-5)
  # Rows of unequal length, padded on the right, generate as the full pass.
  prompts = [[EOT, 1, 2], [7], [3, EOT, 4, 9, 8]]
  found = decode.generate(params, config, prompts, max_new=4, c=HALF)
  for prompt, ids in zip(prompts, found, strict=True):
    text = prompt + ids
    padded = np.zeros((1, M), np.int32)
    padded[0, : len(text)] = text
    logits, _ = apply(params, config, padded, HALF)
    best = np.argmax(logits[0], axis=-1)
    assert ids == best[len(prompt) - 1 : len(text) - 1].tolist()
  # What the mask hides is in no mean.
  hidden = np.array(tokens)
  hidden[:, -2:] = 0
  mask = np.ones((B, L), np.float32)
  mask[:, -2:] = 0
  sums = [
    apply(params, config, x, HALF, mask)[1]["sums_S2"] for x in (tokens, hidden)
  ]
  np.testing.assert_array_equal(*sums)


@pytest.mark.parametrize(
  "layers, start, gaps",
  [
    (12, 20, (2, 2, 3)), (24, 20, (2, 2, 3)), (36, 30, (4, 4, 6)),
    (48, 50, (4, 4, 6)), (3, 1, (1, 5, 7)), (2, 9, (0, 0, 0)),
  ],
)
def test_fault_7_the_cuts_reach_the_final_norm_for_any_gap(layers, start, gaps):
  """Theirs asks for one step exactly. The four sizes cut it where they did."""
  cuts = gate_lib.cut_steps(layers, start, *gaps, 2, 10)
  final = start + layers * sum(gaps)
  told = {12: 104, 24: 188, 36: 534, 48: 722}
  assert final == told.get(layers, final)
  by_reader = np.array(cuts.sites[:-1]).reshape(layers, 3)
  order = [*by_reader[:, 2], *by_reader[:, 0], *by_reader[:, 1], cuts.sites[-1]]
  assert order == sorted(order) and order[-1] == final
  assert (cuts.eot, cuts.position0) == (final + 2, final + 12)
  for k in (1, start, start + 1, final, final + 1, 10 * final):
    cut = np.asarray(fakeln.cut_sites(k, cuts))
    assert cut.sum() == sum(last < k for last in cuts.sites)
  assert cut.all()
  assert gate_lib.cut_gate(start, cuts) == 1.0
  assert gate_lib.cut_gate(cuts.position0, cuts) > 0.0
  assert gate_lib.cut_gate(cuts.position0 + 1, cuts) == 0.0


def test_fault_8_every_knob_is_a_field_and_none_an_environment_variable():
  """Theirs has many that a saved run does not know of."""
  folder = pathlib.Path(fakeln.__file__).parent
  for name in ("fakeln", "gate", "norms", "model", "step", "state", "config"):
    assert "environ" not in (folder / f"{name}.py").read_text(), name
  config = config_of()
  assert config.fakeln.momentum == 0.9 and config.model.eot_id == EOT


def test_fault_9_the_result_is_finite_in_float16():
  """Theirs keeps gains of 1e6 w / s, which float16 does not hold."""
  config = CONFIGS["layer"]
  params = tiny.params(config)
  c = np.full((P, 3), 1 / 0.038, np.float32)  # the least s of GPT-2 XL
  params, c_S, config = fakeln.to_taper(params, c, config)
  folded, _ = folding.fold(params, c_S, config)
  for leaf in jax.tree.leaves(folded):
    narrow = np.asarray(leaf).astype(np.float16)
    assert np.all(np.isfinite(narrow))
    np.testing.assert_allclose(narrow, leaf, rtol=1e-3, atol=1e-6)


# --- The config and whole runs.


@pytest.mark.parametrize(
  "changes, message",
  [
    (
      {"fakeln__gap_v": 2},
      "fakeln.start=1 with the gaps of 2 layers puts the last cut after step "
      "11, and steps=10: it must come before the last step; set steps=12 or "
      "more, or lower fakeln.start or the gaps",
    ),
    ({"fakeln__start": 0}, "fakeln.start=0 must be at least 1; it counts"),
    ({"fakeln__gap_qk": -1}, "fakeln.gap_qk=-1 must be at least 0; it counts"),
    ({"fakeln__momentum": 1.0}, "fakeln.momentum=1.0 must be at least 0 and"),
    ({"context_len": 1}, "context_len=1 with variant=fakeln has no position"),
    ({"fakeln__gap": 1}, "fakeln.gap is not a config field; did you mean"),
  ],
)
def test_a_schedule_that_cannot_end_is_one_line(changes, message):
  """Field, value, rule, remedy; before any array exists."""
  with pytest.raises(UserError) as error:
    tiny.config(variant="fakeln", **changes)
  assert str(error.value).startswith(message)
  tiny.config(variant="fakeln", fakeln__gap_v=0)


def test_vanilla_is_the_baseline_under_its_own_name():
  """The same model, the same step; the summary tells which name was used."""
  vanilla, baseline = (tiny.config(variant=v) for v in ("vanilla", "baseline"))
  assert vanilla.variant == "vanilla"
  assert vanilla.model == baseline.model
  assert not vanilla.ends_without_norms and vanilla.cut_steps is None


def test_a_run_saved_before_there_was_fakeln_goes_on():
  """Fields that are younger than it have their defaults there."""
  default = config_lib.FakelnConfig(20, 2, 2, 3, 2, 10, 0.9)
  config = dataclasses.replace(tiny.config(), fakeln=default)
  before = json.loads(json.dumps(config_lib.to_dict(config)))
  del before["fakeln"]
  del before["model"]["eot_id"]
  loop.check_same_config(config, before)
  other = dataclasses.replace(default, start=21)
  with pytest.raises(UserError, match=r"fakeln\.start: saved 20, now 21"):
    loop.check_same_config(dataclasses.replace(config, fakeln=other), before)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
  return runs.shared_root(tmp_path_factory)


@pytest.fixture(scope="module")
def run(root):
  """FakeLN on a finished baseline of one layer; it stops in the cuts once.

  Cuts after steps 1 to 4, the treatments end after 5 and 6.
  """
  changes = runs.started(runs.baseline(root), variant="fakeln")
  whole = runs.finished(root, "fakeln", **changes)
  assert runs.train(root, "fakeln-stop", 3, **changes) is None
  assert runs.train(root, "fakeln-stop", **changes) is not None
  return whole, changes


def test_a_run_stopped_in_the_cuts_resumes_bit_for_bit(root, run):
  """The means, the frozen values and the factors are all in the state."""
  runs.assert_same_run(root / "fakeln-stop", run[0])


def test_the_log_tells_the_cuts_and_the_loss_without_norms_when_it_exists(run):
  records = metrics.read_metrics(run[0] / "metrics.jsonl")
  evals = [r for r in records if r["kind"] == "eval"]
  assert [r["valid_loss_g0"] is None for r in evals] == [True, False]
  assert evals[1]["valid_loss_g0"] == evals[1]["valid_loss"]
  cut = {r["step"]: r["cut"] for r in records if r["kind"] == "train"}
  assert cut == {3: 2, 6: 4, 9: 4, 10: 4}
  assert all(r["scale_target"] for r in records if r["kind"] == "train")


def test_a_finished_run_is_a_tapered_model_at_gate_0(run):
  """So evaluation, generation, folding and exports know nothing of FakeLN."""
  summary = json.loads((run[0] / "summary.json").read_text())
  found = saved.load(run[0])
  assert found.gate == 0.0 and found.tapered and found.calibrated
  assert (found.config.internal_norm, found.config.final_norm) == (
    "taper", "taper"
  )
  loss = api.evaluate(found, saved.valid_tokens(found), max_windows=7)["loss"]
  assert abs(loss - summary["valid_loss"]) < 1e-5
  folded = api.fold(found)
  loss = api.evaluate(folded, saved.valid_tokens(found), max_windows=7)["loss"]
  assert abs(loss - summary["valid_loss_folded"]) < 1e-6
  assert summary["variant"] == "fakeln" and summary["gate"] == 0.0
  assert len(summary["c"]) == 3
  assert exporting.form_of(found, "hf", "float32", False).name == "huge_eps"


def test_the_middle_of_a_run_can_be_used_but_not_folded(run):
  """It evaluates as it did in the run, generates, and has no gate to set."""
  middle = saved.load(run[0], step=5)
  assert middle.cutting and 0 < middle.gate < 1
  assert middle.tapered and not middle.calibrated  # gate 0 does not exist yet
  records = metrics.read_metrics(run[0] / "metrics.jsonl")
  told = next(r for r in records if r["kind"] == "eval" and r["step"] == 5)
  loss = api.evaluate(middle, saved.valid_tokens(middle), max_windows=7)["loss"]
  assert abs(loss - told["valid_loss"]) < 1e-5
  assert api.apply(middle, np.ones((1, 4), np.int32)).shape == (1, 4, 257)
  assert len(api.generate(middle, ["Once"], max_new=3)) == 1
  with pytest.raises(UserError, match="gate=0 has no effect: the norms of a"):
    api.evaluate(middle, saved.valid_tokens(middle), gate=0.0)
  with pytest.raises(UserError, match="internal_norm=fake: the norms of this"):
    api.fold(middle)
  with pytest.raises(UserError, match=r"gate=0\..* an export holds the model"):
    exporting.form_of(middle, "hf", "float32", False)
  with pytest.raises(UserError, match="nothing to calibrate"):
    api.calibrate(middle, [])


def test_adapters_are_refused(run):
  changes = {**run[1], "lora__rank": 2}
  with pytest.raises(UserError, match="lora.rank=2 with variant=fakeln: the c"):
    runs.config(**changes)
