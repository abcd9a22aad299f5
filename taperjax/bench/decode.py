"""Times of greedy decoding: baseline, unfused and folded, in turn.

All three are the same blocks: `baseline` with every norm live, `unfused` the
tapered model at gate 0, where a norm is a fixed map, and `folded` the model
that carries these maps in its matrices.
"""

from __future__ import annotations

import itertools
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from taperjax import decode, drawing, folding, model as model_lib, shapes
from taperjax.bench import roofline, stats
from taperjax.config import ModelConfig, mlp_dim
from taperjax.data import files
from taperjax.errors import UserError

FORMS = ("baseline", "unfused", "folded")
DTYPES = ("float32", "bfloat16", "int8")
_STYLES = {"float32": "-", "bfloat16": "--", "int8": ":"}
_COLOURS = {"baseline": "#888", "unfused": "#4c78a8", "folded": "#f58518"}

Form = tuple[dict, ModelConfig, float, Any]  # params, config, gate, c


def _paper(width: int) -> ModelConfig:
  """A size of configs/tinystories.py: 8 layers of 16 heads."""
  return ModelConfig(
    num_layers=8, embed_dim=width, num_heads=16, num_kv_heads=16,
    head_dim=width // 16, mlp_dim=mlp_dim(width), mlp="swiglu",
    positions="rope", rope_theta=1e4, rotary_dim=width // 16, norm_eps=1e-6,
    biases=(), tied=True, init_std=0.02, scan_layers=False, norm="rms",
    internal_norm="taper", final_norm="taper", vocab_size=10_000,
    context_len=512, compute_dtype="float32",
  )


SHAPES = {
  "1m": _paper(64),
  "3m": _paper(128),
  "9m": _paper(256),
  "30m": _paper(512),
  "gpt2": _paper(768).replace(
    num_layers=12, num_heads=12, num_kv_heads=12, head_dim=64, mlp_dim=3072,
    mlp="gelu_tanh", positions="learned", norm="layer", norm_eps=1e-5,
    biases=("q", "k", "v", "o", "up", "down"), vocab_size=50_257,
    context_len=1024,
  ),
  "llama-1b": _paper(2048).replace(
    **shapes.LLAMA["1b"], vocab_size=shapes.LLAMA_VOCAB, context_len=2048
  ),
}


def random_model(shape: str) -> tuple[dict, ModelConfig, np.ndarray]:
  """(params, config, c) of a shape of `SHAPES`, all norms tapered.

  c is calibrated on a window of random tokens, and the matrices that write to
  the stream are a tenth of fresh ones: a random model of width 256 and more
  without norms would make numbers larger and larger, up to NaN.
  """
  config = SHAPES[shape]
  params = jax.jit(model_lib.init_params, static_argnums=0)(
    config, jax.random.key(0)
  )
  for n in range(config.num_layers):
    block = params[f"block_{n}"]
    for linear in (block["attn"]["o"], block["mlp"]["down"]):
      linear["kernel"] = linear["kernel"] / 10
  rng = np.random.default_rng(0)
  tokens_BL = rng.integers(0, config.vocab_size, (1, 64), np.int32)
  sums_S2 = jax.jit(_calibration, static_argnums=0)(config, params, tokens_BL)
  return params, config, np.asarray(sums_S2[:, 0] / sums_S2[:, 1])


def _calibration(config, params, tokens_BL):
  _, aux = model_lib.Transformer(config).apply(
    {"params": params}, tokens_BL, gate=1.0, mask_BL=jnp.ones(tokens_BL.shape),
    output="hidden",
  )
  return aux["sums_S2"]


def make_forms(
  params: dict, config: ModelConfig, c: Any, names: Sequence[str]
) -> dict[str, Form]:
  """The forms of one model, in the order of their names.

  Raises:
    UserError: no such form of this model.
  """
  if config.internal_norm == "fake":
    raise UserError(
      "internal_norm=fake: the norms of this FakeLN run are cut one by one and "
      "have no forms; bench a finished run of another variant"
    )
  if "baseline" in names and "none" in config.modes:
    raise UserError(
      "--forms=baseline needs the norms, and this model is folded already; "
      "bench the run that it was folded from"
    )
  forms = {}
  for name in names:
    if name == "baseline":
      forms[name] = (params, config, 1.0, None)
    elif name == "unfused":
      folding.check_config(config)
      folding.check_c(np.asarray(c), config)
      forms[name] = (params, config, 0.0, c)
    else:
      forms[name] = (*folding.fold(params, c, config), 1.0, None)
  return forms


