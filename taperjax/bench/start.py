"""What comes before the steps of a run: start-up, tokenizing, batches."""

from __future__ import annotations

import pathlib
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

from taperjax import data as data_lib, saved, workdir as workdir_lib
from taperjax.bench import train
from taperjax.config import Config
from taperjax.data import windows
from taperjax.errors import UserError

MEASURES = 4  # as `progress` counts them
_BATCHES = 100


def run(
  config: Config,
  argument: str,
  options: Sequence[str],
  script: str,
  *,
  repeats: int,
  progress: Callable[[int], None] = lambda done: None,
) -> dict[str, Any]:
  """Measures in a temporary folder, which gets the tokens and two runs.

  Args:
    config: of `argument` and `options`, its vocabulary aside.
    argument: FILE[:ARGUMENT], as train.py takes it.
    options: --config.NAME=VALUE.
    script: path of train.py.
    repeats: timed training steps.
    progress: told how many of `MEASURES` are done.

  Returns:
    help_s: of train.py --help. first_step_cold_s, first_step_warm_s: from the
    start of the process until the first step is logged, its tokens at hand,
    with an empty and with a full compilation cache. train_bytes,
    tokenize_bytes_per_s: of the training text, ids written, the tokenizer
    trained before. batch_ms, step_ms: medians of making a batch and of a
    training step; stall, their ratio: what making batches would cost, were it
    not done while the step before runs.

  Raises:
    UserError: the data, or a run that ends before its first step.
  """
  if not pathlib.Path(script).is_file():
    raise UserError(
      f"--script={script} is not there; run this in the clone, or name its "
      "train.py"
    )
  found = {"help_s": _help_seconds(script)}
  progress(1)
  with tempfile.TemporaryDirectory() as name:
    workdir = workdir_lib.open_workdir(pathlib.Path(name) / "run", "start")
    tokens = workdir / "data"
    data, found["tokenize_bytes_per_s"] = _tokenize(config, tokens)
    found["train_bytes"] = data.train.meta["source_size"]
    progress(2)
    command = [
      sys.executable, script, f"--config={argument}", *options,
      f"--workdir={workdir}",
    ]
    if config.data.folder is not None:
      command.append(f"--config.data.folder={tokens}")
    for kind in ("cold", "warm"):
      found[f"first_step_{kind}_s"] = _first_step_seconds(command)
    progress(3)
    config = config.with_vocab(
      data.tokenizer.vocab_size, data.tokenizer.eos_id
    )
    found["batch_ms"] = 1e3 * _batch_seconds(config, data.train.tokens)
  timer = train.Timer(config, "norm")
  seconds = [timer.seconds() for _ in range(repeats + 1)][1:]
  found["step_ms"] = 1e3 * statistics.median(seconds)
  found["stall"] = found["batch_ms"] / found["step_ms"]
  progress(MEASURES)
  return found


def _help_seconds(script: str) -> float:
  begin = time.perf_counter()
  done = subprocess.run(
    [sys.executable, script, "--help"], check=False, capture_output=True
  )
  seconds = time.perf_counter() - begin
  if b"--config" not in done.stdout + done.stderr:  # its exit code is 1
    raise UserError(
      f"--script={script} --help names no --config; give train.py of a clone"
    )
  return seconds


def _tokenize(
  config: Config, folder: pathlib.Path
) -> tuple[data_lib.Data, float]:
  """The data of a run, and bytes a second of its training text, made twice."""
  data, tokenizer = config.data, config.data.tokenizer
  if tokenizer == "init":  # as a run resolves it
    tokenizer = str(saved.tokenizer_folder(config.init.checkpoint))
  load = lambda: data_lib.load_data(
    train=data.train, valid=data.valid, tokenizer=tokenizer,
    vocab_size=data.vocab_size, folder=folder, seed=0,
    corpus_stories=data.corpus_stories, log=lambda line: None,
  )
  load().train.path.unlink()
  begin = time.perf_counter()
  found = load()  # only these ids are missing
  seconds = time.perf_counter() - begin
  return found, found.train.meta["source_size"] / seconds


def _first_step_seconds(command: list[str]) -> float:
  """Starts a run, and ends it at its first line on step 1."""
  begin = time.perf_counter()
  with subprocess.Popen(
    command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
  ) as process:
    last = ""
    for line in process.stdout:
      if re.match(r"step 1/", line):
        seconds = time.perf_counter() - begin
        process.kill()
        return seconds
      last = line.strip() or last
  raise UserError(f"train.py ended before its first step: {last}")


def _batch_seconds(config: Config, tokens) -> float:
  seconds = []
  for step in range(1, _BATCHES + 1):
    begin = time.perf_counter()
    windows.train_batch(
      tokens, seed=config.seeds[0], step=step, batch_size=config.batch_size,
      context_len=config.context_len,
    )
    seconds.append(time.perf_counter() - begin)
  return statistics.median(seconds)
