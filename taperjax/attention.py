"""Rotary positions, attention behind one function, and the KV cache.

Axes: B batch, L query length, M cache length, H heads, G key/value heads,
K head size.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from taperjax.config import RopeScaling


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
  head h // (H / G). On CPU the queries go in blocks
  that see no key after them, for about a third of the general routine's time.

  Returns:
    out_BLHK in the dtype of q.
  """
  if jax.default_backend() != "cpu":
    return jax.nn.dot_product_attention(
      q_BLHK, k_BLGK, v_BLGK, is_causal=True
    )
  length = q_BLHK.shape[1]
  block = max(64, -(-length // 4))
  parts = []
  for start in range(0, length, block):
    end = min(start + block, length)
    parts.append(
      _block_attention(
        q_BLHK[:, start:end], k_BLGK[:, :end], v_BLGK[:, :end], start
      )
    )
  return jnp.concatenate(parts, axis=1)


def _block_attention(q_BLHK, k_BMGK, v_BMGK, start):
  """Queries at positions start.. over keys from 0; R = H / G."""
  batch, length, heads, size = q_BLHK.shape
  groups = k_BMGK.shape[2]
  q_BLGRK = q_BLHK.reshape(batch, length, groups, heads // groups, size)
  f32 = {"preferred_element_type": jnp.float32}
  s_BGRLM = jnp.einsum("BLGRK,BMGK->BGRLM", q_BLGRK, k_BMGK, **f32)
  rows_L = start + jnp.arange(length)
  seen_LM = jnp.arange(k_BMGK.shape[1])[None, :] <= rows_L[:, None]
  s_BGRLM = jnp.where(
    seen_LM[None, None, None, :, :], s_BGRLM * size**-0.5, -jnp.inf
  )
  top_BGRL1 = jnp.max(s_BGRLM, axis=-1, keepdims=True)
  p_BGRLM = jnp.exp(s_BGRLM - jax.lax.stop_gradient(top_BGRL1))
  sum_BGRL = jnp.sum(p_BGRLM, axis=-1)
  out_BLGRK = jnp.einsum(
    "BGRLM,BMGK->BLGRK", p_BGRLM.astype(v_BMGK.dtype), v_BMGK, **f32
  )
  out_BLGRK = out_BLGRK / jnp.moveaxis(sum_BGRL, 3, 1)[..., None]
  return out_BLGRK.reshape(q_BLHK.shape).astype(q_BLHK.dtype)


def cached_attention(
  q_BLHK: jax.Array,
  k_BLGK: jax.Array,
  v_BLGK: jax.Array,
  cache: tuple[jax.Array, jax.Array],
  position_BL: jax.Array,
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
  """Writes the new keys and values at their positions, then attends.

  A slot's index is its position, and a query sees the slots up to its own, so
  what an earlier, longer write left behind is never read.

  Args:
    q_BLHK, k_BLGK, v_BLGK: new tokens, contiguous within each row.
    cache: (k_BMGK, v_BMGK).
    position_BL: their positions, all below M.

  Returns:
    (out_BLHK, cache).
  """
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
