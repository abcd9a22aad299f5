"""Rotary positions, causal attention and the cache against plain formulas."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from taperjax import attention
from taperjax.config import RopeScaling
from tests import tiny

B, L, K = tiny.B, tiny.L, tiny.K
H, G = 6, 2  # query heads, key/value heads: three queries share one


def draw(length=L, heads=H, groups=G, size=K, dtype=jnp.float32):
  rng = np.random.default_rng(0)
  shapes = [(B, length, n, size) for n in (heads, groups, groups)]
  return [jnp.asarray(rng.normal(0, 1, shape), dtype) for shape in shapes]


def plain(q, k, v):
  """softmax(q k / sqrt(K)) v in float64, one query head at a time."""
  q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
  share = q.shape[2] // k.shape[2]
  out = np.zeros_like(q)
  for h in range(q.shape[2]):
    kh, vh = k[:, :, h // share], v[:, :, h // share]
    s = q[:, :, h] @ kh.transpose(0, 2, 1) / np.sqrt(q.shape[-1])
    s = np.where(np.tri(s.shape[1], dtype=bool), s, -np.inf)
    p = np.exp(s - s.max(-1, keepdims=True))
    out[:, :, h] = p / p.sum(-1, keepdims=True) @ vh
  return out


@pytest.mark.parametrize("rotary_dim", [2, 4, 6])
def test_rotary_turns_pairs_half_a_rotary_dim_apart(rotary_dim):
  """The half-split layout, as Hugging Face Llama has it; partial rotary too.

  Each pair is a complex number times exp(i position frequency).
  """
  rng = np.random.default_rng(0)
  x = rng.normal(0, 1, (B, L, 3, 6)).astype(np.float32)
  # Each row at another offset: positions are not the index.
  position = np.arange(L)[None] + np.array([0, 5, 90])[:, None]
  half = rotary_dim // 2
  frequency = 100.0 ** (-2.0 * np.arange(half) / rotary_dim)
  turn = np.exp(1j * position[:, :, None, None] * frequency)
  pair = (x[..., :half] + 1j * x[..., half:rotary_dim]) * turn
  expected = np.concatenate([pair.real, pair.imag, x[..., rotary_dim:]], -1)
  turns = attention.frequencies(100.0, rotary_dim)
  got = attention.rotary(x, jnp.asarray(position, jnp.int32), turns)
  # An angle near 100 is rounded to 4e-6.
  np.testing.assert_allclose(got, expected, rtol=0, atol=2e-5)


def test_llama3_scaling_keeps_fast_turns_and_slows_slow_ones():
  """Written out with wavelengths, as the rule was published for Llama 3.1.

  The three cases must all occur, or a wrong bound would pass.
  """
  scaling = RopeScaling("llama3", 8.0, 1.0, 4.0, 64)
  plain = np.asarray(attention.frequencies(100.0, 16))
  got = np.asarray(attention.frequencies(100.0, 16, scaling))
  expected, cases = [], set()
  for frequency in plain.astype(np.float64):
    wavelength = 2 * np.pi / frequency
    if wavelength < 64 / 4.0:
      case, value = "fast", frequency
    elif wavelength > 64 / 1.0:
      case, value = "slow", frequency / 8.0
    else:
      share = (64 / wavelength - 1.0) / (4.0 - 1.0)
      case = "between"
      value = (1 - share) * frequency / 8.0 + share * frequency
    cases.add(case)
    expected.append(value)
  assert cases == {"fast", "slow", "between"}
  np.testing.assert_allclose(got, expected, rtol=1e-6)


def test_linear_scaling_divides_every_frequency():
  scaling = RopeScaling("linear", 4.0)
  plain = attention.frequencies(100.0, 8)
  np.testing.assert_array_equal(
    attention.frequencies(100.0, 8, scaling), plain / 4.0
  )


def test_rotary_scores_depend_on_distance_alone():
  """What relative positions mean; the cache relies on it."""
  q, k, _ = draw(groups=H)
  turns = attention.frequencies(100.0, K)

  def scores(offset):
    position = jnp.broadcast_to(jnp.arange(L)[None] + offset, (B, L))
    a = attention.rotary(q, position, turns)
    b = attention.rotary(k, position, turns)
    return jnp.einsum("BLHK,BMHK->BHLM", a, b)

  np.testing.assert_allclose(scores(0), scores(40), atol=3e-5)


@pytest.mark.parametrize("length, groups", [(7, 1), (7, 2), (7, 6), (130, 2)])
def test_causal_attention_is_softmax_over_the_past(length, groups):
  """Against float64, with one, two and six key/value heads for six queries.

  A swapped grouping (h % G for h // (H / G)) is off by ones, not by 1e-6.
  """
  q, k, v = draw(length, groups=groups)
  got = jax.jit(attention.causal_attention)(q, k, v)
  np.testing.assert_allclose(got, plain(q, k, v), rtol=0, atol=3e-6)


# Blocks of 32 queries, or a quarter: part of one, two of them, and four.
@pytest.mark.parametrize("length", [7, 64, 130])
def test_blocked_attention_and_its_gradients_are_those_of_the_general_one(
  length,
):
  """CPU and GPU must train the same model."""
  q, k, v = draw(length)

  def loss(f):
    def total(q, k, v):
      out = f(q, k, v)
      return jnp.sum(jnp.sin(out)), out

    return jax.jit(jax.grad(total, (0, 1, 2), has_aux=True))

  general = lambda q, k, v: jax.nn.dot_product_attention(
    q, k, v, is_causal=True
  )
  got, out = loss(attention.causal_attention)(q, k, v)
  want, expected = loss(general)(q, k, v)
  np.testing.assert_allclose(out, expected, rtol=0, atol=3e-6)
  # Sums over up to 130 queries of terms near 1.
  for g, w in zip(got, want, strict=True):
    np.testing.assert_allclose(g, w, rtol=0, atol=2e-5)


@pytest.mark.parametrize("length, at", [(7, 3), (130, 64)])
def test_no_gradient_comes_from_the_future(length, at):
  """Causality by gradients: exactly zero after the query, none zero before."""
  q, k, v = draw(length)

  def loss(k, v):
    return jnp.sum(attention.causal_attention(q, k, v)[:, at])

  for grad in jax.jit(jax.grad(loss, (0, 1)))(k, v):
    size = np.abs(np.asarray(grad)).sum((0, 2, 3))
    assert np.all(size[at + 1 :] == 0)
    assert np.all(size[: at + 1] > 0)


def test_bfloat16_attention_takes_its_softmax_in_float32():
  """Scores of about 30 have a bfloat16 step of 0.125: a softmax of those
  would be off by tenths. What stays is the rounding of the output and of the
  probabilities, 2^-8 each.
  """
  q, k, v = draw(64, dtype=jnp.bfloat16)
  q = q * 8
  got = jax.jit(attention.causal_attention)(q, k, v)
  assert got.dtype == jnp.bfloat16
  np.testing.assert_allclose(
    got.astype(jnp.float32), plain(q, k, v), rtol=0, atol=2**-6
  )


@pytest.mark.parametrize("dtype, atol", [("float32", 3e-6), ("bfloat16", 0.02)])
def test_cached_attention_equals_the_full_one_in_pieces(dtype, atol):
  """A prompt of 3, one token, three more: each query as in the full pass.

  The cache is longer than the text and full of old numbers, which a query must
  not read. In bfloat16 the two differ by the rounding of probabilities.
  """
  q, k, v = draw(dtype=jnp.dtype(dtype))
  full = jax.jit(attention.causal_attention)(q, k, v).astype(jnp.float32)
  stale = jnp.full((B, L + 4, G, K), 50.0, dtype)
  cache, seen = (stale, stale), 0
  step = jax.jit(attention.cached_attention)
  for count in (3, 1, 3):
    now = slice(seen, seen + count)
    position = jnp.tile(jnp.arange(seen, seen + count)[None], (B, 1))
    out, cache = step(q[:, now], k[:, now], v[:, now], cache, position)
    assert out.dtype == jnp.dtype(dtype)
    np.testing.assert_allclose(
      out.astype(jnp.float32), full[:, now], rtol=0, atol=atol
    )
    seen += count
  assert seen == L
  np.testing.assert_array_equal(cache[0][:, :L], k)
  np.testing.assert_array_equal(cache[1][:, :L], v)


def test_rows_of_a_cache_stand_at_their_own_positions():
  """Prompts of unequal length decode together, each at its own place."""
  q, k, v = draw()
  full = jax.jit(attention.causal_attention)(q, k, v)
  at = jnp.asarray([2, 6, 0])
  cache = tuple(jnp.where(
    (jnp.arange(L)[None, :] < at[:, None])[:, :, None, None], x, 9.0
  ) for x in (k, v))
  rows = jnp.arange(B)
  one = [x[rows, at][:, None] for x in (q, k, v)]
  out, _ = jax.jit(attention.cached_attention)(*one, cache, at[:, None])
  np.testing.assert_allclose(out[:, 0], full[rows, at], rtol=0, atol=3e-6)
