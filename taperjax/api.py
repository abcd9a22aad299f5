"""The Python interface: load or init, apply, calibrate, fold, generate, ...

All functions take a `Model` and return arrays, numbers or a new `Model`; none
changes its arguments.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from taperjax import (
  calibration,
  decode,
  evaluation,
  fakeln,
  folding,
  int8,
  model as model_lib,
  probing,
  step as step_lib,
  tails,
)
from taperjax.config import ModelConfig
from taperjax.data import windows
from taperjax.data.tokenizer import Tokenizer
from taperjax.errors import UserError
from taperjax.saved import Model, load

MAX_NEW = 200  # tokens, where nobody says how many

__all__ = [
  "Model",
  "apply",
  "as_int8",
  "calibrate",
  "evaluate",
  "evaluate_tails",
  "fold",
  "generate",
  "init",
  "load",
  "probe",
]


def init(
  config: ModelConfig, seed: int = 0, tokenizer: Tokenizer | None = None
) -> Model:
  """A model with fresh parameters; `config.parse(...).model` gives a config."""
  params = jax.jit(model_lib.init_params, static_argnums=0)(
    config, jax.random.key(seed)
  )
  c_S = np.zeros(2 * config.num_layers + 1, np.float32)
  if config.internal_norm == "fake":
    c_S = fakeln.init(config.num_layers).c
  return Model(params, config, c_S, gate=1.0, tokenizer=tokenizer)


def check_gate(model: Model, gate: float | None) -> float:
  """The gate to use: the model's own unless told; 0.0 and 1.0 are exact."""
  if not model.tapered:
    if gate is not None:
      raise UserError(
        f"gate={gate:g} has no effect: no norm of this model is tapered; leave "
        "it out"
      )
    return 1.0
  if model.cutting:
    if gate is not None:
      raise UserError(
        f"gate={gate:g} has no effect: the norms of a FakeLN run are cut one "
        "by one; leave it out, or give a later step"
      )
    return model.gate
  gate = float(model.gate if gate is None else gate)
  if not 0.0 <= gate <= 1.0:
    raise UserError(
      f"gate={gate:g} is not between 0 and 1; 0 is without norms, 1 with all"
    )
  if gate < 1.0 and not model.calibrated:
    raise UserError(
      f"gate={gate:g} does not exist before calibration (this model is at step "
      f"{model.step}); use gate 1 or a later checkpoint"
    )
  return gate


def _gate_argument(gate: float) -> float | jax.Array:
  """Ends stay Python floats, so that one branch is built; see norms."""
  return gate if gate in (0.0, 1.0) else jnp.float32(gate)


@functools.partial(jax.jit, static_argnums=(0, 2))
def _logits(config, params, gate, traced_gate, c, tokens_BL):
  gate = traced_gate if gate is None else gate
  return model_lib.Transformer(config).apply(
    {"params": params}, tokens_BL, gate=gate, c=c
  )[0]


def apply(
  model: Model, tokens_BL: np.ndarray, gate: float | None = None
) -> jax.Array:
  """Logits of a batch of token ids, (B, L) to (B, L, V), float32.

  Args:
    model: any model.
    tokens_BL: ids below the vocabulary size, L at most the context.
    gate: of the tapered norms; the model's own unless told.
  """
  gate = check_gate(model, gate)
  _check_tokens(model, tokens_BL)
  fixed = gate if gate in (0.0, 1.0) else None
  return _logits(
    model.config,
    model.params,
    fixed,
    jnp.float32(gate),
    jnp.asarray(model.c),
    jnp.asarray(tokens_BL, jnp.int32),
  )


def _check_tokens(model: Model, tokens_BL: np.ndarray) -> None:
  """A batch that the model can read."""
  shape = np.shape(tokens_BL)
  if len(shape) != 2 or not 0 < shape[1] <= model.config.context_len:
    raise UserError(
      f"tokens of shape {shape} are not (batch, length) with length from 1 to "
      f"context_len={model.config.context_len}"
    )
  _check_ids(model, tokens_BL)


