"""The train state: one step counter, one gate, one tree."""

from __future__ import annotations

import dataclasses

import flax.struct
import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from taperjax import (
  calibration,
  fakeln,
  gate,
  lora,
  model,
  optimizer,
  sharding,
)
from taperjax.config import Config


@flax.struct.dataclass
class TrainState:
  """All that a step reads and writes.

  Attributes:
    step: optimizer steps done, int32.
    params: float32 parameters; with adapters a branch more, see `lora`.
    opt_state: optax state.
    gate: gate of the last step, float32; 1 before the first.
    taper: statistics, c and s_tgt; see `calibration.TaperState`, and
      `fakeln.FakeState` of a FakeLN run.
    key: root of all randomness; folded with the step, never advanced.
  """

  step: jax.Array
  params: dict
  opt_state: optax.OptState
  gate: jax.Array
  taper: calibration.TaperState | fakeln.FakeState
  key: jax.Array


@flax.struct.dataclass
class SeedStates(TrainState):
  """The states of several seeds: every leaf has a leading axis S.

  Attributes:
    diverged: int32 (S,): the step whose loss or gradient was not finite, where
      the seed is frozen as it was before that step, or whose evaluation was
      not, where it is frozen as it was behind it. 0 where the seed goes on.
  """

  diverged: jax.Array


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


def create(
  config: Config, seed: int | jax.Array, initial: dict | None = None
) -> TrainState:
  """A fresh state; jit it (`jax.jit(create, static_argnums=(0, 1))`).

  Args:
    config: of the run. seed: root of all randomness.
    initial: parameters of a model without tapers to start from; those of
      `config.model` are drawn when it is left out.
  """
  key = jax.random.key(seed)
  if initial is None:
    params = model.init_params(config.model, jax.random.fold_in(key, 0))
  else:
    params = model.add_tapers(initial, config.model)
    if config.model.scan_layers:
      params = model.stack_layers(params, config.model)
  if config.lora.rank:
    adapters = lora.init(params, config.lora, jax.random.fold_in(key, 1))
    params = {**params, lora.BRANCH: adapters}
  return TrainState(
    step=jnp.zeros((), jnp.int32),
    params=params,
    opt_state=make_tx(config).init(lora.split(params)[0]),
    gate=jnp.ones((), jnp.float32),
    taper=statistics(config),
    key=key,
  )


def create_seeds(config: Config, initial: dict | None = None) -> SeedStates:
  """`create` for every seed of the config; jit it with the config static."""
  seeds_S = jnp.asarray(config.seeds, jnp.int32)
  states = jax.vmap(lambda seed: create(config, seed, initial))(seeds_S)
  fields = {f.name: getattr(states, f.name) for f in dataclasses.fields(states)}
  return SeedStates(**fields, diverged=jnp.zeros_like(states.step))


def start(
  config: Config, initial: dict | None = None, mesh: Mesh | None = None
) -> TrainState:
  """The fresh state of a run, compiled; on a mesh each device makes its part.

  Args:
    config: of the run; several seeds give `SeedStates`.
    initial: as for `create`, arrays of the host.
    mesh: or None for one device.
  """
  out = None
  if mesh is not None:
    out = shardings(config, mesh)
    if initial is not None:
      initial = jax.tree.map(
        sharding.place, initial, sharding.specs(initial, mesh)
      )
  if len(config.seeds) > 1:
    make = jax.jit(create_seeds, static_argnums=0, out_shardings=out)
    return make(config, initial)
  make = jax.jit(create, static_argnums=(0, 1), out_shardings=out)
  return make(config, config.seeds[0], initial)


def shardings(config: Config, mesh: Mesh) -> TrainState:
  """Where each leaf of the state of a run lies.

  Raises:
    UserError: not every leaf is covered by exactly one rule.
  """
  return sharding.specs(abstract(config), mesh, len(config.seeds) > 1)


@jax.jit
def take_seed(states: SeedStates, index: int) -> SeedStates:
  """The state of one seed, by its place among the seeds."""
  return jax.tree.map(lambda leaf_S: leaf_S[index], states)


def statistics(config: Config) -> calibration.TaperState | fakeln.FakeState:
  """What a fresh run knows of its norms: nothing yet."""
  if config.cuts:
    return fakeln.init(config.model.num_layers)
  return calibration.init(2 * config.model.num_layers + 1)


def abstract(config: Config) -> TrainState:
  """Shapes and dtypes of the state of a run, without any array."""
  if len(config.seeds) > 1:
    return jax.eval_shape(lambda: create_seeds(config))
  return jax.eval_shape(lambda: create(config, 0))
