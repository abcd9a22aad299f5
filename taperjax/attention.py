"""Rotary positions, attention behind one function, and the KV cache.

Axes: B batch, L query length, M cache length, H heads, G key/value heads,
K head size.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp

from taperjax.config import RopeScaling

_REPLACED = contextvars.ContextVar("replaced", default=None)


@contextlib.contextmanager
def replaced(function: Callable[..., jax.Array]) -> Iterator[None]:
  """What is traced in here has this function for `causal_attention`."""
  before = _REPLACED.set(function)
  try:
    yield
  finally:
    _REPLACED.reset(before)


def frequencies(
  theta: float, rotary_dim: int, scaling: RopeScaling | None = None
) -> jax.Array:
  r"""Angles by which one position turns, theta^(-2 i / R), float32 (R / 2,).

  linear divides all of them by its factor. llama3 divides only the slow ones,
  of which fewer than low_freq_factor turns fit in the original context, keeps
  the fast ones, with more than high_freq_factor turns, and mixes in between:
  with s the share of the way from low to high, (1 - s) f / factor + s f.
  """
  half = rotary_dim // 2
  exponent_R = jnp.arange(half, dtype=jnp.float32) * 2.0 / rotary_dim
  frequency_R = theta**-exponent_R
  if scaling is None:
    return frequency_R
  if scaling.kind == "linear":
    return frequency_R / scaling.factor
  low, high = scaling.low_freq_factor, scaling.high_freq_factor
  turns_R = scaling.original_context * frequency_R / (2.0 * jnp.pi)
  share_R = jnp.clip((turns_R - low) / (high - low), 0.0, 1.0)
  return ((1.0 - share_R) / scaling.factor + share_R) * frequency_R


def rotary(
  x_BLHK: jax.Array,
  position_BL: jax.Array,
  frequency_R: jax.Array,
) -> jax.Array:
  r"""Rotates the first 2 R coordinates of each head by its position.

  Coordinate i turns with i + R (the half-split layout) by the angle
  position * frequency[i], i < R.

  Args:
    x_BLHK: queries or keys.
    position_BL: int32 positions from 0.
    frequency_R: from `frequencies`; 2 R is at most K, and the rest of the head
      passes unchanged.
  """
  half = frequency_R.shape[0]
  position_BL1 = position_BL[..., None].astype(jnp.float32)
  angle_BLR = position_BL1 * frequency_R[None, None, :]
  cos_BL1R = jnp.cos(angle_BLR)[:, :, None, :]
  sin_BL1R = jnp.sin(angle_BLR)[:, :, None, :]
  x32 = x_BLHK.astype(jnp.float32)
  a, b = x32[..., :half], x32[..., half : 2 * half]
  rest = x32[..., 2 * half :]
  turned = (a * cos_BL1R - b * sin_BL1R, b * cos_BL1R + a * sin_BL1R, rest)
  return jnp.concatenate(turned, axis=-1).astype(x_BLHK.dtype)


def causal_attention(
  q_BLHK: jax.Array, k_BLGK: jax.Array, v_BLGK: jax.Array
) -> jax.Array:
  """softmax(q k / sqrt(K)) v over the positions up to each query's own.

  Softmax in float32. H must be a multiple of G; query head h reads key/value
  head h // (H / G). On CPU one window at a time, so that its scores stay in
  the cache of a core, and its queries in blocks that see no key after them.

  Returns:
    out_BLHK in the dtype of q.
  """
  if (other := _REPLACED.get()) is not None:
    return other(q_BLHK, k_BLGK, v_BLGK)
  if jax.default_backend() != "cpu":
    return jax.nn.dot_product_attention(q_BLHK, k_BLGK, v_BLGK, is_causal=True)
  return jax.lax.map(
    lambda qkv: _window_attention(*qkv), (q_BLHK, k_BLGK, v_BLGK)
  )


def _window_attention(q_LHK, k_LGK, v_LGK):
  """Causal attention of one window; R = H / G query heads read one key head."""
  length, heads, size = q_LHK.shape
  groups = k_LGK.shape[1]
  q_LGRK = q_LHK.reshape(length, groups, heads // groups, size)
  q_GRLK = jnp.transpose(q_LGRK, (1, 2, 0, 3))
  k_GLK, v_GLK = (jnp.swapaxes(x, 0, 1) for x in (k_LGK, v_LGK))
  block = max(32, -(-length // 4))
  parts = []
  for start in range(0, length, block):
    end = min(start + block, length)
    parts.append(
      _block_attention(q_GRLK[:, :, start:end], k_GLK[:, :end], v_GLK[:, :end])
    )
  out_GRLK = jnp.concatenate(parts, axis=2)
  out_LGRK = jnp.transpose(out_GRLK, (2, 0, 1, 3))
  return out_LGRK.reshape(q_LHK.shape).astype(q_LHK.dtype)


_F32 = {"preferred_element_type": jnp.float32}


def _scores(q_GRLK, k_GMK):
  """q k / sqrt(K), float32, -inf at the keys after a query: the last L of M."""
  s_GRLM = jnp.einsum("GRLK,GMK->GRLM", q_GRLK, k_GMK, **_F32)
  length, keys = s_GRLM.shape[-2:]
  rows_L = keys - length + jnp.arange(length)
  seen_LM = jnp.arange(keys)[None, :] <= rows_L[:, None]
  scaled_GRLM = s_GRLM * q_GRLK.shape[-1] ** -0.5
  return jnp.where(seen_LM[None, None, :, :], scaled_GRLM, -jnp.inf)


def _softmax_values(q_GRLK, k_GMK, v_GMK):
  """Attention of a block, and log sum exp of its scores; both float32."""
  s_GRLM = _scores(q_GRLK, k_GMK)
  top_GRL1 = jnp.max(s_GRLM, axis=-1, keepdims=True)
  p_GRLM = jnp.exp(s_GRLM - top_GRL1)
  sum_GRL1 = jnp.sum(p_GRLM, axis=-1, keepdims=True)
  out_GRLK = jnp.einsum(
    "GRLM,GMK->GRLK", p_GRLM.astype(v_GMK.dtype), v_GMK, **_F32
  )
  return out_GRLK / sum_GRL1, top_GRL1 + jnp.log(sum_GRL1)


@jax.custom_vjp
def _block_attention(
  q_GRLK: jax.Array, k_GMK: jax.Array, v_GMK: jax.Array
) -> jax.Array:
  """The L last queries of M positions over these; float32.

  The backward pass forms the probabilities once more from their log sum exp,
  and with o the output, p the probabilities and d the cotangents

      ds = p (do v - sum_k o do) / sqrt(K),  dq = ds k,  dk = ds^T q,
      dv = p^T do.
  """
  return _softmax_values(q_GRLK, k_GMK, v_GMK)[0]


def _block_forward(q_GRLK, k_GMK, v_GMK):
  out_GRLK, log_sum_GRL1 = _softmax_values(q_GRLK, k_GMK, v_GMK)
  return out_GRLK, (q_GRLK, k_GMK, v_GMK, out_GRLK, log_sum_GRL1)


def _block_backward(residuals, dout_GRLK):
  q_GRLK, k_GMK, v_GMK, out_GRLK, log_sum_GRL1 = residuals
  p_GRLM = jnp.exp(_scores(q_GRLK, k_GMK) - log_sum_GRL1)
  mean_GRL1 = jnp.sum(out_GRLK * dout_GRLK, axis=-1, keepdims=True)
  dout_GRLK = dout_GRLK.astype(v_GMK.dtype)
  dp_GRLM = jnp.einsum("GRLK,GMK->GRLM", dout_GRLK, v_GMK, **_F32)
  ds_GRLM = p_GRLM * (dp_GRLM - mean_GRL1) * q_GRLK.shape[-1] ** -0.5
  p_GRLM, ds_GRLM = (x.astype(v_GMK.dtype) for x in (p_GRLM, ds_GRLM))
  dv_GMK = jnp.einsum("GRLM,GRLK->GMK", p_GRLM, dout_GRLK, **_F32)
  dk_GMK = jnp.einsum("GRLM,GRLK->GMK", ds_GRLM, q_GRLK, **_F32)
  dq_GRLK = jnp.einsum("GRLM,GMK->GRLK", ds_GRLM, k_GMK, **_F32)
  inputs = (q_GRLK, k_GMK, v_GMK)
  grads = (dq_GRLK, dk_GMK, dv_GMK)
  return tuple(g.astype(x.dtype) for g, x in zip(grads, inputs, strict=True))


_block_attention.defvjp(_block_forward, _block_backward)


def cached_attention(
  q_BLHK: jax.Array,
  k_BLGK: jax.Array,
  v_BLGK: jax.Array,
  cache: tuple[jax.Array, jax.Array],
  position_BL: jax.Array,
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
  """Writes the new keys and values at their positions, then attends.

  A slot's index is its position, and a query sees the slots up to its own, so
  what an earlier, longer write left behind is never read. As many new tokens as
  slots are the whole text, and attend as without a cache.

  Args:
    q_BLHK, k_BLGK, v_BLGK: new tokens, contiguous within each row.
    cache: (k_BMGK, v_BMGK).
    position_BL: their positions, all below M.

  Returns:
    (out_BLHK, cache).
  """
  if k_BLGK.shape == cache[0].shape:
    full = (k_BLGK.astype(cache[0].dtype), v_BLGK.astype(cache[1].dtype))
    return causal_attention(q_BLHK, k_BLGK, v_BLGK), full
  write = jax.vmap(
    lambda old, new, start: jax.lax.dynamic_update_slice_in_dim(
      old, new.astype(old.dtype), start, axis=0
    )
  )
  k_BMGK = write(cache[0], k_BLGK, position_BL[:, 0])
  v_BMGK = write(cache[1], v_BLGK, position_BL[:, 0])
  slots_M = jnp.arange(k_BMGK.shape[1])
  mask_BLM = slots_M[None, None, :] <= position_BL[:, :, None]
  out_BLHK = jax.nn.dot_product_attention(
    q_BLHK, k_BMGK, v_BMGK, mask=mask_BLM[:, None, :, :]
  )
  return out_BLHK, (k_BMGK, v_BMGK)
