"""What the authors leave open is a field each, and each field does its part."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from taperjax import config as config_lib, gate, state, step
from taperjax.errors import UserError
from tests import tiny

OFF = {
  "taper__shape": "linear",
  "taper__calibrate": False,
  "taper__train_gain": False,
  "taper__scale_loss_schedule": "taper",
}


def first_steps(**changes):
  """(config, state, metrics) after a norm step, calibration and the taper."""
  config = tiny.config(
    model__num_layers=1, taper__start=0.1, taper__end=0.4, **changes
  )
  now = jax.jit(state.create, static_argnums=(0, 1))(config, 0)
  batch = np.asarray(tiny.tokens(length=tiny.L + 1)), tiny.mask()
  now, _ = step.make_train_step(config, gate.NORM)(now, *batch)
  now = step.make_calibrate(config)(now)
  begin = jax.device_get(now)
  now, metrics = step.make_train_step(config, gate.TAPER)(now, *batch)
  return config, begin, jax.device_get(now), jax.device_get(metrics)


@pytest.fixture(scope="module")
def runs():
  return first_steps(), first_steps(**OFF)


def test_without_calibration_every_factor_is_1(runs):
  """The target of the scale loss is measured as ever."""
  (_, paper, *_), (_, other, *_) = runs
  np.testing.assert_array_equal(other.taper.c, np.ones(3))
  assert np.all(np.abs(paper.taper.c - 1.0) > 0.1)
  assert other.taper.scale_target == paper.taper.scale_target > 0


def test_a_frozen_taper_gain_stays_and_the_other_gain_trains(runs):
  for frozen, (_, begin, end, _) in enumerate(runs):
    for name, norm in (
      ("attn", "attn_norm"), ("mlp", "mlp_norm"), ("final", "final_norm")
    ):
      where = [
        s.params[norm] if name == "final" else s.params["block_0"][norm]
        for s in (begin, end)
      ]
      same = np.array_equal(*(w["taper_scale"] for w in where))
      assert same == bool(frozen), norm
      assert not np.array_equal(*(w["scale"] for w in where)), norm


def test_the_gate_may_be_a_line(runs):
  """Step 2 of a taper from 1 to 4."""
  (config, *_), (*_, other) = runs
  assert (config.taper_steps.start, config.taper_steps.end) == (1, 4)
  assert other["gate"] == pytest.approx(2 / 3)


def test_the_weight_of_the_scale_loss_is_lambda_times_1_minus_g():
  """Nothing but the schedule differs, so the errors are the same."""
  constant, taper = (
    first_steps(taper__scale_loss_schedule=schedule)[-1]
    for schedule in ("constant", "taper")
  )
  assert constant["gate"] == taper["gate"] > 0.5
  assert taper["scale_loss"] == pytest.approx(
    constant["scale_loss"] * (1 - constant["gate"]), rel=1e-5
  )


@pytest.mark.parametrize(
  "changes, message",
  [
    ({"taper__shape": "sine"}, "taper.shape='sine' is not one of cosine, lin"),
    (
      {"taper__scale_loss_schedule": "g"},
      "taper.scale_loss_schedule='g' is not one of constant, taper",
    ),
    (
      {"taper__scale_loss_schedule": "taper", "variant": "fakeln"},
      "taper.scale_loss_schedule=taper has no effect with variant=fakeln",
    ),
  ],
)
def test_mistakes_in_ablations_are_one_line(changes, message):
  with pytest.raises(UserError, match=message):
    config_lib.parse(tiny.fields(**changes))


def test_a_run_saved_before_these_fields_is_the_paper_s():
  """Its config.json lacks them."""
  saved = config_lib.to_dict(tiny.config())
  for name in OFF:
    del saved["taper"][name.removeprefix("taper__")]
  assert config_lib.config_from_dict(saved) == tiny.config()


def test_the_logged_weight_follows_the_schedule():
  """The loop logs the pull of the scale loss with this very weight."""
  weight = step.scale_loss_weight
  assert weight(tiny.config().taper, 0.25) == 0.1
  config = tiny.config(taper__scale_loss_schedule="taper")
  assert weight(config.taper, 0.25) == pytest.approx(0.075)
