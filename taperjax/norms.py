"""RMSNorm, LayerNorm and their tapers: one function per equation.

Every function reduces in float32 and returns the caller's dtype. Axes: B batch,
L query length, D model width.
"""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp

from taperjax import gate as gate_lib


def rms_scale(h_BLD: jax.Array, eps: float) -> jax.Array:
  r"""Root-mean-square of each token, r(h) = sqrt(|h|^2 / D + eps).

  Source: arXiv:2602.10408 (v1), Eq. 2; eps sits inside the root.

  Args:
    h_BLD: residual stream, any float dtype; reduced in float32.
    eps: positive, same unit as h squared.

  Returns:
    r_BL1, float32, never below sqrt(eps).
  """
  h_BLD = h_BLD.astype(jnp.float32)
  return jnp.sqrt(jnp.mean(h_BLD * h_BLD, axis=-1, keepdims=True) + eps)


def center(h_BLD: jax.Array) -> jax.Array:
  """h - mean(h) over the width, in float32: the linear part of LayerNorm."""
  h_BLD = h_BLD.astype(jnp.float32)
  return h_BLD - jnp.mean(h_BLD, axis=-1, keepdims=True)


def layer_scale(h_BLD: jax.Array, eps: float) -> jax.Array:
  r"""Standard deviation of each token, sigma(h) = sqrt(var(h) + eps).

  Source: arXiv:2602.10408 (v1), Eq. 1. Returns sigma_BL1 in float32.
  """
  return rms_scale(center(h_BLD), eps)


def rms_norm(h_BLD: jax.Array, scale_D: jax.Array, eps: float) -> jax.Array:
  r"""RMSNorm, h / r(h) * gamma. Source: arXiv:2602.10408 (v1), Eq. 2."""
  unit_BLD = h_BLD.astype(jnp.float32) / rms_scale(h_BLD, eps)
  return (unit_BLD * scale_D[None, None, :]).astype(h_BLD.dtype)


def layer_norm(
  h_BLD: jax.Array, scale_D: jax.Array, bias_D: jax.Array, eps: float
) -> jax.Array:
  r"""LayerNorm, (h - mean) / sigma * gamma + beta. Eq. 1 of the paper."""
  unit_BLD = center(h_BLD) / layer_scale(h_BLD, eps)
  out_BLD = unit_BLD * scale_D[None, None, :] + bias_D[None, None, :]
  return out_BLD.astype(h_BLD.dtype)


def fixed_rms(
  h_BLD: jax.Array, taper_scale_D: jax.Array, c: jax.Array
) -> jax.Array:
  r"""The map that TaperNorm ends in, c * h * gamma~ (Eq. 3 at g = 0)."""
  out_BLD = h_BLD.astype(jnp.float32) * (c * taper_scale_D)[None, None, :]
  return out_BLD.astype(h_BLD.dtype)


def fixed_layer(
  h_BLD: jax.Array, taper_scale_D: jax.Array, bias_D: jax.Array, c: jax.Array
) -> jax.Array:
  r"""The map that TaperLN ends in, c (h - mean) gamma~ + beta (Eq. 6, g = 0).

  The centring stays: it is linear and folds into the next matrix.
  """
  out_BLD = center(h_BLD) * (c * taper_scale_D)[None, None, :]
  return (out_BLD + bias_D[None, None, :]).astype(h_BLD.dtype)


def taper_rms(
  h_BLD: jax.Array,
  scale_D: jax.Array,
  taper_scale_D: jax.Array,
  c: jax.Array,
  gate: jax.Array,
  eps: float,
) -> jax.Array:
  r"""TaperNorm, T(h; g) = g h / r(h) gamma + (1 - g) c h gamma~.

  Source: arXiv:2602.10408 (v1), Eq. 3.

  Args:
    h_BLD: residual stream.
    scale_D: gamma. taper_scale_D: gamma~. Both float32.
    c: calibrated factor of this site, float32 scalar, unit 1 / r.
    gate: g in [0, 1], float32 scalar, one for all sites and tokens.
    eps: inside the root of r.

  Returns:
    T_BLD in the dtype of h.
  """
  h32_BLD = h_BLD.astype(jnp.float32)
  norm_BLD = rms_norm(h32_BLD, scale_D, eps)
  fixed_BLD = fixed_rms(h32_BLD, taper_scale_D, c)
  return (gate * norm_BLD + (1.0 - gate) * fixed_BLD).astype(h_BLD.dtype)


