"""Token cross-entropy, chunked over tokens, and the fixed-target scale loss.

Axes: T tokens (batch and length flattened), D model width, V vocabulary.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp


def _chunked(x: jax.Array, chunk: int) -> jax.Array:
  """(T, ...) -> (ceil(T / chunk), chunk, ...), padded with zeros."""
  count = -(-x.shape[0] // chunk)
  padding = [(0, count * chunk - x.shape[0])] + [(0, 0)] * (x.ndim - 1)
  return jnp.pad(x, padding).reshape(count, chunk, *x.shape[1:])


def _logits(h_CD, kernel_DV, bias_V):
  z_CV = jnp.dot(h_CD, kernel_DV, preferred_element_type=jnp.float32)
  return z_CV if bias_V is None else z_CV + bias_V[None, :]


def _nll(z_CV, target_C):
  """Negative log-likelihood and softmax of a chunk, float32."""
  top_C1 = jnp.max(z_CV, axis=-1, keepdims=True)
  e_CV = jnp.exp(z_CV - top_C1)
  sum_C1 = jnp.sum(e_CV, axis=-1, keepdims=True)
  picked_C1 = jnp.take_along_axis(z_CV, target_C[:, None], axis=-1)
  nll_C = (jnp.log(sum_C1) + top_C1 - picked_C1)[:, 0]
  return nll_C, e_CV / sum_C1


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def token_cross_entropy(
  h_TD: jax.Array,
  kernel_DV: jax.Array,
  bias_V: jax.Array | None,
  target_T: jax.Array,
  weight_T: jax.Array,
  chunk: int = 256,
) -> tuple[jax.Array, jax.Array]:
  r"""Weighted sums of -log softmax(z_t)[y_t] and |z_t|, z = h W + b.

  Source: arXiv:2602.10408 (v1), section 3.1. The T x V logits never exist at
  once: each chunk is formed, reduced and, when differentiated, turned into its
  gradient on the spot, three matrix products in all and none of them twice.

  Args:
    h_TD: input of the head. kernel_DV, bias_V: the head, bias or None.
    target_T: next-token ids, int32.
    weight_T: weight of each token, 0 for padding; gets no gradient.
    chunk: tokens per chunk; a matter of speed alone.

  Returns:
    (sum of weight * nll in nats, sum of weight * logit norm), float32 scalars.
    The second is a measurement and has no gradient.
  """

  def body(sums, chunks):
    h_CD, target_C, weight_C = chunks
    z_CV = _logits(h_CD, kernel_DV, bias_V)
    nll_C, _ = _nll(z_CV, target_C)
    norm_C = jnp.sqrt(jnp.sum(z_CV * z_CV, axis=-1))
    nll, norm = sums
    return (nll + jnp.dot(weight_C, nll_C), norm + jnp.dot(weight_C, norm_C)), 0

  parts = tuple(_chunked(x, chunk) for x in (h_TD, target_T, weight_T))
  zero = jnp.float32(0)
  return jax.lax.scan(body, (zero, zero), parts)[0]


def _forward(h_TD, kernel_DV, bias_V, target_T, weight_T, chunk):
  def body(carry, chunks):
    nll, norm, dkernel_DV, dbias_V = carry
    h_CD, target_C, weight_C = chunks
    z_CV = _logits(h_CD, kernel_DV, bias_V)
    nll_C, p_CV = _nll(z_CV, target_C)
    norm_C = jnp.sqrt(jnp.sum(z_CV * z_CV, axis=-1))
    ids_V = jnp.arange(z_CV.shape[-1], dtype=target_C.dtype)
    hit_CV = ids_V[None, :] == target_C[:, None]
    dz_CV = (p_CV - hit_CV) * weight_C[:, None]
    dz_CV = dz_CV.astype(h_CD.dtype)
    f32 = {"preferred_element_type": jnp.float32}
    dh_CD = jnp.dot(dz_CV, kernel_DV.T, **f32)
    dkernel_DV = dkernel_DV + jnp.dot(h_CD.T, dz_CV, **f32)
    if bias_V is not None:
      dbias_V = dbias_V + jnp.sum(dz_CV, axis=0, dtype=jnp.float32)
    nll = nll + jnp.dot(weight_C, nll_C)
    norm = norm + jnp.dot(weight_C, norm_C)
    return (nll, norm, dkernel_DV, dbias_V), dh_CD

  parts = tuple(_chunked(x, chunk) for x in (h_TD, target_T, weight_T))
  zero = jnp.float32(0)
  dbias_V = None if bias_V is None else jnp.zeros_like(bias_V)
  dkernel_DV = jnp.zeros(kernel_DV.shape, jnp.float32)
  carry = (zero, zero, dkernel_DV, dbias_V)
  (nll, norm, dkernel_DV, dbias_V), dh = jax.lax.scan(body, carry, parts)
  dh_TD = dh.reshape(-1, h_TD.shape[-1])[: h_TD.shape[0]].astype(h_TD.dtype)
  grads = (dh_TD, dkernel_DV.astype(kernel_DV.dtype), dbias_V)
  return (nll, norm), (grads, weight_T)


def _backward(chunk, residuals, cotangents):
  del chunk
  grads, weight_T = residuals
  scale = cotangents[0]
  grads = jax.tree.map(lambda g: (g * scale).astype(g.dtype), grads)
  return *grads, None, jnp.zeros_like(weight_T)


token_cross_entropy.defvjp(_forward, _backward)


def scale_loss(
  scale_BL: jax.Array, scale_target: jax.Array, mask_BL: jax.Array
) -> jax.Array:
  r"""Sum over valid tokens of (s(h) - s_tgt)^2; divide by their number.

  Source: arXiv:2602.10408 (v1), Eq. 5, without lambda: the target is a constant
  and gets no gradient.

  Args:
    scale_BL: s(h), r or sigma of the stream before the final norm, float32.
    scale_target: s_tgt, scalar, same unit.
    mask_BL: 1 for tokens that count, 0 for padding.

  Returns:
    float32 scalar.
  """
  error_BL = scale_BL - jax.lax.stop_gradient(scale_target)
  return jnp.sum(mask_BL * error_BL * error_BL)