def _check_ids(model: Model, ids: np.ndarray) -> None:
  """Whole numbers that the vocabulary holds; jax would clamp the others."""
  ids = np.asarray(ids)
  if not np.issubdtype(ids.dtype, np.integer):
    raise UserError(
      f"tokens of dtype {ids.dtype} are no ids; give whole numbers, for "
      "example an int32 array"
    )
  if ids.size and not 0 <= ids.min() <= ids.max() < model.config.vocab_size:
    raise UserError(
      f"token ids from {ids.min()} to {ids.max()} do not fit vocabulary "
      f"{model.config.vocab_size}; use the model's own tokenizer"
    )


@functools.partial(jax.jit, static_argnums=0)
def _statistics(config, params, tokens_BL, mask_BL):
  _, aux = model_lib.Transformer(config).apply(
    {"params": params},
    tokens_BL,
    gate=1.0,
    mask_BL=mask_BL,
    output="hidden",
  )
  return aux["sums_S2"], jnp.sum(mask_BL * aux["scale_BL"]), jnp.sum(mask_BL)


def calibrate(
  model: Model, batches: Iterable[tuple[np.ndarray, np.ndarray]]
) -> Model:
  r"""c, s_tgt and gamma~ <- gamma from a stream of batches; the gate becomes 0.

  Exact sums over all tokens in place of the moving averages of training:
  c = E[|h gamma|^2 / r] / E[|h gamma|^2] (arXiv:2602.10408 (v1), Eq. 4 and 7),
  every norm before calibration in place.

  Args:
    model: with tapered norms (`internal_norm` or `final_norm` "taper").
    batches: (tokens (B, L) int32, mask (B, L)), as many as you like.

  Returns:
    The model with c, at gate 0. `meta["scale_target"]` is the mean s(h).
  """
  if not model.config.tapered_sites:
    raise UserError(
      "nothing to calibrate: no norm of this model is tapered; set "
      "internal_norm or final_norm to 'taper' in its config"
    )
  if model.gate < 1.0:
    raise UserError(
      f"gate={model.gate:g}: this model is past its taper start, and to "
      "calibrate again would undo its training; calibrate one at gate 1"
    )
  sums_S2, scale, tokens = 0.0, 0.0, 0.0
  for tokens_BL, mask_BL in batches:
    if np.shape(tokens_BL) != np.shape(mask_BL):
      raise UserError(
        f"tokens of shape {np.shape(tokens_BL)} and mask of shape "
        f"{np.shape(mask_BL)} differ; give one weight for each token (of a "
        "window with targets, tokens[:, :-1])"
      )
    _check_tokens(model, tokens_BL)
    weights = np.asarray(mask_BL, np.float64)
    if not np.all(np.isfinite(weights) & (weights >= 0)):
      raise UserError(
        "a mask holds numbers that are negative or not finite; give weights, "
        "0 for padding and 1 for a token that counts"
      )
    parts = _statistics(
      model.config,
      model.params,
      jnp.asarray(tokens_BL, jnp.int32),
      jnp.asarray(mask_BL, jnp.float32),
    )
    parts = [np.asarray(part, np.float64) for part in parts]
    sums_S2, scale, tokens = (
      sums_S2 + parts[0], scale + parts[1], tokens + parts[2]
    )
  if not tokens:
    raise UserError("nothing to calibrate on: the batches hold no token")
  num_S, den_S = sums_S2.T / tokens
  c_S = num_S / (den_S + calibration.CALIBRATION_EPS)
  return model.replace(
    params=calibration.copy_gains(model.params),
    c=c_S.astype(np.float32),
    gate=0.0,
    meta={**model.meta, "scale_target": float(scale / tokens)},
  )


def fold(model: Model) -> Model:
  """The same function without its tapered norms (sections 3.3, B of the paper).

  Raises:
    UserError: the gate is above 0, nothing is tapered, or it is folded already.
  """
  folding.check_foldable(model.gate, model.step, model.config)
  params, config = folding.fold(model.params, model.c, model.config)
  return model.replace(params=params, config=config)