def taper_layer(
  h_BLD: jax.Array,
  scale_D: jax.Array,
  taper_scale_D: jax.Array,
  bias_D: jax.Array,
  c: jax.Array,
  gate: jax.Array,
  eps: float,
) -> jax.Array:
  r"""TaperLN, beta + g (h - mean) / sigma gamma + (1 - g) c (h - mean) gamma~.

  Source: arXiv:2602.10408 (v1), Eq. 6 (appendix B): beta is one bias outside
  the gate, and the centring stays in the scale branch. Arguments as taper_rms.
  """
  centered_BLD = center(h_BLD)
  norm_BLD = centered_BLD / layer_scale(h_BLD, eps) * scale_D[None, None, :]
  fixed_BLD = centered_BLD * (c * taper_scale_D)[None, None, :]
  out_BLD = gate * norm_BLD + (1.0 - gate) * fixed_BLD + bias_D[None, None, :]
  return out_BLD.astype(h_BLD.dtype)


def calibration_sums(
  h_BLD: jax.Array,
  scale_D: jax.Array,
  mask_BL: jax.Array,
  kind: str,
  eps: float,
) -> tuple[jax.Array, jax.Array]:
  r"""Sums over tokens for c* = E[|h gamma|^2 / r] / E[|h gamma|^2].

  Source: arXiv:2602.10408 (v1), Eq. 4 (RMS) and Eq. 7 (LayerNorm, where h is
  centred and r is sigma). No gradient flows through them.

  Args:
    h_BLD: input of the norm. scale_D: its current gamma.
    mask_BL: weight of each token, 0 for padding.
    kind: "rms" or "layer". eps: inside the root.

  Returns:
    (numerator, denominator), float32 scalars, summed over the batch.
  """
  h_BLD, scale_D = jax.lax.stop_gradient((h_BLD, scale_D))
  x_BLD = h_BLD.astype(jnp.float32) if kind == "rms" else center(h_BLD)
  r_BL = rms_scale(x_BLD, eps)[..., 0]
  scaled_BLD = x_BLD * scale_D[None, None, :]
  square_BL = jnp.sum(scaled_BLD * scaled_BLD, axis=-1)
  mask_BL = mask_BL.astype(jnp.float32)
  return jnp.sum(mask_BL * square_BL / r_BL), jnp.sum(mask_BL * square_BL)


def phase_of(gate: float | jax.Array) -> str:
  """Branch to build: a Python 1.0 or 0.0 is fixed, an array needs both."""
  if isinstance(gate, int | float):
    if gate == 1:
      return gate_lib.NORM
    if gate == 0:
      return gate_lib.SCALE
  return gate_lib.TAPER


def token_kinds(
  tokens_BL: jax.Array, position_BL: jax.Array, eot_id: int | None
) -> jax.Array:
  """0 for a regular token, 1 at position 0, 2 for end of text; int32 (B, L)."""
  kind_BL = jnp.zeros(tokens_BL.shape, jnp.int32)
  if eot_id is not None:
    kind_BL = jnp.where(tokens_BL == eot_id, 2, kind_BL)
  return jnp.where(position_BL == 0, 1, kind_BL)


