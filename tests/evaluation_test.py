"""The mean over tokens, not over batches, and bytes of the scored text only."""

from __future__ import annotations

import math

import numpy as np
import pytest

from taperjax import evaluation


def scripted(sums):
  """An eval step that hands out sums, and notes how it was called."""
  left, calls = list(sums), []

  def step(params, c, gate, tokens_BL1, mask_BL):
    calls.append((params, c, gate))
    nll, tokens = left.pop(0)
    return {
      "nll": np.float32(nll),
      "tokens": np.float32(tokens),
      "scale": np.float32(2 * tokens),
      "logit_norm": np.float32(3 * tokens),
    }

  return step, calls


def batch(ids, mask):
  return np.array([ids], np.int32), np.array([mask], np.float32)


BATCHES = (
  batch([0, 1, 2, 3], [1, 1, 1]),
  batch([3, 2, 1, 0], [1, 0, 0]),
)


def test_loss_is_a_token_mean_over_batches_of_unequal_weight():
  """A mean of batch means would give (2 + 4) / 2."""
  step, calls = scripted([(6.0, 3), (4.0, 1)])
  found = evaluation.evaluate(step, "params", BATCHES, c="c", gate=0.25)
  assert found == {
    "loss": 2.5,
    "bits_per_byte": None,
    "tokens": 4,
    "mean_scale": 2.0,
    "logit_norm": 3.0,
  }
  assert calls == [("params", "c", 0.25)] * 2


def test_bits_per_byte_counts_bytes_of_scored_targets_only():
  """Neither the first token nor padding; end of text is scored, without bytes.

  Targets 1, 2, 3 and 2 of 10, 100, 0 and 100 bytes: id 3 ends a text.
  """
  step, _ = scripted([(6.0, 3), (4.0, 1)])
  found = evaluation.evaluate(
    step,
    None,
    BATCHES,
    c=None,
    gate=1.0,
    id_bytes=np.array([1, 10, 100, 0], np.int32),
  )
  assert found["bits_per_byte"] == pytest.approx(10.0 / math.log(2) / 210)


def test_sums_are_added_in_float64():
  """In float32 a small batch after 2^24 nats would vanish."""
  step, _ = scripted([(2.0**24, 1), (1.0, 1)])
  found = evaluation.evaluate(step, None, BATCHES, c=None, gate=1.0)
  assert found["loss"] == (2.0**24 + 1) / 2


def test_no_text_has_no_bits_per_byte_and_nothing_scored_is_an_error():
  """A division by zero would be NaN in a JSON file."""
  step, _ = scripted([(1.0, 1)])
  found = evaluation.evaluate(
    step, None, BATCHES[:1], c=None, gate=1.0, id_bytes=np.zeros(4, np.int32)
  )
  assert found["bits_per_byte"] is None
  for batches, sums in (((), []), (BATCHES[:1], [(0.0, 0)])):
    step, _ = scripted(sums)
    with pytest.raises(ValueError, match="nothing to evaluate"):
      evaluation.evaluate(step, None, batches, c=None, gate=1.0)
