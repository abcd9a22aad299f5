"""jax.export artifacts of prefill and of one decode step, for cpu and cuda.

Axes: B rows, L padded prompt length, M cache length, V vocabulary; B and L
are symbols of the artifacts. A slot of the cache is a position, so rows of
unequal length need no mask (see `decode`).
"""

from __future__ import annotations

import contextlib
import importlib.resources
import pathlib
from typing import Any

import flax.traverse_util
import jax
import jax.numpy as jnp

from taperjax import config as config_lib, model
from taperjax.config import ModelConfig
from taperjax.errors import UserError
from taperjax.interop import bare
from taperjax.summary import write_json

PLATFORMS = ("cpu", "cuda")
FORMS = ("arguments", "constants")
MAX_CONSTANTS = 2**30  # bytes; a serialized artifact must stay below 2 GiB


def export(
  params: dict,
  config: ModelConfig,
  *,
  dtype: str,
  weights: str = "arguments",
) -> tuple[dict[str, Any], dict[str, Any]]:
  """(artifacts, tensors): `jax.export.Exported` by name, weights by path.

  With weights as arguments:

      prefill(tensors, tokens_BL, length_B) -> logits_BV, cache
      decode(tensors, token_B, position_B, cache) -> logits_BV, cache

  and as constants the same without `tensors`. Ids, lengths and positions are
  int32, logits float32, L at most context_len; `cache` is of the weights'
  dtype, (k_BMGK, v_BMGK) for each layer, M = context_len. Prompts are padded
  on the right by any id, and the logits are those behind each row's last token.

  Raises:
    UserError: see `write`.
  """
  import jax.export

  bare.refuse_tapers(config)
  if weights not in FORMS:
    raise UserError(f"weights={weights!r} is not one of {', '.join(FORMS)}")
  if dtype == "float16":
    raise UserError(
      "dtype=float16: jax has no float16 attention for cpu, one of the "
      "platforms; use bfloat16 or float32"
    )
  flat, config = bare.flatten(params, config)
  config = config.replace(compute_dtype=dtype)
  tensors = bare.cast(flat, dtype)
  size = sum(x.nbytes for x in tensors.values())
  if weights == "constants" and size > MAX_CONSTANTS:
    raise UserError(
      f"weights=constants: the weights take {size} bytes, and an artifact "
      f"holds {MAX_CONSTANTS} at most; use weights=arguments"
    )
  ints = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.int32)
  b, length = jax.export.symbolic_shape(
    "b, l", constraints=[f"l <= {config.context_len}"]
  )
  (rows,) = jax.export.symbolic_shape("b")  # a scope of its own, without l
  cache = jax.eval_shape(lambda: _cache(config, rows))
  inputs = {
    "prefill": (ints(b, length), ints(b)),
    "decode": (ints(rows), ints(rows), cache),
  }
  shapes = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tensors
  )
  artifacts = {}
  for name, step in (("prefill", _prefill), ("decode", _decode)):
    if weights == "arguments":
      run = lambda tensors, *args, step=step: step(tensors, config, *args)
      args = (shapes, *inputs[name])
    else:
      run = lambda *args, step=step: step(tensors, config, *args)
      args = inputs[name]
    run.__name__ = name
    with _no_source_lines():
      artifacts[name] = jax.export.export(
        jax.jit(run), platforms=PLATFORMS
      )(*args)
  return artifacts, tensors


@contextlib.contextmanager
def _no_source_lines():
  """Keeps this machine's file names out of the artifacts."""
  name = "jax_traceback_in_locations_limit"
  before = getattr(jax.config, name)
  jax.config.update(name, 0)
  try:
    yield
  finally:
    jax.config.update(name, before)


def _cache(config: ModelConfig, batch):
  return model.init_cache(config, batch, config.context_len)


def _prefill(tensors, config, tokens_BL, length_B):
  cache = _cache(config, tokens_BL.shape[0])
  h_BLD, cache = _hidden(tensors, config, tokens_BL, None, cache)
  last_B11 = (length_B - 1)[:, None, None]
  h_BD = jnp.take_along_axis(h_BLD, last_B11, axis=1, mode="clip")[:, 0]
  return _logits(tensors, config, h_BD), cache


def _decode(tensors, config, token_B, position_B, cache):
  h_BLD, cache = _hidden(
    tensors, config, token_B[:, None], position_B[:, None], cache
  )
  return _logits(tensors, config, h_BLD[:, 0]), cache


def _hidden(tensors, config, tokens_BL, position_BL, cache):
  params = flax.traverse_util.unflatten_dict(tensors, sep="/")
  h_BLD, aux = model.Transformer(config).apply(
    {"params": params},
    tokens_BL,
    cache=cache,
    position_BL=position_BL,
    output="hidden",
  )
  return h_BLD, aux["cache"]


def _logits(tensors, config, h_BD):
  """The head on one token of each row, float32."""
  params = flax.traverse_util.unflatten_dict(tensors, sep="/")
  kernel_DV, bias_V = model.head_weights(params, config)
  logits_BV = jnp.dot(h_BD, kernel_DV, preferred_element_type=jnp.float32)
  if bias_V is None:
    return logits_BV
  return logits_BV + bias_V.astype(jnp.float32)[None, :]


def write(
  folder: pathlib.Path,
  params: dict,
  config: ModelConfig,
  *,
  dtype: str,
  weights: str = "arguments",
) -> dict[str, Any]:
  """Writes the artifacts, their weights and a runner into an empty folder.

  Files: prefill.jax_export, decode.jax_export, model.json, runner.py, and
  model.safetensors where weights are arguments.

  Returns:
    `files`, `platforms` and `weights`, for a report.

  Raises:
    UserError: flatbuffers is not installed; a tapered model; float16; weights
      too large for constants.
  """
  try:
    import flatbuffers  # noqa: F401 (jax needs it to serialize)
  except ImportError as error:
    raise UserError(
      "flatbuffers is not installed, and a jax.export artifact is written "
      "with it; pip install 'taperjax[export]'"
    ) from error
  artifacts, tensors = export(params, config, dtype=dtype, weights=weights)
  files = ["model.json", "runner.py"]
  for name, artifact in artifacts.items():
    files.append(f"{name}.jax_export")
    (folder / files[-1]).write_bytes(artifact.serialize())
  if weights == "arguments":
    files.append(bare.WEIGHTS)
    bare.save(folder / bare.WEIGHTS, tensors)
  runner = importlib.resources.files("taperjax.interop") / "files"
  text = (runner / "stablehlo_runner.py").read_text(encoding="utf-8")
  (folder / "runner.py").write_text(text, encoding="utf-8")
  write_json(folder / "model.json", {
    "format": "taperjax-stablehlo",
    "version": 1,
    "dtype": dtype,
    "weights": weights,
    "platforms": list(PLATFORMS),
    "context_len": config.context_len,
    "vocab_size": config.vocab_size,
    "config": config_lib.to_dict(config),
  })
  return {"files": sorted(files), "platforms": list(PLATFORMS),
          "weights": weights}
