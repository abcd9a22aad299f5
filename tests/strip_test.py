"""Norms stripped from a real trained model, and controls that must fail."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from taperjax import (
  config as config_lib,
  folding,
  gate as gate_lib,
  model as model_lib,
  state as state_lib,
  step,
)
from tests import nano_sort, tiny

BATCH = 64
# (steps, rate), fixed: the promise is about these. A random model learns to
# sort within 200 steps, so the control has the shorter budget.
SHORT, LONG = (40, 5e-4), (200, 1e-3)


def run_config(initial, variant, budget):
  """Fine-tuning: gate 1 for a tenth of the steps, 0 from six tenths."""
  steps, rate = budget
  fields = tiny.fields(
    variant=variant, steps=steps, batch_size=BATCH, norm=None, context_len=None,
    taper__start=0.1, taper__end=0.6, init__checkpoint="gpt-nano-sort",
    data__tokenizer="init", data__vocab_size=None,
    optimizer__learning_rate=rate, optimizer__final_learning_rate=rate / 10,
    optimizer__warmup=0.05,
  )
  fields["model"] = dict.fromkeys(fields["model"])
  return config_lib.parse(fields, initial)


def finetune(config, params):
  """(params, c) after the run at gate 0."""
  state = jax.jit(state_lib.create, static_argnums=(0, 1))(config, 0, params)
  steps = {}
  for k in range(1, config.steps + 1):
    phase = gate_lib.phase(k, config.taper_steps)
    if phase not in steps:
      steps[phase] = step.make_train_step(config, phase)
    state, _ = steps[phase](state, *nano_sort.batch(0, k, BATCH))
    if k == config.taper_steps.start:
      state = step.make_calibrate(config)(state)
  assert float(state.gate) == 0.0
  return jax.device_get((state.params, state.taper.c))


@pytest.fixture(scope="module")
def sorter(test_data):
  return nano_sort.read(test_data)[0]


@pytest.mark.parametrize(
  "variant, budget", [("internal_aux", SHORT), ("all_aux", LONG)]
)
def test_a_real_model_still_sorts_without_its_norms(sorter, variant, budget):
  """At least 727 of 729; folded it is the same function."""
  config = run_config(sorter.config, variant, budget)
  params, c = finetune(config, sorter.params)
  assert nano_sort.sorted_inputs(params, c, 0.0, config.model) >= 727
  folded, folded_config = folding.fold(params, c, config.model)
  assert nano_sort.sorted_inputs(folded, c, 1.0, folded_config) >= 727
  tokens_BL = jnp.asarray(nano_sort.batch(1, 0, 729)[0][:, :-1])
  apply = lambda params, config, gate: model_lib.Transformer(config).apply(
    {"params": params}, tokens_BL, gate=gate, c=jnp.asarray(c)
  )[0]
  want = np.asarray(apply(params, config.model, 0.0))
  got = np.asarray(apply(folded, folded_config, 1.0))
  assert np.abs(got - want).max() <= 1e-5 * max(1.0, np.abs(want).max())


def test_norms_dropped_without_a_taper_sort_next_to_nothing(sorter):
  """The control: gains and biases kept, the normalization gone; 60 of 729."""
  tapered = sorter.config.replace(internal_norm="taper", final_norm="taper")
  params = model_lib.add_tapers(sorter.params, tapered)
  ones = np.ones(2 * tapered.num_layers + 1, np.float32)
  assert 40 <= nano_sort.sorted_inputs(params, ones, 0.0, tapered) <= 80


def test_a_random_model_with_the_same_budget_stays_far_below(sorter):
  """The control: what these steps teach without the trained weights."""
  config = run_config(sorter.config, "internal_aux", SHORT)
  fresh = model_lib.init_params(sorter.config, jax.random.key(0))
  params, c = finetune(config, fresh)
  assert nano_sort.sorted_inputs(params, c, 0.0, config.model) < 600