def as_int8(model: Model) -> Model:
  """The model as int8 decoding sees it, in floats: to measure its loss.

  Raises:
    UserError: the middle of a FakeLN run, which has no int8 decoding.
  """
  int8.check("int8", model.config)
  return model.replace(params=int8.rounded(model.params, model.config))


def generate(
  model: Model,
  prompts: Sequence[str],
  *,
  max_new: int | None = None,
  gate: float | None = None,
  temperature: float = 0.0,
  top_k: int = 0,
  top_p: float = 1.0,
  seed: int = 0,
  window: bool = False,
  weights: str = "float",
) -> list[str]:
  """Continuations of texts, without the prompts; stops at end of text.

  An empty prompt starts a new text. Without `max_new` up to 200 tokens come, or
  as many as the context has room for; other arguments as in `decode.generate`.
  """
  ids = generate_ids(
    model,
    encode_prompts(model, prompts),
    max_new=max_new,
    gate=gate,
    sampling=decode.Sampling(temperature, top_k, top_p),
    seed=seed,
    window=window,
    weights=weights,
  )
  return [
    model.tokenizer.decode(row, continues=bool(prompt))
    for prompt, row in zip(prompts, ids, strict=True)
  ]


def encode_prompts(model: Model, prompts: Sequence[str]) -> list[list[int]]:
  """Ids of each prompt; what begins a text if it is empty."""
  if model.tokenizer is None:
    raise UserError("this model has no tokenizer; use generate_ids with ids")
  return [model.tokenizer.encode_prompt(prompt) for prompt in prompts]


def generate_ids(
  model: Model,
  prompts: list[list[int]],
  *,
  max_new: int | None = None,
  gate: float | None = None,
  sampling: decode.Sampling,
  seed: int = 0,
  window: bool = False,
  weights: str = "float",
) -> list[list[int]]:
  """`generate` on token ids."""
  if max_new is None:
    max_new = _room(model, prompts, window)
  return decode.generate(
    model.params,
    model.config,
    prompts,
    max_new=max_new,
    sampling=sampling,
    seed=seed,
    window=window,
    weights=weights,
    **_run_arguments(model, gate),
  )


def stream_ids(
  model: Model,
  prompt: list[int],
  *,
  max_new: int | None = None,
  gate: float | None = None,
  sampling: decode.Sampling,
  seed: int = 0,
  window: bool = False,
  weights: str = "float",
) -> Iterator[list[int]]:
  """The same ids as `generate_ids` for one prompt, block by block."""
  if max_new is None:
    max_new = _room(model, [prompt], window)
  return decode.generate_stream(
    model.params,
    model.config,
    prompt,
    max_new=max_new,
    sampling=sampling,
    seed=seed,
    window=window,
    weights=weights,
    **_run_arguments(model, gate),
  )


def _room(model: Model, prompts: list[list[int]], window: bool) -> int:
  """Tokens to generate where nobody says how many."""
  longest = max(map(len, prompts), default=0)
  room = model.config.context_len - longest
  return MAX_NEW if window else max(1, min(MAX_NEW, room))


def _run_arguments(model: Model, gate: float | None) -> dict[str, Any]:
  stop = () if model.tokenizer is None else (model.tokenizer.eos_id,)
  return {
    "gate": _gate_argument(check_gate(model, gate)),
    "c": jnp.asarray(model.c),
    "stop_ids": stop,
  }


def evaluate(
  model: Model,
  tokens: np.ndarray,
  *,
  gate: float | None = None,
  batch_size: int = 16,
  max_windows: int | None = None,
) -> dict[str, float | int | None]:
  """Token-mean loss of one stream of ids on fixed windows of the context.

  Returns:
    loss (nats per token), bits_per_byte (None without a tokenizer), tokens,
    mean_scale, logit_norm; see `evaluation.evaluate`.
  """
  batches = windows.eval_batches(
    tokens,
    batch_size=batch_size,
    context_len=model.config.context_len,
    max_windows=max_windows,
  )
  return evaluate_batches(model, batches, gate=gate)


