"""The gate, the phase and the learning rate as functions of the step.

Steps are counted from 1: step k runs for k = 1..N, and everything here takes
k = state.step + 1, so one counter rules all three.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import optax

NORM, TAPER, SCALE = "norm", "taper", "scale"


@dataclasses.dataclass(frozen=True)
class TaperSteps:
  """Where the taper lies, in steps.

  Attributes:
    start: taper start k_s, the last step of the norm phase; calibration
      follows it.
    end: k_e, the first step with gate 0.
    shape: of the gate between them, see `gate`.
  """

  start: int
  end: int
  shape: str = "cosine"


def gate(step: jax.Array, taper: TaperSteps) -> jax.Array:
  r"""Gate g of step k: 1, then half a cosine, then 0.

  g(k) = 1 for k <= k_s; (1 + cos(pi (k - k_s) / (k_e - k_s))) / 2 between;
  0 for k >= k_e. Source: arXiv:2602.10408 (v1), section 3.3. Shapes of ours
  beside the cosine: "linear", (k_e - k) / (k_e - k_s), and "step", 1 for
  k < k_e.

  Args:
    step: k >= 1, integer.
    taper: k_s and k_e with k_s < k_e.

  Returns:
    g, float32 scalar, exactly 1 and exactly 0 at the ends.
  """
  done = (step - taper.start) / (taper.end - taper.start)
  done = jnp.clip(jnp.float32(done), 0.0, 1.0)
  between = {
    "cosine": 0.5 * (1.0 + jnp.cos(jnp.pi * done)),
    "linear": 1.0 - done,
    "step": 1.0,
  }[taper.shape]
  return jnp.where(done <= 0.0, 1.0, jnp.where(done >= 1.0, 0.0, between))


def phase(step: int, taper: TaperSteps | None) -> str:
  """Which of the three compiled steps serves step k; None means no taper."""
  if taper is None or step <= taper.start:
    return NORM
  return TAPER if step < taper.end else SCALE


@dataclasses.dataclass(frozen=True)
class CutSteps:
  """Where the hard cuts of a FakeLN run lie, as last steps before each.

  Attributes:
    sites: last step with the real norm, by site in the order of
      `fakeln.site_names`.
    eot: last step with the special treatment of end-of-text tokens.
    position0: the same for position 0; nothing is left to do after it.
  """

  sites: tuple[int, ...]
  eot: int
  position0: int


def cut_steps(
  num_layers: int,
  start: int,
  gap_mlp: int,
  gap_qk: int,
  gap_v: int,
  eot_after: int,
  position0_after: int,
) -> CutSteps:
  """The cuts in the order of Baroni et al., arXiv:2507.02559.

  Block after block: all MLP norms, one every `gap_mlp` steps from `start`; then
  the query and key input of all attention norms; then their value input; then
  the final norm; then the two special treatments. All arguments but the first
  are in steps.
  """
  qk = start + num_layers * gap_mlp
  v = qk + num_layers * gap_qk
  final = v + num_layers * gap_v
  sites = []
  for n in range(num_layers):
    sites += [qk + n * gap_qk, v + n * gap_v, start + n * gap_mlp]
  eot = final + eot_after
  return CutSteps((*sites, final), eot, eot + position0_after)


def cut_gate(step: jax.Array, cuts: CutSteps) -> jax.Array:
  """Share of the cuts and endings that are still to come, at step k.

  float32 scalar; exactly 1 before the first, exactly 0 after the last.
  """
  last = jnp.array((*cuts.sites, cuts.eot, cuts.position0))
  return jnp.mean((step <= last).astype(jnp.float32))


def learning_rate(
  peak: float, final: float, warmup_steps: int, total_steps: int
) -> optax.Schedule:
  """Linear warm-up to `peak` at step k = warmup_steps, then cosine to `final`.

  Source: arXiv:2602.10408 (v1), section 5.1: the rate reaches `final` at the
  last step. The schedule takes k, counted from 1.
  """

  def schedule(step):
    step = jnp.float32(step)
    warm = step / max(warmup_steps, 1)
    span = max(total_steps - warmup_steps, 1)
    done = jnp.clip((step - warmup_steps) / span, 0.0, 1.0)
    cosine = final + (peak - final) * 0.5 * (1.0 + jnp.cos(jnp.pi * done))
    return jnp.where(step < warmup_steps, peak * warm, cosine)

  return schedule
