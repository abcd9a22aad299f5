"""The train step, the evaluation step and calibration: pure and jitted.

Axes: B batch, L context length, N layers, S norm sites.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from taperjax import (
  calibration,
  fakeln,
  gate as gate_lib,
  lora,
  losses,
  model,
  sharding,
  state as state_lib,
)
from taperjax.config import Config, ModelConfig, TaperConfig
from taperjax.state import TrainState

# Fig. 4 of the paper groups gradients by these matrices.
WEIGHT_TYPES = {
  "qkv": (("attn", "q"), ("attn", "k"), ("attn", "v")),
  "attn_out": (("attn", "o"),),
  "mlp_in": (("mlp", "gate"), ("mlp", "up")),
  "mlp_out": (("mlp", "down"),),
}


def _sums(params, config, gate, c, tokens_BL1, mask_BL, collect):
  """Token sums of one batch: nll, logit norm, s(h), and the scale errors."""
  mask_BL = mask_BL.astype(jnp.float32)
  hidden_BLD, aux = model.Transformer(config).apply(
    {"params": params},
    tokens_BL1[:, :-1],
    gate=gate,
    c=c,
    mask_BL=mask_BL if collect else None,
    output="hidden",
  )
  kernel_DV, bias_V = model.head_weights(params, config)
  kernel_DV = sharding.whole(kernel_DV.astype(hidden_BLD.dtype))
  nll, logit_norm = sharding.by_part(
    lambda h_TD, target_T, weight_T: losses.token_cross_entropy(
      h_TD, kernel_DV, bias_V, target_T, weight_T
    ),
    hidden_BLD.reshape(-1, config.embed_dim),
    tokens_BL1[:, 1:].reshape(-1),
    mask_BL.reshape(-1),
    join=jnp.sum,
  )
  return nll, logit_norm, aux


def make_train_step(
  config: Config, phase: str, mesh: Mesh | None = None
) -> Callable[..., tuple[TrainState, dict[str, jax.Array]]]:
  """One optimizer step of a phase: norm, taper or scale (see `gate.phase`).

  The gate is computed from the step, used, and put in the state. Statistics
  are collected in the norm phase of a tapered run, one sample for each step
  from the forward pass before the update. The scale loss joins the
  cross-entropy in one backward pass, after taper start only. A FakeLN run has
  one phase, with statistics and a scale loss from its first step: the cuts are
  data of the step, so one program serves them all.

  Returns:
    step(state, tokens_BL1, mask_BL) -> (state, metrics): tokens hold
    context_len + 1 ids, mask weighs the L predictions (0 for padding), metrics
    are float32 scalars on the device. Jitted, the state is donated. With
    `micro_batches` the batch is walked in parts whose sums, not means, add up.
    With several seeds the state is `state.SeedStates`, tokens are
    (S, B, L + 1) and metrics (S,), `diverged` among them. With
    nonfinite="skip" the metrics hold `skipped`, 0 or 1. On a mesh the state
    lies as `state.shardings` says, before and after; metrics are everywhere.
  """
  tx = state_lib.make_tx(config)
  schedule = state_lib.make_schedule(config)
  taper_steps = config.taper_steps
  cuts = config.cut_steps
  collect = phase == gate_lib.NORM and config.ends_without_norms
  weight = config.taper.scale_loss_weight
  if not config.uses_scale_loss or phase == gate_lib.NORM and not cuts:
    weight = 0.0

  def train_step(state: TrainState, tokens_BL1, mask_BL):
    k = state.step + 1
    if phase == gate_lib.TAPER:
      gate = gate_lib.gate(k, taper_steps)
    elif cuts:
      gate = gate_lib.cut_gate(k, cuts)
    else:
      gate = 1.0 if phase == gate_lib.NORM else 0.0
    tokens = jnp.maximum(jnp.sum(mask_BL.astype(jnp.float32)), 1.0)
    factor = scale_loss_weight(config.taper, gate) if weight else 0.0
    taper = state.taper
    if cuts:
      taper = taper.replace(c=fakeln.factors(taper.std, k, cuts))

    trained, frozen = lora.split(state.params)

    def loss_fn(trained, tokens_BL1, mask_BL):
      params = lora.merge(lora.join(trained, frozen), config.lora)
      if not config.taper.train_gain:
        params = calibration.freeze_gains(params)
      nll, logit_norm, aux = _sums(
        params, config.model, gate, taper.c, tokens_BL1, mask_BL, collect
      )
      mask_BL = mask_BL.astype(jnp.float32)
      target = taper.scale_target
      if cuts:
        target = fakeln.moving_target(aux["scale_BL"], aux["weight_BL2"])
      error = losses.scale_loss(aux["scale_BL"], target, mask_BL)
      means = {
        "loss": nll,
        "scale_loss": factor * error,
        "mean_scale": jnp.sum(mask_BL * aux["scale_BL"]),
        "logit_norm": logit_norm,
        "sums_S2": aux["sums_S2"],
      }
      if cuts:
        means["scale_target"] = jnp.sum(mask_BL) * target
        means["weight_2"] = jnp.sum(aux["weight_BL2"], axis=(0, 1))
      means = jax.tree.map(lambda x: x / tokens, means)
      total = means["loss"]
      if weight:
        total = total + means["scale_loss"]
      return total, means

    grad_fn = jax.grad(loss_fn, has_aux=True)
    if config.micro_batches == 1:
      grads, means = grad_fn(trained, tokens_BL1, mask_BL)
    else:
      split = lambda x: sharding.deal(x, config.micro_batches)

      def add(total, part):
        part = grad_fn(trained, *part)
        return jax.tree.map(jnp.add, total, part), None

      parts = (split(tokens_BL1), split(mask_BL))
      zero = jax.tree.map(
        lambda x: jnp.zeros(x.shape, x.dtype),
        jax.eval_shape(grad_fn, trained, *(x[0] for x in parts)),
      )
      (grads, means), _ = jax.lax.scan(add, zero, parts)

    updates, opt_state = tx.update(grads, state.opt_state, trained)
    params = lora.join(optax.apply_updates(trained, updates), frozen)
    sums_S2 = means.pop("sums_S2")
    if cuts:
      taper = taper.replace(
        std=fakeln.update(
          taper.std,
          sums_S2,
          means.pop("weight_2"),
          k,
          cuts,
          config.fakeln.momentum,
        ),
        scale_target=means["scale_target"],
      )
    elif collect:
      taper = calibration.update(
        taper,
        sums_S2[:, 0],
        sums_S2[:, 1],
        means["mean_scale"],
        config.taper.ema_rate,
      )
    grad_norm = optax.tree.norm(grads)
    metrics = {
      **means,
      "gate": jnp.float32(gate),
      "learning_rate": schedule(k),
      "scale_target": taper.scale_target,
      "grad_norm": grad_norm,
      "clipped": jnp.float32(grad_norm > config.optimizer.clip_norm),
      **{f"grad_norm_{k}": v for k, v in grad_norms(grads).items()},
    }
    if cuts:
      cut_P = fakeln.cut_sites(k, cuts)
      metrics["cut"] = jnp.sum(cut_P.astype(jnp.float32))
    new = state.replace(
      step=k,
      params=params,
      opt_state=opt_state,
      gate=jnp.float32(gate),
      taper=taper,
    )
    return new, metrics

  step, out = train_step, None
  if mesh is not None:
    out = (state_lib.shardings(config, mesh), sharding.everywhere(mesh))
  if len(config.seeds) > 1:
    step = jax.vmap(
      _unless_diverged(train_step),
      in_axes=(0, 0, None),
      spmd_axis_name=None if mesh is None else "seed",
    )
  elif config.nonfinite == "skip":
    step = _skip_nonfinite(train_step)
  step = jax.jit(step, donate_argnums=0, out_shardings=out)
  return sharding.on_mesh(mesh, step)


def scale_loss_weight(taper: TaperConfig, gate: Any) -> Any:
  """lambda at a gate; the paper's is constant (appendix C)."""
  share = 1.0 - gate if taper.scale_loss_schedule == "taper" else 1.0
  return taper.scale_loss_weight * share