def run(
  forms: dict[str, Form],
  *,
  batches: Sequence[int],
  dtypes: Sequence[str],
  prompts: Sequence[int],
  new: int,
  repeats: int,
  bandwidth: float,
  progress: Callable[[int], None] = lambda done: None,
) -> list[dict[str, Any]]:
  """One row for each of the dtypes, batch sizes and prompt lengths.

  Every form is compiled and run once to warm up; then all are timed in turn,
  `repeats` times. A time is that of the compiled loops, one for each length of
  the cache, that make `new` tokens for each row; the prefill is not in it.

  Args:
    forms: from `make_forms`.
    batches: rows. dtypes: compute dtypes; with "int8" the weights are, and the
      compute dtype is the model's own.
    prompts: tokens. new: tokens.
    repeats: timed rounds.
    bandwidth: bytes a second, from `roofline.read_bandwidth`.
    progress: told how many rounds are done, of rows x (repeats + 1).

  Returns:
    batch, dtype, prompt, new, repeats; `forms`: per name tokens_per_s, the
    median, ms_per_token {median, q1, q3} (of a step: one token for each row),
    bytes_per_step, bytes_per_token, roofline (share of the bandwidth),
    reductions (of the traced step), compiled_reductions and kernels (of the
    compiled loop); `ratios`: per pair `first/second` as `stats.paired_ratio`,
    above 1 where the second is faster.
  """
  rows, done = [], 0
  for dtype, batch, prompt in itertools.product(dtypes, batches, prompts):
    timers = {
      name: _timer(form, dtype, batch, prompt, new)
      for name, form in forms.items()
    }
    for timer in timers.values():
      timer.seconds()
    done += 1
    progress(done)
    seconds = {name: [] for name in timers}
    for _ in range(repeats):
      for name, timer in timers.items():
        seconds[name].append(timer.seconds())
      done += 1
      progress(done)
    rows.append({
      "batch": batch, "dtype": dtype, "prompt": prompt, "new": new,
      "repeats": repeats,
      "forms": {
        name: _form_row(timer, seconds[name], bandwidth)
        for name, timer in timers.items()
      },
      "ratios": _ratios(seconds),
    })
  return rows


def _timer(form: Form, dtype, batch, prompt, new) -> decode.GreedyTimer:
  params, config, gate, c = form
  weights = "float"
  if dtype == "int8":
    weights = dtype
  else:
    config = config.replace(compute_dtype=dtype)
  return decode.GreedyTimer.make(
    params, config, gate=gate, c=c, batch_size=batch, prompt_len=prompt,
    new_tokens=new, weights=weights,
  )


def _ratios(seconds: dict[str, list[float]]) -> dict[str, dict[str, Any]]:
  names = list(seconds)
  return {
    f"{first}/{second}": stats.paired_ratio(seconds[first], seconds[second])
    for i, first in enumerate(names) for second in names[i + 1 :]
  }


def _form_row(timer, seconds, bandwidth) -> dict[str, Any]:
  decoder, new, batch = timer.decoder, timer.new_tokens, timer.batch_size
  moved = roofline.step_bytes(
    decoder.packed, decoder.config, batch, timer.prompt_len, new
  )
  step = stats.spread([1e3 * x / new for x in seconds])
  gate = 1.0 if decoder.fixed is None else decoder.fixed
  counts = roofline.compiled_counts(timer.compiled_text())
  return {
    "tokens_per_s": batch * 1e3 / step["median"],
    "ms_per_token": step,
    "bytes_per_step": moved,
    "bytes_per_token": moved / batch,
    "roofline": moved / bandwidth / (step["median"] / 1e3),
    "reductions": roofline.reductions(
      decoder.packed, decoder.config, batch, gate, decoder.c
    ),
    **counts,
  }