def _id_bytes(model: Model) -> np.ndarray:
  """Bytes of each id; rows of a padded embedding stand for no text."""
  lengths = model.tokenizer.id_bytes()
  return np.pad(lengths, (0, model.config.vocab_size - len(lengths)))


def evaluate_batches(
  model: Model, batches: evaluation.Batches, *, gate: float | None = None
) -> dict[str, float | int | None]:
  """`evaluate` on batches of (tokens (B, L + 1), mask (B, L))."""
  gate = check_gate(model, gate)
  return evaluation.evaluate(
    step_lib.make_eval_step(model.config),
    model.params,
    _checked(model, batches),
    c=jnp.asarray(model.c),
    gate=_gate_argument(gate),
    id_bytes=None if model.tokenizer is None else _id_bytes(model),
  )


def evaluate_tails(
  model: Model,
  batches: evaluation.Batches,
  *,
  gate: float | None = None,
  reference: Model | None = None,
) -> dict[str, Any]:
  """`evaluate_batches` and all that a mean does not show; see `tails.evaluate`.

  Args:
    model, batches, gate: as for `evaluate_batches`.
    reference: the model to compare the predictions with, at its own gate.

  Raises:
    UserError: the reference reads other ids, or shorter texts.
  """

  def side(model, gate=None):
    gate = check_gate(model, gate)
    return tails.Side(model.config, gate, model.params, model.c)

  other = None if reference is None else side(reference)
  return tails.evaluate(
    side(model, gate),
    _checked(model, batches, reference),
    tokenizer=model.tokenizer,
    id_bytes=None if model.tokenizer is None else _id_bytes(model),
    reference=other,
  )


def probe(
  model: Model,
  tokens: np.ndarray,
  *,
  calibration_tokens: np.ndarray | None = None,
  batch_size: int = 16,
  max_windows: int | None = None,
  context_len: int | None = None,
  show: bool = False,
) -> dict[str, Any]:
  """Which norms are free to remove; see `probing.probe` for what comes back.

  Args:
    model: with norms: untapered, or before its taper, or with some kept.
    tokens: one stream of ids. The first half of its windows calibrates and the
      second is scored.
    calibration_tokens: a stream to calibrate on; all of `tokens` is scored.
    batch_size: windows.
    max_windows: of each stream, the first ones.
    context_len: of the windows; the model's unless told.
    show: progress on standard error.

  Raises:
    UserError: no norm is left, or the stream has fewer than two windows.
  """
  probing.open_sites(model.config, model.gate)  # before a long text is cut
  length = model.config.context_len if context_len is None else context_len
  if calibration_tokens is None:
    calibration_tokens, tokens = probing.halves(tokens, length, max_windows)

  def cut(tokens):
    return list(_checked(model, windows.eval_batches(
      tokens,
      batch_size=batch_size,
      context_len=length,
      max_windows=max_windows,
    )))

  return probing.probe(
    model.params,
    model.config,
    model.c,
    model.gate,
    cut(calibration_tokens),
    cut(tokens),
    show=show,
  )


def _checked(model, batches, reference=None):
  """The batches, if model and reference can read them."""
  if reference is not None:
    name = f"reference={reference.folder}"
    sizes = [m.config.vocab_size for m in (model, reference)]
    prints = {
      m.tokenizer.fingerprint for m in (model, reference) if m.tokenizer
    }
    if sizes[0] != sizes[1] or len(prints) > 1:
      raise UserError(
        f"{name} with vocabulary {sizes[1]:,} has not the tokenizer of the "
        f"model with vocabulary {sizes[0]:,}, so their predictions cannot be "
        "compared; give a checkpoint that reads the same ids"
      )
  for tokens_BL1, mask_BL in batches:
    _check_ids(model, tokens_BL1)
    length = np.shape(tokens_BL1)[1] - 1
    if reference is not None and length > reference.config.context_len:
      raise UserError(
        f"{name} has context_len={reference.config.context_len}, but the "
        f"windows hold {length} tokens; give a reference of that context or "
        "a longer one"
      )
    yield tokens_BL1, mask_BL