def _finite(metrics: dict[str, jax.Array]) -> jax.Array:
  """Whether a step may count; the norm of the gradients is among its metrics,
  so that no update with a NaN gets through."""
  return jnp.all(jnp.isfinite(jnp.stack(list(metrics.values()))))


def _skip_nonfinite(train_step):
  """A step that leaves all but its number and the gate where it is not finite.

  Its own metrics are returned as they are.
  """

  def step(state, tokens_BL1, mask_BL):
    new, metrics = train_step(state, tokens_BL1, mask_BL)
    finite = _finite(metrics)
    new = _keep_where(finite, new, state)
    return new, metrics | {"skipped": 1.0 - finite.astype(jnp.float32)}

  return step


def _unless_diverged(train_step):
  """A step that freezes its seed where a metric is not finite.

  The step counter and the gate go on, equal for all seeds.
  """

  def step(state, tokens_BL1, mask_BL):
    new, metrics = train_step(state, tokens_BL1, mask_BL)
    diverged = jnp.where(
      (state.diverged == 0) & ~_finite(metrics), new.step, state.diverged
    )
    new = _keep_diverged(new.replace(diverged=diverged), state)
    return new, metrics | {"diverged": diverged}

  return step


def _keep_diverged(new, state):
  """`new`, or what a frozen seed had before but for its step and gate."""
  return _keep_where(new.diverged == 0, new, state)


