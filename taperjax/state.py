"""The train state: one step counter, one gate, one tree."""

from __future__ import annotations

import flax.struct
import jax
import jax.numpy as jnp
import optax

from taperjax import calibration, gate, model, optimizer
from taperjax.config import Config


@flax.struct.dataclass
class TrainState:
  """All that a step reads and writes.

  Attributes:
    step: optimizer steps done, int32.
    params: float32 parameters.
    opt_state: optax state.
    gate: gate of the last step, float32; 1 before the first.
    taper: statistics, c and s_tgt; see `calibration.TaperState`.
    key: root of all randomness; folded with the step, never advanced.
  """

  step: jax.Array
  params: dict
  opt_state: optax.OptState
  gate: jax.Array
  taper: calibration.TaperState
  key: jax.Array


def make_tx(config: Config) -> optax.GradientTransformation:
  """The optimizer of a run."""
  return optimizer.make_optimizer(config.optimizer, make_schedule(config))


def make_schedule(config: Config) -> optax.Schedule:
  """The learning rate of a run, a function of the step from 1."""
  opt = config.optimizer
  return gate.learning_rate(
    opt.learning_rate,
    opt.final_learning_rate,
    config.warmup_steps,
    config.steps,
  )


def create(config: Config, seed: int) -> TrainState:
  """A fresh state; jit it (`jax.jit(create, static_argnums=0)`)."""
  key = jax.random.key(seed)
  params = model.init_params(config.model, jax.random.fold_in(key, 0))
  return TrainState(
    step=jnp.zeros((), jnp.int32),
    params=params,
    opt_state=make_tx(config).init(params),
    gate=jnp.ones((), jnp.float32),
    taper=calibration.init(2 * config.model.num_layers + 1),
    key=key,
  )


def abstract(config: Config) -> TrainState:
  """Shapes and dtypes of the state, without any array."""
  return jax.eval_shape(lambda: create(config, 0))
