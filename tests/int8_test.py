"""Decoding with int8 weights is the model whose weights are rounded so."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from taperjax import api, decode, folding, hlo, int8, model, packing
from taperjax.bench import roofline
from taperjax.errors import UserError
from tests import decode_test, folding_test, packing_test

B, M, PROMPTS = packing_test.B, packing_test.M, decode_test.PROMPTS
# Tied and untied, scanned and not, with biases and without.
CASES = [("rms", "gate 0.5"), ("layer", "gate 0"), ("layer", "folded")]
TABLE = pytest.mark.parametrize(("family", "kind"), CASES)


@pytest.fixture
def quick_compilation():
  """As in decode_test; one test here looks at what is compiled."""
  jax.config.update("jax_disable_most_optimizations", True)
  yield
  jax.config.update("jax_disable_most_optimizations", False)


@pytest.mark.parametrize("axes", [(0,), (1, 2)])
def test_a_weight_is_off_by_half_a_scale_at_most(axes):
  """The largest weight of an output is 127 steps, in both directions."""
  w = np.random.default_rng(0).normal(size=(7, 5, 3)).astype(np.float32)
  first = tuple(slice(None) if i in axes else 0 for i in range(3))
  w[first] = 0.0  # an output that reads nothing
  q, scale = map(np.asarray, int8.quantize(jnp.asarray(w), axes))
  assert q.dtype == np.int8 and scale.dtype == np.float32
  assert scale.shape == tuple(
    1 if i in axes else n for i, n in enumerate(w.shape)
  )
  assert np.all(np.abs(q * scale - w) <= scale * 0.50001)
  most = np.max(np.abs(q.astype(int)), axis=axes, keepdims=True)
  used = np.any(w != 0, axis=axes, keepdims=True)
  np.testing.assert_array_equal(most, np.where(used, 127, 0))
  np.testing.assert_array_equal(  # no direction is longer than the other
    int8.quantize(jnp.asarray(-w), axes)[0], -q
  )


@functools.partial(jax.jit, static_argnames=("config", "fixed"))
def int8_step(params, config, token_B, place_B, cache, gate, c, fixed):
  inside = packing.enter(cache, place_B)
  logits_BV, inside = packing.step(
    packing.pack(params, config, "int8"), config, token_B, place_B, inside,
    gate=gate if fixed is None else fixed, c=c,
  )
  return logits_BV, packing.leave(inside, place_B + 1)


@pytest.mark.parametrize("part", [packing.PART, 50])
@TABLE
@pytest.mark.usefixtures("quick_compilation")
def test_an_int8_step_is_a_step_of_the_rounded_model(
  family, kind, part, monkeypatch
):
  """In one part or several; far from the weights before rounding."""
  monkeypatch.setattr(packing, "PART", part)  # 50: up to 12 parts, and padding
  packing.pack.clear_cache()
  int8_step.clear_cache()
  params, config, gate, c, fixed = decode_test.arguments(family, kind)
  rng = np.random.default_rng(1)
  cache = jax.tree.map(
    lambda x: jnp.asarray(rng.normal(size=x.shape), x.dtype),
    model.init_cache(config, B, M),
  )
  token_B = rng.integers(0, config.vocab_size, B)
  rest = (config, token_B, packing_test.PLACES, cache, gate, c, fixed)
  want, want_cache = packing_test.one_step(
    int8.rounded(params, config), *rest, False
  )
  found, found_cache = int8_step(params, *rest)
  # The scale comes behind the sum in place of before: some roundings.
  bound = 1e-5 * max(1.0, float(jnp.max(jnp.abs(want))))
  np.testing.assert_allclose(found, want, rtol=0, atol=bound)
  for x, y in zip(
    jax.tree.leaves(found_cache), jax.tree.leaves(want_cache), strict=True
  ):
    np.testing.assert_allclose(x, y, rtol=0, atol=bound)
  packing.pack.clear_cache()
  plain, _ = packing_test.one_step(params, *rest, False)
  assert float(jnp.max(jnp.abs(found - plain))) > 100 * bound


@TABLE
@pytest.mark.usefixtures("quick_compilation")
def test_greedy_text_is_that_of_the_rounded_model(family, kind):
  """Prefill and loop; and for some prompt not that of the float weights."""
  make, gate = decode_test.MODELS[kind]
  params, config, c = make(family)
  rng = np.random.default_rng(2)
  prompts = rng.integers(0, config.vocab_size, (64, 3)).tolist()
  run = lambda params, **extra: decode.generate(
    params, config, prompts, max_new=12, gate=gate, c=c, **extra
  )
  found = run(params, weights="int8")
  rounded = int8.rounded(params, config)
  assert found == run(rounded)
  assert found != run(params)
  parts = decode.generate_stream(
    params, config, prompts[0], max_new=12, gate=gate, c=c, weights="int8"
  )
  assert sum(parts, []) == found[0]


def test_rounding_is_the_same_in_one_tree_for_all_layers():
  params, config, _ = decode_test.tiny("layer")
  assert config.scan_layers
  stacked, _ = model.unstack_layers(int8.rounded(params, config), config)
  apart = int8.rounded(*model.unstack_layers(params, config))
  jax.tree.map(np.testing.assert_array_equal, stacked, apart)


@TABLE
def test_what_is_rounded_and_what_stays(family, kind):
  make, _ = decode_test.MODELS[kind]
  params, config, _ = make(family)
  rounded = int8.rounded(params, config)
  changed = 0
  for (path, old), new in zip(
    jax.tree_util.tree_leaves_with_path(params), jax.tree.leaves(rounded),
    strict=True,
  ):
    names = [part.key for part in path]
    table = names[0] == "embed" and config.tied
    differs = bool(np.any(np.asarray(old) != np.asarray(new)))
    assert differs == (names[-1] == "kernel" or table), names
    changed += differs
  assert changed >= 7


@pytest.mark.parametrize(("family", "kind"), [CASES[0], CASES[2]])
def test_bytes_of_an_int8_step_are_counted(family, kind):
  """By hand: a byte for each weight of a matrix, 4 for each output."""
  params, config, *_ = decode_test.arguments(family, kind)
  packed = packing.pack(params, config, "int8")
  expected = 0
  for path, leaf in jax.tree_util.tree_leaves_with_path(params):
    names = [part.key for part in path]
    if names == ["embed", "embedding"] and config.tied:
      expected += leaf.size + 4 * leaf.shape[0]  # the head, read as a whole
    elif "embed" in names[0]:
      expected += 4 * B * leaf.shape[1]
    elif names[-1] == "kernel":
      inputs = np.prod(leaf.shape[: 2 if names[-2] == "o" else 1])
      expected += leaf.size + 4 * leaf.size // inputs
    else:
      expected += 4 * leaf.size
  slot = 4 * 2 * config.num_layers * config.num_kv_heads * config.head_dim
  found = roofline.step_bytes(packed, config, batch=B, prompt=5, new=3)
  assert found == expected + B * slot * (6 + 1)


@pytest.mark.parametrize("part", [packing.PART, 50])
def test_the_loop_holds_no_float_copy_of_the_weights(part, monkeypatch):
  """XLA takes a conversion out of a loop that repeats it, if it can."""
  monkeypatch.setattr(packing, "PART", part)
  packing.pack.clear_cache()
  params, config, c = decode_test.tiny("rms")
  timer = decode.GreedyTimer.make(
    params, config, gate=0.0, c=c, batch_size=2, prompt_len=3, new_tokens=4,
    weights="int8",
  )
  programs = hlo.computations(timer.compiled_text())
  [loop] = [line for line in programs[""].values() if " while(" in line]
  state = loop.partition(" while(")[0]
  for packed in [timer.decoder.packed["head"]] + [
    layer[name] for layer in timer.decoder.packed["layers"]
    for name in ("qkv", "o", "up", "down")
  ]:
    sizes = ",".join(map(str, packed["kernel"].shape)).removeprefix("1,")
    assert f"s8[{sizes}]" in state.replace("[1,", "[")
    assert f"f32[{sizes}]" not in state.replace("[1,", "[")
  packing.pack.clear_cache()


def error_of_rounding(w_DF):
  q_DF, scale_1F = int8.quantize(jnp.asarray(w_DF, jnp.float32), (0,))
  return np.asarray(q_DF, np.float64) * np.asarray(scale_1F) - w_DF


@pytest.mark.parametrize(
  ("spread", "low", "high"),
  [(0.0, 0.99, 1.01), (0.3, 1.1, 1.5), (1.0, 1.8, 4.0)],  # log-normal gains
)
def test_gains_that_are_folded_in_make_the_error_larger(spread, low, high):
  """A scale of an output takes the factor c, and not the gains of inputs."""
  rng = np.random.default_rng(3)
  x_BD, w_DF = rng.normal(size=(50, 256)), rng.normal(size=(256, 300))
  gain_D = np.exp(spread * rng.normal(size=256))
  before_BF = (0.37 * gain_D * x_BD) @ error_of_rounding(w_DF)
  after_BF = x_BD @ error_of_rounding(0.37 * gain_D[:, None] * w_DF)
  ratio = np.std(after_BF) / np.std(before_BF)
  assert low < ratio < high


def test_the_factor_c_of_a_folded_norm_costs_nothing():
  """Rounding, then folding one number: the same as the other way around."""
  _, config, c = decode_test.tiny("rms")
  params = folding_test.random_params(config)  # its own, for it is changed
  for n in range(config.num_layers):
    for norm in ("attn_norm", "mlp_norm"):
      scale = params[f"block_{n}"][norm]["taper_scale"]
      params[f"block_{n}"][norm]["taper_scale"] = jnp.full_like(scale, 1.7)
  first, folded = folding.fold(int8.rounded(params, config), c, config)
  last = int8.rounded(folding.fold(params, c, config)[0], folded)
  jax.tree.map(
    lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6), first, last
  )


def test_what_cannot_be_decoded_so_is_refused_in_one_line():
  params, config, c = decode_test.tiny("rms")
  run = lambda config, weights: decode.generate(
    params, config, PROMPTS, max_new=2, c=c, weights=weights
  )
  with pytest.raises(UserError, match="^weights='int4' must be one of float, "):
    run(config, "int4")
  fake = config.replace(internal_norm="fake", final_norm="fake")
  message = "weights=int8 needs .* FakeLN run .*; finish the run$"
  with pytest.raises(UserError, match=message) as caught:
    run(fake, "int8")
  assert "\n" not in str(caught.value)
  with pytest.raises(UserError, match=message):
    api.as_int8(api.Model(params, fake, c, gate=1.0))