def _keep_where(good, new, state):
  """`new` where a step was good, else `state` with the step and gate of new."""
  names = ("params", "opt_state", "taper")
  kept = jax.tree.map(
    lambda now, before: jnp.where(good, now, before),
    *([getattr(s, name) for name in names] for s in (new, state)),
  )
  return new.replace(**dict(zip(names, kept, strict=True)))


def grad_norms(grads: dict) -> dict[str, jax.Array]:
  """Mean l2 norm of the matrices of each weight type, over layers.

  The paper plots "mean gradient norms by weight type" (Fig. 4); that the mean
  runs over single matrices is our reading.
  """
  found = {name: [] for name in WEIGHT_TYPES}
  for path, leaf in jax.tree_util.tree_leaves_with_path(grads):
    keys = tuple(part.key for part in path)
    for name, members in WEIGHT_TYPES.items():
      if keys[-3:-1] in members and keys[-1] == "kernel":
        stacked = keys[0] == "blocks"
        axes = tuple(range(1, leaf.ndim)) if stacked else None
        found[name].append(jnp.sqrt(jnp.sum(leaf * leaf, axis=axes)))
  return {
    name: jnp.mean(jnp.stack([jnp.mean(norm) for norm in norms]))
    for name, norms in found.items()
    if norms  # adapters leave no gradient of the matrices themselves
  }


def make_eval_step(
  config: ModelConfig, mesh: Mesh | None = None
) -> Callable[..., dict[str, jax.Array]]:
  """Token sums of one batch at a gate, for `evaluate`.

  Returns:
    eval_step(params, c_S, gate, tokens_BL1, mask_BL) -> dict of float32 sums:
    nll, logit_norm, scale, tokens. Jitted; a Python gate 1.0 or 0.0 compiles
    its branch alone, an array serves every gate between. On a mesh tokens and
    mask are whole numpy arrays, of which each device takes its rows.
  """

  def eval_step(params, c_S, gate, tokens_BL1, mask_BL):
    nll, logit_norm, aux = _sums(
      params, config, gate, c_S, tokens_BL1, mask_BL, collect=False
    )
    mask_BL = mask_BL.astype(jnp.float32)
    return {
      "nll": nll,
      "logit_norm": logit_norm,
      "scale": jnp.sum(mask_BL * aux["scale_BL"]),
      "tokens": jnp.sum(mask_BL),
    }

  out = None if mesh is None else sharding.everywhere(mesh)
  fixed = jax.jit(eval_step, static_argnums=2, out_shardings=out)
  traced = jax.jit(eval_step, out_shardings=out)
  fixed, traced = (sharding.on_mesh(mesh, run) for run in (fixed, traced))

  def call(params, c_S, gate, tokens_BL1, mask_BL):
    if mesh is not None:
      rows = sharding.batch_sharding(mesh)
      tokens_BL1 = sharding.place(tokens_BL1, rows)
      mask_BL = sharding.place(mask_BL, rows)
    run = fixed if isinstance(gate, float) and gate in (0.0, 1.0) else traced
    return run(params, c_S, gate, tokens_BL1, mask_BL)

  return call


def make_calibrate(
  config: Config, mesh: Mesh | None = None
) -> Callable[[TrainState], TrainState]:
  """Taper start: c and s_tgt are frozen, gamma~ <- gamma.

  Source: arXiv:2602.10408 (v1), section 3.3 and appendix A.6. Runs once, after
  optimizer step k_s; that it comes after this step and not before is [U], ours.
  Jitted, so gamma~ is a copy of gamma and never the same buffer; the state is
  donated.
  """

  def calibrate(state: TrainState) -> TrainState:
    taper = calibration.solve(
      state.taper, config.taper.ema_rate, unit=not config.taper.calibrate
    )
    params = calibration.copy_gains(state.params)
    return state.replace(taper=taper, params=params)

  run, out = calibrate, None
  if mesh is not None:
    out = state_lib.shardings(config, mesh)
  if len(config.seeds) > 1:
    run = jax.vmap(lambda state: _keep_diverged(calibrate(state), state))
  return jax.jit(run, donate_argnums=0, out_shardings=out)
