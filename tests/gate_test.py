"""The gate, the phases and the learning rate, at and around every boundary."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from taperjax import gate as gate_lib
from taperjax.gate import TaperSteps

# Start and end of the taper: a short run with a plateau, the paper's two
# TinyStories extremes (section 5.1) and GPT-2 XL (appendix D).
SCHEDULES = [
  TaperSteps(4, 8),
  TaperSteps(25_000, 500_000),
  TaperSteps(50_000, 1_000_000),
  TaperSteps(50, 700),
]
gates = jax.jit(gate_lib.gate, static_argnums=1)


@pytest.mark.parametrize("taper", SCHEDULES)
def test_gate_is_exactly_one_through_taper_start_and_exactly_zero_from_end(
  taper,
):
  """Exact ends make g = 1 the plain model and leave no statistic at g = 0."""
  first = jnp.array([1, 2, taper.start - 1, taper.start], jnp.int32)
  assert gates(first, taper).tolist() == [1.0] * 4
  last = jnp.array([taper.end, taper.end + 1, 1_000_000, 10**9], jnp.int32)
  assert gates(last, taper).tolist() == [0.0] * 4


@pytest.mark.parametrize("taper", SCHEDULES)
def test_gate_is_half_a_cosine_between(taper):
  """The formula of section 3.3 again, in float64 numpy.

  The tolerance is three float32 roundings of a number near 1.
  """
  steps = np.unique(np.linspace(taper.start, taper.end, 97).astype(int))
  done = (steps - taper.start) / (taper.end - taper.start)
  expected = (1.0 + np.cos(np.pi * done)) / 2.0
  got = gates(jnp.asarray(steps, jnp.int32), taper)
  assert got.dtype == jnp.float32
  np.testing.assert_allclose(got, expected, rtol=0, atol=2e-7)


def test_gate_never_rises_and_leaves_both_ends_at_once():
  """Step k_s + 1 is the first below 1, step k_e - 1 the last above 0."""
  values = np.asarray(gates(jnp.arange(1, 12), TaperSteps(4, 8)))
  assert np.all(np.diff(values) <= 0)
  inside = values[4:7]  # steps 5, 6, 7
  assert np.all((inside > 0) & (inside < 1))
  assert np.all(np.diff(values[3:8]) < 0)


def test_gate_of_a_long_run_never_rises():
  """In a million steps neighbours differ by less than a float32 rounding."""
  taper = SCHEDULES[2]
  for start in (49_990, 300_000, 525_000, 999_000):
    values = np.asarray(gates(jnp.arange(start, start + 2_000), taper))
    # One rounding of 1 + cos, halved, is what a neighbour may rise by.
    assert np.all(np.diff(values) <= 6e-8)
    assert values[-1] < values[0]


@pytest.mark.parametrize(
  "step, expected",
  [
    (1, "norm"),
    (4, "norm"),
    (5, "taper"),
    (7, "taper"),
    (8, "scale"),
    (9, "scale"),
    (1_000_000, "scale"),
  ],
)
def test_phase_changes_after_start_and_at_end(step, expected):
  """k_s still collects statistics; k_e already runs without any."""
  assert gate_lib.phase(step, TaperSteps(4, 8)) == expected


def test_a_run_without_taper_stays_in_the_norm_phase():
  """The baseline has one compiled step."""
  assert {gate_lib.phase(k, None) for k in (1, 5, 10**6)} == {"norm"}


def test_phase_and_gate_agree_at_every_step():
  """The host picks the phase, the device the gate, from one counter."""
  taper = TaperSteps(4, 8)
  values = gates(jnp.arange(1, 13), taper).tolist()
  for k, g in enumerate(values, start=1):
    phase = gate_lib.phase(k, taper)
    assert phase == {1.0: "norm", 0.0: "scale"}.get(g, "taper"), k


def test_one_step_taper_goes_from_one_to_zero():
  """The shortest taper the config allows has no step between."""
  taper = TaperSteps(1, 2)
  assert gates(jnp.array([1, 2]), taper).tolist() == [1.0, 0.0]
  assert gate_lib.phase(2, taper) == "scale"


@pytest.mark.parametrize(
  "warmup, total, step, expected",
  [
    (5, 20, 1, 0.2),  # linear from the first step on: never a rate of 0
    (5, 20, 4, 0.8),
    (5, 20, 5, 1.0),  # the peak is at k = warmup_steps
    (5, 20, 20, 0.1),  # and the final rate at the last step
    (5, 20, 25, 0.1),
    (0, 20, 0, 1.0),
    (0, 20, 20, 0.1),
    (1, 20, 1, 1.0),
    (20, 20, 20, 1.0),  # all warm-up
    (25_000, 500_000, 25_000, 1.0),
    (25_000, 500_000, 500_000, 0.1),
  ],
)
def test_learning_rate_boundaries(warmup, total, step, expected):
  """Exact at the ends to a float32 rounding of the product with the peak."""
  peak = 3e-4
  rate = gate_lib.learning_rate(peak, 0.1 * peak, warmup, total)
  np.testing.assert_allclose(rate(step), expected * peak, rtol=2e-7)


def test_learning_rate_reaches_exactly_zero():
  """The paper's rate ends at 0, not near it."""
  assert gate_lib.learning_rate(3e-4, 0.0, 5, 20)(20) == 0.0


def test_learning_rate_is_half_a_cosine_after_warm_up():
  """Section 5.1 written out again in float64."""
  rate = gate_lib.learning_rate(3e-4, 1e-5, 50, 1_000)
  steps = np.arange(50, 1_001, 19)
  done = (steps - 50) / 950
  expected = 1e-5 + (3e-4 - 1e-5) * (1 + np.cos(np.pi * done)) / 2
  got = [float(rate(jnp.int32(k))) for k in steps]
  # Relative to the peak: near the end the cosine cancels against 1.
  np.testing.assert_allclose(got, expected, rtol=0, atol=3e-7 * 3e-4)


@pytest.mark.parametrize(
  "shape, expected",
  [
    ("linear", [1, 1, 0.75, 0.5, 0.25, 0, 0]),
    ("step", [1, 1, 1, 1, 1, 0, 0]),
  ],
)
def test_other_shapes_have_the_same_ends(shape, expected):
  """Ablations: a straight line, and a hard cut at k_e."""
  values = gates(jnp.arange(3, 10), TaperSteps(4, 8, shape))
  assert values.tolist() == expected
