"""Times of a train step: the untapered model and the three phases, in turn.

Steps of PyTorch may be timed with them, of the untapered model.
"""

from __future__ import annotations

import contextlib
import copy
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from taperjax import (
  gate as gate_lib,
  planning,
  sharding,
  state as state_lib,
  step as step_lib,
)
from taperjax.bench import stats, torch_step
from taperjax.config import Config
from taperjax.errors import UserError
from taperjax.interop import verify

_PHASES = {
  "baseline": gate_lib.NORM, "norm": gate_lib.NORM, "taper": gate_lib.TAPER,
  "scale": gate_lib.SCALE,
}
FORMS = tuple(_PHASES)


def make_forms(
  fields: Any, names: Sequence[str], read: Callable[[Any], Config]
) -> dict[str, Config]:
  """The configuration behind each form.

  Args:
    fields: ConfigDict of a variant with a taper; it is left as it is.
    names: of `FORMS`. `baseline` is that variant, the others are phases of the
      one in `fields`.
    read: makes a Config of fields, its vocabulary known.

  Raises:
    UserError: the variant has no phases, or several seeds are given.
  """
  config = read(copy.deepcopy(fields))
  if config.taper_steps is None:
    raise UserError(
      f"variant={config.variant} has no taper, and so no phases to time; use "
      "for example all_aux, which is timed beside baseline"
    )
  if len(config.seeds) > 1:
    raise UserError(
      f"seeds={config.seeds} make one step of several models; give one seed"
    )
  fields = copy.deepcopy(fields)
  fields.variant, fields.taper.sites = "baseline", None
  baseline = read(fields)
  return {name: baseline if name == "baseline" else config for name in names}


class Timer:
  """A compiled step with a state of its own, in the middle of its phase.

  The weights are random, also where the run would start from a checkpoint.

  Attributes:
    loss: cross-entropy of the last step, before its update; None before.
    first_loss: that of the first.
  """

  def __init__(self, config: Config, form: str):
    phase, mesh = _PHASES[form], sharding.make_mesh(config.mesh)
    shape = (config.batch_size, config.context_len)
    rng = np.random.default_rng(0)
    vocab_size = config.model.vocab_size
    tokens = rng.integers(0, vocab_size, (shape[0], shape[1] + 1), np.int32)
    self.tokens_BL1 = tokens
    self.batch = (tokens, np.ones(shape, np.float32))
    if mesh is None:
      self.batch = jax.device_put(self.batch)
    else:
      rows = sharding.batch_sharding(mesh)
      self.batch = tuple(sharding.place(x, rows) for x in self.batch)
    state = state_lib.start(config, mesh=mesh)
    self.at = 0
    if (steps := config.taper_steps) is not None:
      first, last = {
        gate_lib.NORM: (0, steps.start),
        gate_lib.TAPER: (steps.start, steps.end),
        gate_lib.SCALE: (steps.end, config.steps),
      }[phase]
      self.at = (first + last) // 2
    if phase != gate_lib.NORM:  # as if calibrated
      taper = state.taper.replace(
        c=jnp.full_like(state.taper.c, 1 / config.model.init_std),
        scale_target=jnp.full_like(
          state.taper.scale_target, config.model.init_std
        ),
      )
      state = state.replace(taper=taper)
    begin = time.perf_counter()
    step = step_lib.make_train_step(config, phase, mesh)
    self.step = step.lower(state, *self.batch).compile()
    self.compile_s = time.perf_counter() - begin
    self.state = state
    self.first_loss = self.loss = None

  def seconds(self) -> float:
    """Of one step, to the end of all it computes."""
    step = jnp.full_like(self.state.step, self.at)
    state = jax.block_until_ready(self.state.replace(step=step))
    begin = time.perf_counter()
    self.state, metrics = self.step(state, *self.batch)
    jax.block_until_ready((self.state, metrics))
    seconds = time.perf_counter() - begin
    self.loss = float(metrics["loss"])
    if self.first_loss is None:
      self.first_loss = self.loss
    return seconds

  def temporary_bytes(self) -> int:
    """What the compiled step needs beside its arguments and results."""
    return self.step.memory_analysis().temp_size_in_bytes


def run(
  forms: dict[str, Config],
  peers: Sequence[str] = (),
  *,
  repeats: int,
  progress: Callable[[int], None] = lambda done: None,
) -> dict[str, Any]:
  """Compiles every form, then times one step of each in turn.

  Args:
    forms: from `make_forms`; `baseline` among them where there are peers.
    peers: of `torch_step.PEERS`, with the weights and the batch of `baseline`.
    repeats: timed rounds; one more warms up.
    progress: told how many rounds of repeats + 1 are done.

  Returns:
    batch, context_len, dtype, repeats; model_flops of a step, as
    `planning.model_flops`; `forms`: per name ms_per_step {median, q1, q3},
    tokens_per_s, model_flops_per_s, first_loss in nats, compile_s and
    temporary_bytes; `peers`: the like, with first_step_s and version in place
    of the last two; `ratios`: per `form/baseline` and `peer/baseline` as
    `stats.paired_ratio`, above 1 where the first is slower; `missing`: why a
    peer is not there.
  """
  timers: dict[str, Any] = {
    name: Timer(config, name) for name, config in forms.items()
  }
  missing: dict[str, str] = {}
  with contextlib.ExitStack() as stack:
    for name in peers:
      base = timers["baseline"]
      try:
        timers[name] = stack.enter_context(
          torch_step.open_timer(
            name, forms["baseline"], jax.device_get(base.state.params),
            base.tokens_BL1,
          )
        )
      except (verify.Missing, UserError, RuntimeError) as error:
        # Not installed, not for such a run, or a fault of its compiler.
        missing[name] = verify.one_line(error)
    seconds = {name: [] for name in timers}
    for i in range(repeats + 1):
      for name, timer in timers.items():
        taken = timer.seconds()
        if i:
          seconds[name].append(taken)
      progress(i + 1)
  config = next(iter(forms.values()))
  flops = planning.model_flops(config)
  found = {}
  for name, timer in timers.items():
    ms = stats.spread([1e3 * x for x in seconds[name]])
    found[name] = {
      "ms_per_step": ms,
      "tokens_per_s": (
        config.batch_size * config.context_len * 1e3 / ms["median"]
      ),
      "model_flops_per_s": flops * 1e3 / ms["median"],
      "first_loss": timer.first_loss,
    }
    if name in forms:
      found[name]["compile_s"] = timer.compile_s
      found[name]["temporary_bytes"] = timer.temporary_bytes()
    else:
      found[name]["first_step_s"] = timer.first_step_s
      found[name]["version"] = timer.version
  base = seconds.get("baseline")
  return {
    "batch": config.batch_size,
    "context_len": config.context_len,
    "dtype": config.compute_dtype,
    "repeats": repeats,
    "model_flops": flops,
    "forms": {name: found[name] for name in forms},
    "peers": {name: row for name, row in found.items() if name not in forms},
    "ratios": {} if base is None else {
      f"{name}/baseline": stats.paired_ratio(times, base)
      for name, times in seconds.items()
      if name != "baseline"
    },
    "missing": missing,
  }
