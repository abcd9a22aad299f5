"""The optax chain: scale-loss gradient (optional), clip, AdamW."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from taperjax.config import OptimizerConfig

DECAYED = ("kernel", "embedding")


class AddScaleLossState(NamedTuple):
  """Number of updates so far."""

  count: jax.Array


def add_scale_loss(
  weight: optax.ScalarOrSchedule,
) -> optax.GradientTransformationExtraArgs:
  r"""Adds lambda times the gradient of the fixed-target scale loss.

  For a training loop of your own: put it first in the chain, before any clip,
  and pass the gradient of mean (s(h) - s_tgt)^2 (arXiv:2602.10408 (v1), Eq. 5)
  as `scale_grads`:

      tx = optax.chain(add_scale_loss(0.1), optax.clip_by_global_norm(1.0), ...)
      updates, state = tx.update(grads, state, params, scale_grads=scale_grads)

  The trainer of this package takes both gradients in one backward pass; a test
  shows that the updates are the same.

  Args:
    weight: lambda, a number or a schedule of the step counted from 1. Use a
      schedule that is 0 up to taper start: the target does not exist before.
  """

  def init(params):
    del params
    return AddScaleLossState(jnp.zeros((), jnp.int32))

  def update(updates, state, params=None, *, scale_grads, **extra):
    del params, extra
    count = state.count + 1
    factor = weight(count) if callable(weight) else weight
    updates = jax.tree.map(lambda g, s: g + factor * s, updates, scale_grads)
    return updates, AddScaleLossState(count)

  return optax.GradientTransformationExtraArgs(init, update)


def decay_mask(params: dict) -> dict:
  """True for matrices and embeddings, False for gains and biases, by name.

  The paper's pre-training uses no decay; where it is on, gamma, gamma~ and
  every bias stay out of it ([U], ours: decay would shrink the idle gamma~).
  """
  return jax.tree_util.tree_map_with_path(
    lambda path, _: path[-1].key in DECAYED, params
  )


def make_optimizer(
  config: OptimizerConfig, schedule: optax.Schedule
) -> optax.GradientTransformation:
  """Global-norm clip, then AdamW; `schedule` takes the step from 1.

  Source: arXiv:2602.10408 (v1), section 5.1: betas (0.9, 0.95), clip 1.0, no
  weight decay. The epsilon is [U], the library's default.
  """
  return optax.chain(
    optax.clip_by_global_norm(config.clip_norm),
    optax.scale_by_adam(b1=config.b1, b2=config.b2, eps=config.eps),
    optax.add_decayed_weights(config.weight_decay, mask=decay_mask),
    optax.scale_by_learning_rate(lambda count: schedule(count + 1)),
  )
