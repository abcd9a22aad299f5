"""The packed step of the loop: the model's own, in another order."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from taperjax import model, packing
from tests import decode_test

M = decode_test.CONTEXT
B, G, K = 3, 2, 5
PLACES = np.array([4, 0, 9], np.int32)


def test_rows_end_at_one_slot_in_the_loop_and_come_back_as_they_were():
  """The last key of each row stands in the slot of the longest row."""
  x_BMGK = np.random.default_rng(0).normal(size=(B, M, G, K))
  x_BMGK = x_BMGK.astype(np.float32)
  ((moved_JKM, same_JKM),) = packing.enter(((x_BMGK, x_BMGK),), PLACES)
  assert moved_JKM.shape == (B * G, K, M)
  np.testing.assert_array_equal(moved_JKM, same_JKM)
  moved_BGKM = np.asarray(moved_JKM).reshape(B, G, K, M)
  for row, place in enumerate(PLACES):
    np.testing.assert_array_equal(moved_BGKM[row, ..., 9], x_BMGK[row, place])
  back = packing.leave(((moved_JKM, same_JKM),), PLACES + 3)
  np.testing.assert_array_equal(back[0][0], x_BMGK)


def test_large_heads_are_the_last_axis_in_the_loop():
  x_BMGK = np.random.default_rng(0).normal(size=(B, M, G, 16))
  x_BMGK = x_BMGK.astype(np.float32)
  assert packing.order_of(16, M) == "JMK"
  ((moved_JMK, same_JMK),) = packing.enter(((x_BMGK, x_BMGK),), PLACES)
  moved_BGMK = np.asarray(moved_JMK).reshape(B, G, M, 16)
  for row, place in enumerate(PLACES):
    np.testing.assert_array_equal(moved_BGMK[row, :, 9], x_BMGK[row, place])
  back = packing.leave(((moved_JMK, same_JMK),), PLACES + 3, "JMK")
  np.testing.assert_array_equal(back[0][0], x_BMGK)


@functools.partial(jax.jit, static_argnames=("config", "fixed", "packed"))
def one_step(params, config, token_B, place_B, cache, gate, c, fixed, packed):
  gate = gate if fixed is None else fixed
  if packed:
    inside = packing.enter(cache, place_B)
    logits_BV, inside = packing.step(
      packing.pack(params, config), config, token_B, place_B, inside,
      gate=gate, c=c,
    )
    order = packing.order_of(config.head_dim, M)
    return logits_BV, packing.leave(inside, place_B + 1, order)
  logits_B1V, aux = model.Transformer(config).apply(
    {"params": params}, token_B[:, None], gate=gate, c=c, cache=cache,
    position_BL=place_B[:, None],
  )
  return logits_B1V[:, 0], aux["cache"]


@pytest.mark.parametrize(
  ("family", "kind"), [("rms", "gate 0.5"), ("layer", "folded")]
)
def test_a_packed_step_is_a_step_of_the_model(family, kind):
  """Logits and cache, of rows at places of their own; to some roundings."""
  params, config, gate, c, fixed = decode_test.arguments(family, kind)
  rng = np.random.default_rng(1)
  shape = model.init_cache(config, B, M)
  cache = jax.tree.map(
    lambda x: jnp.asarray(rng.normal(size=x.shape), x.dtype), shape
  )
  token_B = rng.integers(0, config.vocab_size, B)
  args = (params, config, token_B, PLACES, cache, gate, c, fixed)
  want, want_cache = one_step(*args, False)
  found, found_cache = one_step(*args, True)
  bound = 1e-5 * max(1.0, float(jnp.max(jnp.abs(want))))
  np.testing.assert_allclose(found, want, rtol=0, atol=bound)
  for x, y in zip(
    jax.tree.leaves(found_cache), jax.tree.leaves(want_cache), strict=True
  ):
    np.testing.assert_allclose(x, y, rtol=0, atol=bound)
  assert float(jnp.std(want)) > 0.3


@pytest.mark.parametrize(
  ("family", "kind"), [("rms", "gate 0.5"), ("layer", "folded")]
)
def test_a_packed_step_of_large_heads_is_a_step_of_the_model(
  family, kind, monkeypatch
):
  monkeypatch.setattr(packing, "WIDE", 1)
  jax.clear_caches()
  test_a_packed_step_is_a_step_of_the_model(family, kind)
  jax.clear_caches()


def test_large_heads_outgrow_the_cache_to_the_same_ids(monkeypatch):
  """Rows of unequal lengths, through three lengths of the cache."""
  *_, want = decode_test.long_text("rms", "folded")
  monkeypatch.setattr(packing, "WIDE", 1)
  jax.clear_caches()
  *_, found = decode_test.long_text.__wrapped__("rms", "folded")
  assert found == want
  jax.clear_caches()