class FakeNorm(nn.Module):
  """A norm whose divisor is real, or frozen, for each input that it serves.

  Source: Baroni et al., arXiv:2507.02559: (h - mean) / s gamma + beta with s
  the standard deviation of the token, or a constant. RMSNorm likewise with
  r(h) and without mean and beta is ours.

  Attributes:
    kind: "rms" or "layer". eps: inside the root.
  """

  kind: str
  eps: float

  @nn.compact
  def __call__(
    self,
    h_BLD: jax.Array,
    c_R3: jax.Array,
    kind_BL: jax.Array,
    weight_BL2: jax.Array | None,
  ) -> tuple[list[jax.Array], jax.Array]:
    """Runs the norm once for each of its R readers.

    Args:
      h_BLD: residual stream.
      c_R3: 1 / s by reader and kind of token, 0 where the norm is real.
      kind_BL: from `token_kinds`.
      weight_BL2: weights of regular tokens and of position 0, or None.

    Returns:
      R streams, and the two weighted sums of s(h) over tokens, float32 (2,),
      zero without weights and without gradient.
    """
    width = h_BLD.shape[-1]
    scale_D = self.param("scale", nn.initializers.ones, (width,))
    x_BLD = h_BLD.astype(jnp.float32)
    if self.kind == "layer":
      bias_D = self.param("bias", nn.initializers.zeros, (width,))
      x_BLD = center(h_BLD)
    s_BL1 = rms_scale(x_BLD, self.eps)
    sums_2 = jnp.zeros((2,), jnp.float32)
    if weight_BL2 is not None:
      sums_2 = jnp.sum(
        weight_BL2 * jax.lax.stop_gradient(s_BL1), axis=(0, 1)
      )
    outs = []
    for c_3 in c_R3:
      c_BL1 = c_3[kind_BL][..., None]
      unit_BLD = x_BLD * jnp.where(c_BL1 > 0, c_BL1, 1.0 / s_BL1)
      out_BLD = unit_BLD * scale_D[None, None, :]
      if self.kind == "layer":
        out_BLD = out_BLD + bias_D[None, None, :]
      outs.append(out_BLD.astype(h_BLD.dtype))
    return outs, sums_2


class Norm(nn.Module):
  """One norm site: plain, tapered, or absent after folding.

  Attributes:
    kind: "rms" or "layer".
    mode: "norm" (never tapered), "taper" or "none" (the identity: folded).
    eps: inside the root.
    phase: branch that is built when tapered; see `phase_of`.
  """

  kind: str
  mode: str
  eps: float
  phase: str

  @nn.compact
  def __call__(
    self, h_BLD: jax.Array, gate, c: jax.Array, mask_BL: jax.Array | None
  ) -> tuple[jax.Array, jax.Array]:
    """Returns the normalized stream and the site's two calibration sums.

    The gate is a float32 scalar, or a bool: the norm, or its fixed map. A
    tapered site collects the sums when `mask_BL` is given, but not in the scale
    phase; they are zero elsewhere.
    """
    sums_2 = jnp.zeros((2,), jnp.float32)
    if self.mode == "none":
      return h_BLD, sums_2
    width = h_BLD.shape[-1]
    layer = self.kind == "layer"
    scale_D = self.param("scale", nn.initializers.ones, (width,))
    bias_D = None
    if layer:
      bias_D = self.param("bias", nn.initializers.zeros, (width,))
    phase = gate_lib.NORM
    if self.mode == "taper":
      taper_scale_D = self.param("taper_scale", nn.initializers.ones, (width,))
      phase = self.phase
      if phase != gate_lib.SCALE and mask_BL is not None:
        sums = calibration_sums(h_BLD, scale_D, mask_BL, self.kind, self.eps)
        sums_2 = jnp.stack(sums)

    def plain():
      if layer:
        return layer_norm(h_BLD, scale_D, bias_D, self.eps)
      return rms_norm(h_BLD, scale_D, self.eps)

    def fixed():
      if layer:
        return fixed_layer(h_BLD, taper_scale_D, bias_D, c)
      return fixed_rms(h_BLD, taper_scale_D, c)

    if phase == gate_lib.NORM:
      return plain(), sums_2
    if phase == gate_lib.SCALE:
      return fixed(), sums_2
    if jnp.issubdtype(jnp.result_type(gate), jnp.bool_):
      return jnp.where(gate, plain(), fixed()), sums_2
    if layer:
      out_BLD = taper_layer(
        h_BLD, scale_D, taper_scale_D, bias_D, c, gate, self.eps
      )
      return out_BLD, sums_2
    return taper_rms(
      h_BLD, scale_D, taper_scale_D, c, gate, self.eps
    ), sums_2
