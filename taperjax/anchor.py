"""What pulls the residual stream outward at the head, and what holds it.

The radial gradient <dl/dh, h> of a token's loss tells how a step h - eta dl/dh
changes |h|: below 0 it grows, above 0 it shrinks. Source of the propositions:
arXiv:2602.10408 (v1), section 4 and appendix A. All of them are about the
pre-logit stream, the residual stream before the final norm.

Axes: T tokens (B and L flattened), V vocabulary, D width, N layers, S sites.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from taperjax import model, norms
from taperjax.config import ModelConfig

CHUNK = 256  # tokens whose logits are held at once


def radial(grad_TD: jax.Array, h_TD: jax.Array) -> jax.Array:
  """<dl/dh, h> of each token, (T,); nats for a loss in nats."""
  return jnp.sum(grad_TD * h_TD, axis=-1)


def norm_radial(
  radial_T: jax.Array, scale_T: jax.Array, eps: float
) -> jax.Array:
  r"""<dl/dh, h> before a norm, (eps / s^2) <dl/dz, z> of z behind it, (T,).

  Source: Prop. 4.1, which is its limit of 0 at eps = 0. For RMSNorm with any
  gain, and LayerNorm without bias; with one, beta is to be taken off z.

  Args:
    radial_T: <dl/dz, z> of the output, or of logits linear in it.
    scale_T: s(h), r or sigma of the input with eps in the root.
    eps: that of the norm.
  """
  return eps / (scale_T * scale_T) * radial_T


def logit_radial(z_TV: jax.Array, target_T: jax.Array) -> jax.Array:
  r"""<dl/dz, z> = E_p[z] - z_y of the cross-entropy of each token, (T,).

  Source: Prop. 4.2. It is <dl/dh, h> for every linear map from h to z.

  Args:
    z_TV: logits. target_T: next-token ids y.
  """
  return _pull(z_TV, z_TV, target_T)


def margin(z_TV: jax.Array, target_T: jax.Array) -> jax.Array:
  """m = z_y - max of the other logits, (T,); above 0 where y is predicted."""
  is_target_TV = jax.nn.one_hot(target_T, z_TV.shape[-1], dtype=bool)
  others_TV = jnp.where(is_target_TV, -jnp.inf, z_TV)
  return _pick(z_TV, target_T) - jnp.max(others_TV, axis=-1)


def radial_bound(z_TV: jax.Array, target_T: jax.Array) -> jax.Array:
  r"""-(1 - p_y) m, which <dl/dz, z> never exceeds, (T,).

  Source: Prop. 4.2. It holds for every margin m, and where m > 0 it is below 0:
  the step of a predicted token grows |h|.
  """
  logp_TV = jax.nn.log_softmax(z_TV)
  return jnp.expm1(_pick(logp_TV, target_T)) * margin(z_TV, target_T)


def scale_radial(
  h_TD: jax.Array, scale_T: jax.Array, scale_target: jax.Array, weight: float
) -> jax.Array:
  r"""<dl/dh, h> of l = lambda (s(h) - s_tgt)^2 of each token, (T,).

  2 lambda (s - s_tgt) |h|^2 / (D s): above 0, so inward, where s > s_tgt.
  Source: Prop. 4.3, and appendix A.4 for LayerNorm.

  Args:
    h_TD: the stream; of LayerNorm the centred one, h - mean.
    scale_T: its s(h), r or sigma, eps in the root.
    scale_target: s_tgt. weight: lambda.
  """
  error_T = scale_T - scale_target
  mean_T = jnp.mean(h_TD * h_TD, axis=-1)
  return 2.0 * weight * error_T * mean_T / scale_T


def make_anchor(config: ModelConfig) -> Callable[..., dict[str, jax.Array]]:
  """Measures the radial gradients of one batch.

  The blocks run forward once and are not differentiated. Final norm and head
  are, in float32 whatever the compute dtype, along h alone: <dl/dh, h> is the
  derivative of l at (1 + t) h in t, one more product with the head.

  Returns:
    anchor(params, c_S, gate, scale_target, scale_loss_weight, tokens_BL1,
    mask_BL) -> dict of float32 scalars, token means weighted by the mask. Each
    token's loss is its own, in nats, not divided by the number of tokens:
    radial_ce, of the cross-entropy; radial_scale, of the scale loss (0 where
    its weight is); radial, their sum; margin; margin_share, the share of tokens
    with a margin above 0; and residual_rms, (N + 1,), the root of the mean
    |h|^2 / D before the first block and behind each, the pre-logit stream last.

    Jitted, one program for every gate. c_S as for `model.Transformer`.
  """

  def anchor(
    params, c_S, gate, scale_target, scale_loss_weight, tokens_BL1, mask_BL
  ):
    tokens_BL = tokens_BL1[:, :-1]
    h_BLD, aux = model.Transformer(config).apply(
      {"params": params}, tokens_BL, gate=gate, c=c_S, output="stream"
    )
    position_BL = jnp.broadcast_to(
      jnp.arange(tokens_BL.shape[1])[None, :], tokens_BL.shape
    )
    kind_BL = norms.token_kinds(tokens_BL, position_BL, config.eot_id)
    h_TD = h_BLD.reshape(-1, config.embed_dim).astype(jnp.float32)
    head = model.head_weights(params, config)
    to_logits = _final(config, params, c_S, gate, *head)

    def token(parts):
      h_D, target, kind = parts
      z_V, along_V = jax.jvp(lambda x: to_logits(x, kind), (h_D,), (h_D,))
      return _pull(z_V, along_V, target), margin(z_V, target)

    targets = tokens_BL1[:, 1:].reshape(-1)
    parts = (h_TD, targets, kind_BL.reshape(-1))
    ce_T, margin_T = jax.lax.map(token, parts, batch_size=CHUNK)
    x_TD = norms.center(h_TD) if config.norm == "layer" else h_TD
    scale_T = norms.rms_scale(x_TD, config.norm_eps)[:, 0]
    scale_T = scale_radial(x_TD, scale_T, scale_target, scale_loss_weight)
    weight_T = mask_BL.reshape(-1).astype(jnp.float32)

    def mean(x_T):  # what stands on padding counts nowhere, even if NaN
      total = jnp.sum(jnp.where(weight_T > 0, weight_T * x_T, 0.0))
      return total / jnp.sum(weight_T)

    square_NT = aux["square_NBL"].reshape(-1, weight_T.size)
    return {
      "radial_ce": mean(ce_T),
      "radial_scale": mean(scale_T),
      "radial": mean(ce_T + scale_T),
      "margin": mean(margin_T),
      "margin_share": mean((margin_T > 0).astype(jnp.float32)),
      "residual_rms": jnp.sqrt(jax.vmap(mean)(square_NT)),
    }

  return jax.jit(anchor)


def _final(config, params, c, gate, kernel_DV, bias_V):
  """Final norm and head of one token, h_D and its kind to logits_V."""
  variables = {"params": params.get("final_norm", {})}
  kind, eps = config.norm, config.norm_eps

  def to_logits(h_D, token_kind):
    h_BLD = h_D[None, None, :]
    if config.final_norm == "fake":
      site = norms.FakeNorm(kind, eps)
      kind_BL = token_kind[None, None]
      x_BLD = site.apply(variables, h_BLD, c[-1:], kind_BL, None)[0][0]
    else:
      tapered = "taper" in config.modes
      phase = norms.phase_of(gate if tapered else 1.0)
      c_final = None if c is None else c[-1]
      site = norms.Norm(kind, config.final_norm, eps, phase)
      x_BLD = site.apply(variables, h_BLD, gate, c_final, None)[0]
    z_V = jnp.dot(x_BLD[0, 0], kernel_DV)
    return z_V if bias_V is None else z_V + bias_V

  return to_logits


def _pick(x_TV, target_T):
  return jnp.take_along_axis(x_TV, target_T[..., None], axis=-1)[..., 0]


def _pull(z_TV, x_TV, target_T):
  """<dl/dz, x> = E_p[x] - x_y, by x - x_y, which loses little where p_y is 1.

  The T axis may be missing.
  """
  gap_TV = x_TV - _pick(x_TV, target_T)[..., None]
  return jnp.sum(jax.nn.softmax(z_TV) * gap_TV, axis=-1)