def plot(rows: list[dict[str, Any]], title: str, folder: pathlib.Path) -> None:
  """Writes bench.png and bench.svg: the speed of the forms, and their ratios.

  Args:
    rows: from `run`.
    title: one line.
    folder: exists.
  """
  with drawing.drawing({"svg.hashsalt": "taperjax"}):
    figure = _draw(rows, title)
    for kind, metadata in (("png", {}), ("svg", {"Date": None})):
      with files.atomic_write(folder / f"bench.{kind}") as file:
        figure.savefig(file, format=kind, dpi=150, metadata=metadata)


def _draw(rows, title) -> Any:
  from matplotlib.figure import Figure
  from matplotlib.ticker import StrMethodFormatter

  figure = Figure(figsize=(9.0, 4.5), layout="constrained")
  speed, ratio = figure.subplots(1, 2)
  figure.suptitle(title)
  several = len({row["prompt"] for row in rows}) > 1
  (_draw_lengths if several else _draw_batches)(speed, rows)
  form = "{x:g}" if several else "{x:,.0f}"
  for which in ("major", "minor"):  # not powers: those are mathtext
    getattr(speed.yaxis, f"set_{which}_formatter")(StrMethodFormatter(form))
  speed.legend(fontsize=8)
  labels = []
  for row in rows:
    for pair, found in row["ratios"].items():
      at, colour = len(labels), _COLOURS[pair.partition("/")[2]]
      prompt = f"{row['prompt']} " if several else ""
      labels.append(f"{row['batch']} {prompt}{row['dtype']} {pair}")
      if found["low"] is not None:
        ratio.plot([found["low"], found["high"]], [at, at], color=colour)
      ratio.plot(
        found["ratio"], at, marker="o", color=colour, markersize=5,
        fillstyle="full" if found["resolved"] else "none",
      )
  ratio.axvline(1.0, color="#333", linewidth=0.8)
  ratio.set_yticks(range(len(labels)), labels, fontsize=7)
  ratio.set_title("first / second, 95 % (hollow: not resolved)", fontsize=9)
  return figure


def _draw_batches(axes, rows) -> None:
  """Tokens a second over rows."""
  for dtype in dict.fromkeys(row["dtype"] for row in rows):
    own = sorted(
      (row for row in rows if row["dtype"] == dtype), key=lambda r: r["batch"]
    )
    for name in own[0]["forms"]:
      axes.plot(
        [row["batch"] for row in own],
        [row["forms"][name]["tokens_per_s"] for row in own],
        marker="o", markersize=4, linestyle=_STYLES[dtype],
        color=_COLOURS[name], label=f"{name}, {dtype}",
      )
  batches = sorted({row["batch"] for row in rows})
  axes.set_xscale("log", base=2)
  axes.set_yscale("log")
  axes.set_xticks(batches, [str(batch) for batch in batches])
  axes.set_xlabel("rows")
  axes.set_ylabel("tokens a second, all rows")


def _draw_lengths(axes, rows) -> None:
  """Milliseconds of a step over the filled length of the cache."""
  for dtype, batch in dict.fromkeys((r["dtype"], r["batch"]) for r in rows):
    own = sorted(
      (r for r in rows if (r["dtype"], r["batch"]) == (dtype, batch)),
      key=lambda r: r["prompt"],
    )
    for name in own[0]["forms"]:
      axes.plot(
        [row["prompt"] + row["new"] / 2 for row in own],
        [row["forms"][name]["ms_per_token"]["median"] for row in own],
        marker="o", markersize=4, linestyle=_STYLES[dtype],
        color=_COLOURS[name], label=f"{name}, {dtype}, {batch} rows",
      )
  axes.set_yscale("log")
  axes.set_xlabel("filled slots of the cache, mean")
  axes.set_ylabel("ms a step")


def check(config: ModelConfig, prompt: int, new: int) -> None:
  """Raises UserError where the text does not fit the context."""
  if prompt + new > config.context_len:
    raise UserError(
      f"--prompt={prompt} and --new={new} exceed "
      f"context_len={config.context_len} of the model; lower one of them"
    )
