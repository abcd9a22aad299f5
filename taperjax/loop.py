"""The training run: the only file that holds state.

What lies in a workdir:

    config.json      the whole configuration
    tokenizer/       what turns text to ids and back
    data/            token files, unless `data.folder` names another place
    checkpoints/     train states by step
    folded/          the model without its norms, and fold.json about it; of
                     several seeds a folder seed_N each
    metrics.jsonl    one JSON record a line; tensorboard/ mirrors it
    summary.json     written last: the run is finished
    cache/           compiled programs
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import pathlib
import shutil
import statistics
import time
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np

from taperjax import (
  anchor,
  checkpoint,
  config as config_lib,
  data as data_lib,
  decode,
  evaluation,
  fakeln,
  gate as gate_lib,
  lora,
  metrics as metrics_lib,
  model,
  saved,
  sharding,
  state as state_lib,
  step as step_lib,
  summary as summary_lib,
  workdir as workdir_lib,
)
from taperjax.config import Config
from taperjax.data import windows
from taperjax.errors import UserError
from taperjax.summary import (
  by_seed,
  commit,
  mean_text,
  print_table,
  strict,
  versions,
  wrap_sample,
  write_json,
)

SAMPLING = decode.Sampling(temperature=0.7, top_p=0.9)  # sampled stories
DECODE_REPEATS = 7  # of the closing speed measurement


def train(
  config: Config,
  workdir: str | os.PathLike[str] | None = None,
  *,
  overwrite: bool = False,
  stop_after: int | None = None,
  compilation_cache: str | os.PathLike[str] | None = None,
  data_folder: str | os.PathLike[str] | None = None,
) -> dict[str, Any] | None:
  """Trains, calibrates, tapers, evaluates and folds; resumes by itself.

  Args:
    config: from `config.parse`.
    workdir: made if needed; None makes a dated folder under runs/.
    overwrite: removes an earlier run in the workdir first.
    stop_after: saves and stops after this step, to go on another time.
    compilation_cache: folder of compiled programs; None keeps it in workdir.
    data_folder: of token files, where data.folder is None; None: in workdir.

  Of several processes each calls it with the same arguments; all see the
  workdir, and process 0 alone writes there.

  Returns:
    The summary, as in summary.json; None when stopped before the end, and in
    every process but the first.

  Raises:
    UserError: one line for each mistake that the user can mend.
  """
  if stop_after is not None and not 1 <= stop_after < config.steps:
    raise UserError(
      f"stop_after={stop_after} must be from 1 to steps - 1 = "
      f"{config.steps - 1}; leave it out to train to the end"
    )
  if workdir is None and jax.process_count() > 1:
    raise UserError(
      "workdir=None with several processes: all must use the same folder; give "
      "--workdir, on a disk that all of them see"
    )
  mesh = sharding.make_mesh(config.mesh)
  new = workdir is None or not pathlib.Path(workdir).exists()
  with contextlib.ExitStack() as stack:

    def open_run() -> Run:
      folder = pathlib.Path(workdir or ".")
      if jax.process_index() == 0:
        label = f"{config.size}_{config.variant}"
        folder = workdir_lib.open_workdir(workdir, label)
        stack.enter_context(workdir_lib.lock(folder))
      cache = pathlib.Path(compilation_cache or folder / "cache").absolute()
      stack.enter_context(workdir_lib.compilation_cache(cache))
      try:
        return Run(config, folder, mesh, overwrite, data_folder)
      except UserError:
        if new and not (folder / "config.json").exists():
          shutil.rmtree(folder, ignore_errors=True)  # no run ever began in it
        raise

    stack.enter_context(sharding.peers())
    return sharding.in_turn(open_run).run(stop_after)


class NotFinite(UserError):
  """A run, or the last of its seeds, diverged."""


class Run:
  """One run in one workdir. Read `run` first."""

  def __init__(
    self,
    config: Config,
    workdir: pathlib.Path,
    mesh: jax.sharding.Mesh | None,
    overwrite: bool,
    data_folder: str | os.PathLike[str] | None = None,
  ):
    self.main = jax.process_index() == 0  # the others write nothing
    overwrite = overwrite and self.main
    self.mesh = mesh
    self.workdir = workdir
    self.shared = pathlib.Path(data_folder or workdir)  # moved with the run
    self.began = time.monotonic()
    self.earlier_s = 0.0  # wall time of earlier sittings
    self.saved_step: int | None = None
    if self.main:
      workdir_lib.clean(workdir, results=False)
    self.checkpoints = checkpoint.Checkpoints(
      workdir / "checkpoints", log=say, read_only=not self.main
    )
    meta = None if overwrite else self._saved_meta()
    if meta and "config" not in meta:
      raise UserError(
        f"workdir={workdir} holds an imported model; choose another --workdir, "
        f"and start from it with --config.init.checkpoint={workdir}"
      )
    if meta:  # before any data are made for a run that will not go on
      # A tokenizer from a file tells its vocabulary later.
      vocab_size = config.model.vocab_size or meta["model"]["vocab_size"]
      known = config.with_vocab(vocab_size, meta["model"].get("eot_id"))
      check_same_config(known, meta["config"])
    data = config.data
    tokenizer = data.tokenizer
    if tokenizer == "init":
      tokenizer = str(saved.tokenizer_folder(config.init.checkpoint))
    self.data = data_lib.load_data(
      train=data.train,
      valid=data.valid,
      tokenizer=tokenizer,
      vocab_size=data.vocab_size,
      folder=data.folder or data_folder or workdir / "data",
      seed=0,  # the text is the same for every seed of the model
      corpus_stories=data.corpus_stories,
      log=say,
      expect=meta["data_hashes"] if meta else None,
    )
    tokenizer = self.data.tokenizer
    self.config = config.with_vocab(tokenizer.vocab_size, tokenizer.eos_id)
    self.seeds = self.config.seeds
    self.many = len(self.seeds) > 1
    self.diverged = [0] * len(self.seeds)  # step of each seed, or 0
    self.skipped = self.in_a_row = 0  # steps that were not finite
    self._check_lengths()
    self.shardings = None
    if mesh is not None:  # a leaf that no rule covers must not cost a run, too
      self.shardings = state_lib.shardings(self.config, mesh)
    if overwrite:  # only now: a mistake above must not cost the earlier run
      workdir_lib.clean(workdir, results=True)
      self.checkpoints = checkpoint.Checkpoints(
        workdir / "checkpoints", log=say
      )
    if self.main:
      write_json(workdir / "config.json", config_lib.to_dict(self.config))
      self.data.tokenizer.save(workdir / "tokenizer")
    self.eval_step = step_lib.make_eval_step(self.config.model, mesh)
    self.anchor = anchor.make_anchor(self.config.model)
    self.steps = {}  # compiled train steps by phase
    self._take = None  # compiled choice of a seed, on a mesh
    # Sums since the last logged step; saved, so that a resumed run logs the
    # same means as one that never stopped.
    self.interval = _empty_interval()
    self.final_valid: list[dict[str, Any] | None] | None = None  # by seed

  def run(self, stop_after: int | None = None) -> dict[str, Any] | None:
    """Norm phase, calibration, taper, scale phase; then fold and summary."""
    config = self.config
    self._describe()
    state = self._restore()
    first = _step_of(state)
    summary_path = self.workdir / "summary.json"
    if first == config.steps and summary_path.exists():
      try:
        summary = json.loads(summary_path.read_text(encoding="utf-8"))
        if not self.main:
          return None
        print_table(summary)
      except (OSError, ValueError, KeyError, TypeError):
        say(f"{summary_path} is damaged and is made anew")
      else:
        say(f"finished before: {summary_path}")
        return summary
    if stop_after is not None and stop_after <= first:
      raise UserError(
        f"stop_after={stop_after} is not after step {first}, where this run "
        "goes on; raise it or leave it out"
      )
    if self.main:
      summary_path.unlink(missing_ok=True)  # of steps that are done once more
      resume_step = first if self.saved_step is not None else None
      self.metrics = metrics_lib.MetricsWriter(
        self.workdir, resume_step=resume_step
      )
      progress = metrics_lib.Progress(config.steps, first)
    else:
      self.metrics = progress = _Silent()
    with (
      contextlib.closing(self.metrics),
      contextlib.closing(self.checkpoints),
      progress as self.progress,
    ):
      with workdir_lib.signals() as stop:
        state = self._train(state, stop, stop_after)
      self.checkpoints.wait()
    return self._finish(state) if _step_of(state) == config.steps else None

  def _train(
    self,
    state: state_lib.TrainState,
    stop: list[str],
    stop_after: int | None,
  ) -> state_lib.TrainState:
    """Steps to the end, or to where a signal or `stop_after` stops them."""
    config, taper_steps = self.config, self.config.taper_steps
    mask_BL = jnp.ones((config.batch_size, config.context_len), jnp.float32)
    if self.mesh is not None:
      rows = sharding.batch_sharding(self.mesh)
      mask_BL = sharding.place(np.asarray(mask_BL), rows)
    pending = None  # (step, metrics) of the step that the device works on
    self.rate = _Rate(config)
    for k in range(_step_of(state) + 1, config.steps + 1):
      train_step = self._step(gate_lib.phase(k, taper_steps))
      state, values = train_step(state, self._batch(k), mask_BL)
      if pending is not None:
        self._log(*pending)  # while the device computes step k
      pending = (k, values)
      if taper_steps is not None and k == taper_steps.start:
        state = self._calibrate(state)
      last = k == config.steps
      stopping = self._stopping(stop, k) or k == stop_after
      evaluating = last or k % config.eval.every == 0
      saving = last or stopping or k % config.checkpoint.every == 0
      if evaluating or saving:
        self._log(*pending)  # never evaluate or save what is not finite
        pending = None
      valid_loss = self._evaluate(state) if evaluating else None
      if saving:
        self._check_update(state)
      if self.many and (evaluating or saving):  # these may have ended a seed
        diverged = np.array(self.diverged, np.int32)
        if self.mesh is None:
          state = state.replace(diverged=jnp.asarray(diverged))
        else:
          where = self.shardings.diverged
          state = state.replace(diverged=sharding.place(diverged, where))
      if saving:
        self._save(state, valid_loss)
      if evaluating or saving:
        self.rate.skip()
      if stopping and not last:
        self.checkpoints.wait()
        why = f"--stop_after={k}"
        if k != stop_after:
          why = stop[0] if stop else "a signal to another process"
        say(
          f"stopped at step {k} of {config.steps} ({why}); the same command "
          f"with --workdir={self.workdir} goes on",
          self.progress,
        )
        break
    return state

  def _stopping(self, stop: list[str], k: int) -> bool:
    """Whether to stop after step k; processes agree when they log."""
    if jax.process_count() == 1:
      return bool(stop)
    return k % self.config.log_every == 0 and sharding.anywhere(bool(stop))

  def _batch(self, k: int) -> np.ndarray | jax.Array:
    """Tokens of step k, (B, L + 1); with several seeds (S, B, L + 1).

    On a mesh each process reads the rows of its own devices.
    """
    config = self.config
    shape = (config.batch_size, config.context_len + 1)
    if self.many:
      shape = (len(self.seeds), *shape)

    def read(part):
      seeds = self.seeds[part[0]] if self.many else self.seeds
      batches = [
        windows.train_batch(
          self.data.train.tokens,
          seed=seed,
          step=k,
          batch_size=config.batch_size,
          context_len=config.context_len,
          rows=part[-2],
        )
        for seed in seeds
      ]
      return np.stack(batches) if self.many else batches[0]

    if self.mesh is None:
      return read((slice(None),) * len(shape))
    rows = sharding.batch_sharding(self.mesh, self.many)
    return jax.make_array_from_callback(shape, rows, read)

  def _check_lengths(self) -> None:
    """Raises before the first step where a text or the prompt cannot serve."""
    config, data = self.config, self.data
    try:
      part = "train"
      windows.train_batch(
        data.train.tokens,
        seed=0,
        step=1,
        batch_size=1,
        context_len=config.context_len,
      )
      part = "valid"
      next(self._valid_batches())
    except UserError as error:
      name = getattr(config.data, part)
      raise UserError(f"data.{part}={name}: {error}") from error
    self._prompt()

  def _step(self, phase: str):
    if phase not in self.steps:
      self.steps[phase] = step_lib.make_train_step(
        self.config, phase, self.mesh
      )
    return self.steps[phase]

  def _describe(self) -> None:
    """Prints the resolved values that the config leaves to be derived."""
    config, data = self.config, self.data
    params = dict(state_lib.abstract(config).params)
    adapters = model.count_params(params.pop(lora.BRANCH, {}))[0]
    total, taper = model.count_params(params)
    if self.many:  # every leaf leads with the seeds
      total, taper, adapters = (
        n // len(self.seeds) for n in (total, taper, adapters)
      )
    shown = ", ".join(map(str, self.seeds))
    lines = [
      f"workdir {self.workdir}",
      f"{config.size} {config.variant}, norm {config.norm}, seed {shown}: "
      f"{total:,} parameters and {taper:,} taper gains; vocabulary "
      f"{data.tokenizer.vocab_size:,}",
      f"{len(data.train.tokens):,} training tokens, "
      f"{len(data.valid.tokens):,} for validation; {config.steps:,} steps of "
      f"{config.batch_size} x {config.context_len} tokens, warm-up "
      f"{config.warmup_steps}",
    ]
    if adapters:
      lines.append(
        f"{adapters:,} parameters in adapters of rank {config.lora.rank} and "
        "the taper gains train; all others are frozen"
      )
    if config.tapers:
      steps = config.taper_steps
      aux = config.taper.scale_loss_weight if config.uses_scale_loss else "off"
      lines.append(
        f"gate 1 through step {steps.start}, then calibration, 0 from step "
        f"{steps.end}; EMA rate {config.taper.ema_rate:g}, scale loss {aux}"
      )
    if (cuts := config.cut_steps) is not None:
      lines.append(
        f"{len(cuts.sites)} cuts after steps {min(cuts.sites)} to "
        f"{max(cuts.sites)}; end of text is as other tokens after {cuts.eot}, "
        f"position 0 after {cuts.position0}; scale loss "
        f"{config.taper.scale_loss_weight:g}"
      )
    for line in lines:
      say(line)

  def _saved_meta(self) -> dict[str, Any] | None:
    """Meta of the newest checkpoint that can be read, for early checks."""
    for step in reversed(self.checkpoints.steps()):
      with contextlib.suppress(UserError):
        return self.checkpoints.meta(step)
    return None

  def _restore(self) -> state_lib.TrainState:
    """The newest intact state, or a fresh one."""
    found = self._newest()
    if found is None:
      initial = None
      if (path := self.config.init.checkpoint) is not None:
        say(f"starting from {path}")
        initial = saved.load(path).params
      return state_lib.start(self.config, initial, self.mesh)
    step, state, meta = found
    check_same_config(self.config, meta["config"])
    self.saved_step = step
    self.interval = {
      n: np.float64(v) if np.ndim(v) else v for n, v in meta["interval"].items()
    }
    self.diverged = meta.get("diverged", self.diverged)
    self.skipped = meta.get("skipped", 0)
    self.earlier_s = meta["wall_s"]
    say(f"resuming at step {step} of {self.config.steps}")
    return state

  def _newest(self) -> tuple[int, Any, dict[str, Any]] | None:
    """Step, state and meta of the newest intact checkpoint."""
    abstract = state_lib.abstract(self.config)
    if self.mesh is not None:
      abstract = jax.tree.map(
        lambda leaf, where: leaf.update(sharding=where),
        abstract,
        self.shardings,
      )
    if jax.process_count() == 1:
      return self.checkpoints.restore_latest(abstract)
    # Process 0 moves damaged steps aside; then all read the one that is left.
    step = sharding.lead(lambda: self.checkpoints.newest_intact(abstract))
    step = sharding.of_first(-1 if step is None else step)
    return None if step < 0 else (
      step, *self.checkpoints.restore(step, abstract)
    )

  def _one(self, state: state_lib.TrainState, i: int) -> state_lib.TrainState:
    """The state of the i-th seed."""
    if not self.many:
      return state
    if self.mesh is None:
      return state_lib.take_seed(state, i)
    if self._take is None:
      out = sharding.specs(
        jax.eval_shape(state_lib.take_seed, state, 0), self.mesh
      )
      self._take = jax.jit(state_lib.take_seed, out_shardings=out)
    return self._take(state, i)

  def _log(self, k: int, values: dict[str, jax.Array]) -> None:
    """Fetches the metrics of step k, checks them, writes every log_every."""
    config = self.config
    # Of one seed numbers, of several (S,) with NaN where a seed has ended.
    values = {n: np.float64(v) for n, v in jax.device_get(values).items()}
    if self.many:
      self._mask_diverged(values)
    elif values.pop("skipped", 0.0):
      self._skip(k, values)
      return
    else:
      self._check_finite(k, values)
    self.in_a_row = 0
    sums = self.interval
    for name in ("loss", "scale_loss", "clipped"):
      sums[name] = sums[name] + values[name]
    sums["count"] += 1
    self.rate.tick()
    shown = {n: float(np.nanmean(values[n])) for n in ("loss", "gate")}
    if k % config.log_every and k != config.steps:
      self.progress.update(k, **shown, tokens_per_s=self.rate.last)
      return
    for name in ("loss", "scale_loss", "clipped"):
      values[name] = sums[name] / sums["count"]
    values["clipped_share"] = values.pop("clipped")
    values = {name: _json(value) for name, value in values.items()}
    steps = config.taper_steps
    if not config.cuts and (steps is None or k <= steps.start):
      values["scale_target"] = None  # does not exist before calibration
    values["tokens_per_s"] = self.rate.take()
    self.interval = _empty_interval()
    self.metrics.write(k, values)
    self.progress.update(k, **shown, tokens_per_s=self.rate.last)

  def _skip(self, k: int, values: dict[str, np.ndarray]) -> None:
    """Records a step that changed nothing; stops at the tenth in a row.

    It is not among the means; where a record was due, the next one has them.
    """
    bad = metrics_lib.finite(values)
    self.skipped, self.in_a_row = self.skipped + 1, self.in_a_row + 1
    self.metrics.write(k, values | {"skipped": self.skipped}, "skipped")
    say(
      f"{bad} at step {k} is not finite; skipped, {self.skipped} so far",
      self.progress,
    )
    if self.in_a_row == _SKIPS_IN_A_ROW:
      self._stop_not_finite(k, f"{bad}, {self.in_a_row} steps in a row,")

  def _mask_diverged(self, values: dict[str, np.ndarray]) -> None:
    """Takes `diverged` out, tells what is new in it, and blanks these seeds."""
    ended = values.pop("diverged")
    for i in np.flatnonzero(ended):
      names = [n for n, v in values.items() if not np.isfinite(v[i])]
      self._end_seed(int(i), int(ended[i]), next(iter(names), "loss"))
    for name, value in values.items():
      values[name] = self._live(value)

  def _live(self, value: np.ndarray) -> np.ndarray:
    """Several seeds with NaN for those that have ended; one as it is."""
    if not self.many:
      return value
    ended_S = np.array(self.diverged) > 0
    ended = ended_S.reshape(-1, *[1] * (value.ndim - 1))
    return np.where(ended, np.nan, value)

  def _end_seed(self, i: int, k: int, bad: str) -> None:
    """Marks a seed that is not finite at step k; the others go on."""
    if self.diverged[i]:
      return
    self.diverged[i] = k
    if all(self.diverged):
      self.metrics.write(k, {"diverged": self.diverged}, "nonfinite")
      self._stop_not_finite(k, f"{bad} of the last seed")
    say(
      f"seed {self.seeds[i]}: {bad} at step {k} is not finite; this seed is "
      "frozen there, the others go on",
      self.progress,
    )

  def _check_finite(self, k: int, values: dict[str, Any]) -> None:
    """Stops the run at a NaN or infinity, and says what is left of it."""
    bad = metrics_lib.finite(values)
    if bad is not None:
      self.metrics.write(k, values, "nonfinite")
      self._stop_not_finite(k, f"{bad}={values[bad]}")

  def _stop_not_finite(self, k: int, what: str) -> NoReturn:
    last = self.saved_step
    kept = "there is no checkpoint yet" if last is None else (
      f"the last good checkpoint is step {last}"
    )
    config, steps = self.config, self.config.taper_steps
    remedy = (
      f"lower optimizer.learning_rate={config.optimizer.learning_rate:g}, or "
      "raise optimizer.warmup"
    )
    if steps is not None and k > steps.start:
      remedy = (
        f"the taper started at step {steps.start}: raise "
        f"taper.start={config.taper.start:g} or steps, or {remedy}"
      )
    if config.cuts and k > config.fakeln.start:
      remedy = (
        f"the norms are cut after step {config.fakeln.start}: raise "
        f"fakeln.start or the gaps, or {remedy}"
      )
    raise NotFinite(
      f"{what} at step {k} is not finite, training stops; "
      f"{kept} in {self.checkpoints.folder}: {remedy}"
    )

  def _calibrate(self, state: state_lib.TrainState) -> state_lib.TrainState:
    """Taper start: freezes c and the scale target, copies gamma."""
    state = step_lib.make_calibrate(self.config, self.mesh)(state)
    k, sites = _step_of(state), self.config.model.tapered_sites
    taper = (state.taper.scale_target, state.taper.c)
    target, c = (self._live(value) for value in sharding.to_host(taper))
    names = config_lib.site_names(self.config.model.num_layers)
    values = {"scale_target": target}
    values |= {f"c/{names[i]}": c[..., i] for i in sites}
    if not self.many:  # no step of the norm phase was finite
      self._check_finite(k, values)
    self.metrics.write(
      k, {n: _json(v) for n, v in values.items()}, "calibration"
    )
    c = c[..., sites]
    say(
      f"calibrated at step {k}: c from {np.nanmin(c):.4g} to "
      f"{np.nanmax(c):.4g} over {len(sites)} norms, scale target "
      f"{np.nanmean(target):.4g}",
      self.progress,
    )
    return state

  def _valid_batches(self):
    config = self.config
    return windows.eval_batches(
      self.data.valid.tokens,
      batch_size=config.eval.batch_size,
      context_len=config.context_len,
      max_windows=config.eval.max_windows,
    )

  def _plain(self, state: state_lib.TrainState) -> dict:
    """Parameters of the model itself, adapters merged."""
    if not self.config.lora.rank:
      return state.params
    return jax.jit(lora.merge, static_argnums=1)(state.params, self.config.lora)

  def _loss(self, params, c, gate, eval_step=None) -> dict[str, Any]:
    return evaluation.evaluate(
      eval_step or self.eval_step,
      params,
      self._valid_batches(),
      c=c,
      gate=gate,
      id_bytes=self.data.tokenizer.id_bytes(),
    )

  def _evaluate(self, state: state_lib.TrainState) -> float | None:
    """Validation of every seed at its gate and at g = 0, and sampled stories.

    Returns:
      The validation loss at the current gate, a mean over the seeds; None
      where it is not finite and the run skips that.
    """
    k = _step_of(state)
    found, self.final_valid = [], []
    for i, seed in enumerate(self.seeds):
      values = now = None
      if not self.diverged[i]:
        one = self._one(state, i)
        values, now = self._evaluate_seed(one, seed)
        bad = metrics_lib.finite(values)
        if bad and self.config.nonfinite == "skip":
          if k < self.config.steps:
            self.metrics.write(k, values, "skipped")
            say(
              f"step {k}: {bad} is not finite; training goes on", self.progress
            )
            return None
          self._check_update(state)  # the model is kept, and the run stops
          self._save(state, None)
          self.checkpoints.wait()
        if not self.many:
          self._check_finite(k, values)
        elif bad:
          self._end_seed(i, k, bad)
          values = now = None
      found.append(values)
      self.final_valid.append(now)
    self.metrics.write(k, by_seed(found) if self.many else found[0], "eval")
    if self.main:
      self._say_evaluated(k, [v for v in found if v is not None])
    return statistics.fmean(now["loss"] for now in self.final_valid if now)

  def _evaluate_seed(
    self, state: state_lib.TrainState, seed: int
  ) -> tuple[dict[str, Any], dict[str, Any]]:
    """(what is written, the whole validation at the gate) of one seed."""
    k, gate = int(state.step), float(state.gate)
    tapers, cuts = self.config.tapers, self.config.cuts
    fixed = gate in (0.0, 1.0)
    params = self._plain(state)
    # The norms of a FakeLN run ask c alone: one program serves all its gates.
    now_at = 1.0 if cuts else gate if fixed else state.gate
    now = self._loss(params, state.taper.c, now_at)
    values = {"valid_loss": now["loss"], "gate": gate}
    if not tapers and not cuts or gate == 0.0:
      values["valid_loss_g0"] = now["loss"]
    elif not self._calibrated(k):
      values["valid_loss_g0"] = None  # g = 0 does not exist before calibration
    else:
      # Far from gate 0 a model need not hold there: training goes on.
      at_zero = self._loss(params, state.taper.c, 0.0)["loss"]
      values["valid_loss_g0"] = at_zero if math.isfinite(at_zero) else None
    for name in ("bits_per_byte", "mean_scale", "logit_norm"):
      values[name] = now[name]
    if self.mesh is not None:  # the rest runs on one device
      params, taper = sharding.to_host((params, state.taper))
      state = state.replace(params=params, taper=taper)
    if not self.main:
      return values, now
    values |= self._anchor(params, state)
    if metrics_lib.finite(values) is None:
      at = self._sample_gate(k, gate)
      values["sample"] = self._sample(
        params, self.config.model, at, state.taper.c, seed
      )
    return values, now

  def _anchor(self, params, state: state_lib.TrainState) -> dict[str, float]:
    """What pulls at the pre-logit stream, on the first validation batch."""
    config, k = self.config, int(state.step)
    weight = 0.0
    if config.uses_scale_loss and (config.cuts or self._calibrated(k)):
      weight = step_lib.scale_loss_weight(config.taper, float(state.gate))
    found = self.anchor(
      params,
      state.taper.c,
      jnp.float32(1.0 if config.cuts else state.gate),  # one program for all
      state.taper.scale_target,
      weight,
      *next(iter(self._valid_batches())),
    )
    values = {name: v.tolist() for name, v in jax.device_get(found).items()}
    rms = values.pop("residual_rms")
    values |= {f"residual_rms/{n}": x for n, x in enumerate(rms)}
    return strict(values)  # a measure: that it overflows stops no run

  def _calibrated(self, k: int) -> bool:
    return self.config.tapers and k >= self.config.taper_steps.start

  def _sample_gate(self, k: int, gate: float) -> float:
    """The paper evaluates at gate 0, where that exists."""
    if self.config.cuts:
      return gate
    return 0.0 if self._calibrated(k) else 1.0

  def _say_evaluated(self, k: int, found: list[dict[str, Any]]) -> None:
    """A line on the validation, and a sample of the first seed."""
    gate, ends = found[0]["gate"], self.config.ends_without_norms
    text = f"step {k}: validation loss "
    text += mean_text([values["valid_loss"] for values in found])
    if ends:
      text += f" at gate {gate:.3g}"
    if self._calibrated(k) and gate > 0.0:
      at_zero = [values["valid_loss_g0"] for values in found]
      text += ", not finite" if None in at_zero else f", {mean_text(at_zero)}"
      text += " at gate 0"
    say(text, self.progress)
    if k < self.config.steps:  # the last sample is that of the closing table
      label = "  sample: "
      if ends:
        label = f"  sample at gate {self._sample_gate(k, gate):.3g}: "
      say(wrap_sample(label, found[0]["sample"]), self.progress)

  def _sample(self, params, model_config, gate: float, c, seed: int) -> str:
    """A short story of a model."""
    config, tokenizer = self.config, self.data.tokenizer
    prompt = self._prompt()
    room = config.context_len - len(prompt)
    ids = decode.generate(
      params,
      model_config,
      [prompt],
      max_new=min(config.eval.sample_tokens, room),
      gate=gate,
      c=c,
      sampling=SAMPLING,
      seed=seed,
      stop_ids=(tokenizer.eos_id,),
    )
    text = config.eval.prompt
    return text + tokenizer.decode(ids[0], continues=bool(text))

  def _prompt(self) -> list[int]:
    """Ids of the prompt of sampled stories; never empty."""
    config, tokenizer = self.config, self.data.tokenizer
    prompt = tokenizer.encode_prompt(config.eval.prompt)
    if len(prompt) >= config.context_len:
      raise UserError(
        f"eval.prompt={config.eval.prompt!r} of {len(prompt)} tokens leaves no "
        f"room in context_len={config.context_len}; shorten it, or raise "
        "context_len"
      )
    return prompt

  def _wall(self) -> float:
    return self.earlier_s + time.monotonic() - self.began

  def _check_update(self, state: state_lib.TrainState) -> None:
    """The loss of a step was finite, but its update may not be."""
    k, tree = _step_of(state), (state.params, state.opt_state, state.taper)
    if not self.many:
      if not _all_finite(tree):
        self._check_finite(k, {"update": math.nan})
      return
    finite_S = sharding.to_host(jax.vmap(_all_finite)(tree))
    for i, finite in enumerate(finite_S):
      if not finite:
        self._end_seed(i, k, "update")

  def _save(self, state: state_lib.TrainState, valid_loss) -> None:
    k = _step_of(state)
    # Only checkpoints at the final gate compete for best.
    competes = not self.config.ends_without_norms or _gate_of(state) == 0.0
    self.checkpoints.save(
      k,
      state,
      self._meta(state),
      valid_loss=valid_loss if competes else None,
    )
    self.saved_step = k

  def _meta(self, state: state_lib.TrainState) -> dict[str, Any]:
    k = _step_of(state)
    meta = {
      "config": config_lib.to_dict(self.config),
      "model": config_lib.to_dict(self.config.model),
      "step": k,
      "gate": _gate_of(state),
      "scale_target": _json(
        self._live(sharding.to_host(state.taper.scale_target))
      ),
      "seed": list(self.seeds) if self.many else self.seeds[0],
      "data_hashes": self.data.hashes,
      "valid_tokens": self._relative(self.data.valid.path),
      "interval": {name: _json(v) for name, v in self.interval.items()},
      "wall_s": self._wall(),
      "commit": commit(),
      "versions": versions(),
    }
    if self.config.nonfinite == "skip":
      meta["skipped"] = self.skipped
    return meta | ({"diverged": self.diverged} if self.many else {})

  def _relative(self, path: pathlib.Path) -> str:
    """A path that a moved workdir, or a moved grid, takes along."""
    path, here = path.absolute(), self.workdir.absolute()
    inside = any(path.is_relative_to(p) for p in (here, self.shared.absolute()))
    return os.path.relpath(path, here) if inside else str(path)

  def _finish(self, state: state_lib.TrainState) -> dict[str, Any] | None:
    """Folds, compares, measures decoding, writes and prints the summary."""
    config = self.config
    if self.main:
      workdir_lib.check_there(self.workdir)
    valid = self.final_valid or [None] * len(self.seeds)
    if config.ends_without_norms:
      say("folding, and comparing with the unfolded model")
    rows, forms = [], None
    for i, ended in enumerate(self.diverged):
      row = None
      if not ended:
        one = self._one(state, i)
        if valid[i] is None:  # resumed after the last step: it is written
          at = 1.0 if config.cuts else _gate_of(state)  # as in _evaluate_seed
          valid[i] = self._loss(self._plain(one), one.taper.c, at)
        if self.mesh is not None:  # one process folds, on one device
          one = one.replace(key=None, opt_state=None)
          one = sharding.to_host(one)
        if not self.main:
          continue
        row, seed_forms = self._result(one, i, valid[i])
        forms = forms or seed_forms  # every seed decodes as fast
      rows.append(row)
    if not self.main:
      return None
    total, taper_gains = model.count_params(forms["unfolded"][0])
    folded = None
    if "folded" in forms:
      folded = model.count_params(forms["folded"][0])[0]
    say("measuring decoding")
    summary = {
      "variant": config.variant,
      "norm": config.norm,
      "size": config.size,
      "seed": list(self.seeds) if self.many else self.seeds[0],
      "steps": config.steps,
      "tokens": config.steps * config.batch_size * config.context_len,
      "params": total,
      "params_taper": taper_gains,
      "params_folded": folded,
      "gate": _gate_of(state),
      **(by_seed(rows) if self.many else rows[0]),
      "decode": self._decode_speed(forms),
      "wall_s": self._wall(),
      "commit": commit(),
      "device": jax.devices()[0].device_kind,
      "cpu_count": os.cpu_count(),
      "versions": versions(),
    }
    if self.many:
      summary["diverged"] = [k or None for k in self.diverged]
    if config.nonfinite == "skip":
      summary["skipped_steps"] = self.skipped
    workdir_lib.check_there(self.workdir)
    write_json(self.workdir / "summary.json", summary)
    print_table(summary)
    say(f"wrote {self.workdir}; go on with `taperjax generate {self.workdir}`")
    return summary

  def _result(
    self,
    state: state_lib.TrainState,
    i: int,
    valid: dict[str, Any],
  ) -> tuple[dict[str, Any], dict[str, tuple]]:
    """What the summary says of one seed, and its forms; writes the folded."""
    config, model_config = self.config, self.config.model
    final_gate, seed = float(state.gate), self.seeds[i]
    ends = config.ends_without_norms
    if ends and final_gate > 0.0:
      raise AssertionError("the last step of a tapered run has gate 0")
    params, c = self._plain(state), state.taper.c
    if config.cuts:
      params, c, model_config = fakeln.to_taper(
        *jax.device_get((params, c)), model_config
      )
    last = (params, model_config, final_gate, c)
    forms = {"unfolded": last}
    row = {
      "valid_loss": valid["loss"],
      "valid_loss_g0": valid["loss"],
      "valid_loss_folded": None,
      "bits_per_byte": valid["bits_per_byte"],
      "valid_tokens": valid["tokens"],
      "scale_target": float(state.taper.scale_target) if ends else None,
      "mean_scale": valid["mean_scale"],
      "logit_norm": valid["logit_norm"],
      "c": saved.site_factors(model_config, c),
      "fold": None,
    }
    if ends:
      folder, meta = self.workdir / "folded", self._meta(state)
      if self.many:
        folder, meta = folder / f"seed_{seed}", saved.seed_meta(meta, i)
      report, folded = saved.write_folded(
        folder,
        saved.Model(
          params=jax.device_get(params),
          config=model_config,
          c=jax.device_get(c),
          gate=final_gate,
          tokenizer=self.data.tokenizer,
          step=int(state.step),
          meta=meta,
        ),
        self._valid_batches,
      )
      folded_step = step_lib.make_eval_step(folded.config)
      loss = self._loss(folded.params, None, 1.0, folded_step)
      row["valid_loss_folded"] = loss["loss"]
      row["fold"] = report["errors"]
      last = forms["folded"] = (folded.params, folded.config, 1.0, None)
    return row | {"sample": self._sample(*last, seed)}, forms

  def _decode_speed(self, forms: dict[str, tuple]) -> dict[str, Any]:
    """Median tokens per second of each form, measured in turn, batch of 1."""
    context = self.config.context_len
    shape = {"batch_size": 1, "prompt_len": min(16, context - 1)}
    shape["new_tokens"] = min(64, context - shape["prompt_len"])
    rates = {"unfolded": [], "folded": []}
    for _ in range(DECODE_REPEATS):
      for name, (params, model_config, gate, c) in forms.items():
        rates[name].append(
          decode.tokens_per_second(
            params, model_config, gate=gate, c=c, repeats=1, **shape
          )
        )
    medians = {
      f"{name}_tokens_per_s": statistics.median(found) if found else None
      for name, found in rates.items()
    }
    return medians | shape | {"repeats": DECODE_REPEATS}


class _Silent:
  """Metrics and progress of a process that writes nothing."""

  def __enter__(self) -> _Silent:
    return self

  def __exit__(self, *exc_info: object) -> None:
    pass

  def close(self) -> None:
    pass

  def write(self, *record: Any) -> None:
    pass

  def update(self, *step: Any, **values: Any) -> None:
    pass


def say(text: str, progress: metrics_lib.Progress | None = None) -> None:
  """`summary.say` of process 0 alone."""
  if jax.process_index() == 0:
    summary_lib.say(text, progress)


class _Rate:
  """Training tokens per second of all seeds, without evaluation and saving."""

  def __init__(self, config: Config):
    self.tokens = config.batch_size * config.context_len * len(config.seeds)
    self.last: float | None = None  # the newest answer of `take`
    self.skip()

  def skip(self) -> None:
    self.since, self.steps = time.monotonic(), 0

  def tick(self) -> None:
    self.steps += 1

  def take(self) -> float | None:
    now = time.monotonic()
    seconds = now - self.since
    rate = self.steps * self.tokens / seconds if seconds > 0 else None
    self.since, self.steps, self.last = now, 0, rate
    return rate


_SKIPS_IN_A_ROW = 10  # as many and the run stops: it learns nothing


def _empty_interval() -> dict[str, Any]:
  return {"loss": 0.0, "scale_loss": 0.0, "clipped": 0.0, "count": 0}


def _step_of(state: state_lib.TrainState) -> int:
  """The step of a state, equal for all seeds."""
  return int(sharding.to_host(state.step).reshape(-1)[0])


def _gate_of(state: state_lib.TrainState) -> float:
  return float(sharding.to_host(state.gate).reshape(-1)[0])


def _json(value: Any) -> Any:
  """A number, or a list by seed with None for NaN."""
  if np.ndim(value):
    return [None if math.isnan(x) else x for x in value.tolist()]
  return value.tolist() if hasattr(value, "tolist") else value


@jax.jit
def _all_finite(tree: Any) -> jax.Array:
  """Whether no number in the tree is NaN or infinite."""
  leaves = [jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(tree)]
  return jnp.all(jnp.stack(leaves))


def check_same_config(config: Config, before: dict[str, Any]) -> None:
  """Raises with the list of differences from a saved configuration."""
  if different := different_fields(config, before):
    raise UserError(
      f"the configuration differs from the saved run in {len(different)} "
      f"field(s) ({'; '.join(different)}); restore them, choose another "
      "--workdir, or start afresh with --overwrite"
    )


def different_fields(config: Config, before: dict[str, Any]) -> list[str]:
  """"NAME: saved X, now Y" of every field that a saved run has otherwise."""

  def flat(fields, prefix=""):
    for name, value in fields.items():
      if isinstance(value, dict):
        yield from flat(value, f"{prefix}{name}.")
      else:
        yield prefix + name, value

  def flat_config(config):  # a run may go on, on other devices
    fields = flat(config_lib.to_dict(config))
    return {n: v for n, v in fields if not n.startswith("mesh.")}

  now = flat_config(config)
  # A group of fields younger than the saved run has its defaults there.
  saved_config = config_lib.config_from_dict(before)
  before = flat_config(saved_config)
  return [
    f"{name}: saved {before.get(name)!r}, now {now.get(name)!r}"
    for name in sorted(now.keys() | before.keys())
    if now.get(name) != before.get(name)
  ]
