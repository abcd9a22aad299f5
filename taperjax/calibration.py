"""Statistics of the norms, their moving averages, and the solve for c.

S is the number of norm sites: two for each block in order (attention, MLP),
then the final one. Sites that are not tapered keep zeros.
"""

from __future__ import annotations

import flax.struct
import jax
import jax.numpy as jnp

# Added to the denominator of c*; its value is not in the paper. Ours: far below
# E|h gamma|^2, which is at least about 1e-2 at initialization.
CALIBRATION_EPS = 1e-12


@flax.struct.dataclass
class TaperState:
  """What calibration knows; never a parameter, no gradient, no decay.

  Attributes:
    num: moving average of E|h gamma|^2 / r by site, float32 (S,).
    den: moving average of E|h gamma|^2 by site, float32 (S,).
    scale: moving average of the mean s(h) before the final norm, float32.
    count: number of samples in the averages, int32.
    c: calibrated factors, zero before calibration, float32 (S,).
    scale_target: s_tgt, zero before calibration, float32.
  """

  num: jax.Array
  den: jax.Array
  scale: jax.Array
  count: jax.Array
  c: jax.Array
  scale_target: jax.Array


def init(num_sites: int) -> TaperState:
  """A state without samples."""
  zeros = lambda: jnp.zeros((num_sites,), jnp.float32)  # one buffer each
  return TaperState(
    num=zeros(),
    den=zeros(),
    scale=jnp.zeros((), jnp.float32),
    count=jnp.zeros((), jnp.int32),
    c=zeros(),
    scale_target=jnp.zeros((), jnp.float32),
  )


def update(
  taper: TaperState,
  num_S: jax.Array,
  den_S: jax.Array,
  scale: jax.Array,
  rate: float,
) -> TaperState:
  r"""One sample into the moving averages, s <- (1 - mu) s + mu x.

  Source: arXiv:2602.10408 (v1), appendix A.6: mu is the weight of the new
  sample. Call once for each optimizer step.

  Args:
    taper: state so far.
    num_S, den_S: token means of |h gamma|^2 / r and |h gamma|^2 by site.
    scale: token mean of s(h).
    rate: mu in (0, 1].
  """
  mix = lambda old, new: (1.0 - rate) * old + rate * new
  return taper.replace(
    num=mix(taper.num, num_S),
    den=mix(taper.den, den_S),
    scale=mix(taper.scale, scale),
    count=taper.count + 1,
  )


def solve(taper: TaperState, rate: float, unit: bool = False) -> TaperState:
  r"""Freezes c = num^ / (den^ + delta) and s_tgt from bias-corrected averages.

  Source: arXiv:2602.10408 (v1), appendix A.6: s^ = s / (1 - (1 - mu)^n).
  `unit` is an ablation: c = 1 at every tapered site.
  """
  share = 1.0 - (1.0 - rate) ** taper.count.astype(jnp.float32)
  c_S = (taper.num / share) / (taper.den / share + CALIBRATION_EPS)
  if unit:
    c_S = (c_S > 0).astype(jnp.float32)
  return taper.replace(c=c_S, scale_target=taper.scale / share)


def copy_gains(params: dict) -> dict:
  """gamma~ <- gamma at every tapered norm (taper start, section 3.3)."""
  if "taper_scale" in params:
    # A copy: the same buffer twice could not be donated.
    return {**params, "taper_scale": jnp.copy(params["scale"])}
  return {
    name: copy_gains(value) if isinstance(value, dict) else value
    for name, value in params.items()
  }


def freeze_gains(params: dict) -> dict:
  """The same tree, without a gradient to any gamma~; an ablation."""
  return jax.tree_util.tree_map_with_path(
    lambda path, leaf: jax.lax.stop_gradient(leaf)
    if path[-1].key == "taper_scale"
    else leaf,
    params,
  )
