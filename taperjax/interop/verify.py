"""Exports read back in the target's own reader, and how far they are off.

A reader takes (folder, tokens_BL) and gives float32 logits_BLV; one that is
not installed raises `Missing`.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import io
import json
import pathlib
import sys
import tempfile
import unittest.mock
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from taperjax import model as model_lib, saved
from taperjax.config import ModelConfig
from taperjax.errors import UserError
from taperjax.interop import transformer_lens

# Largest |delta logit| in float32, for a logit standard deviation of 1; larger
# logits have a bound in proportion. 1e-4 is a tenth of what the mistakes give
# that hide best (erf-gelu for tanh-gelu 1.1e-3, eps 1e-6 for 1e-5 3.4e-3), and
# above what another order of summation leaves.
BOUND = 1e-4
# The mean over +-C costs the LayerNorm ballast digits of float32.
LAYER_BALLAST_BOUND = 1e-3
# Mean KL of the stored dtype, nats per token, ours: rounding to bfloat16 gives
# about 1e-3; a tensor lost in the cast gives more than this.
STORED_KL_BOUND = 0.05
MIN_POSITIONS = 300


class Missing(Exception):
  """The reader is not installed; the text says what to install."""


@contextlib.contextmanager
def needs(package: str) -> Iterator[None]:
  """Around imports: raises `Missing` where the package is not installed."""
  try:
    yield
  except ModuleNotFoundError as error:
    if error.name is None or error.name.split(".")[0] != package:
      raise
    raise Missing(f"{package} is not installed") from error


def one_line(error: BaseException) -> str:
  """Why another program is not there, short enough for a table's note."""
  return " ".join(str(error).split())[:200] or type(error).__name__


def torch_device(torch: Any) -> tuple[str, str]:
  """The device, of the kind that jax uses, and it with versions in words."""
  gpu = jax.default_backend() == "gpu" and torch.cuda.is_available()
  where = "cuda" if gpu else f"{torch.get_num_threads()} threads"
  text = f"{version('transformers')}, {version('torch')}, {where}"
  return "cuda" if gpu else "cpu", text


def compare(want_BLV: np.ndarray, got_BLV: np.ndarray) -> dict[str, float]:
  """How far logits are from those of reference, over all positions.

  Returns:
    max_abs_delta_logit; mean_abs_delta_logit; kl, mean KL(want || got) in nats;
    top1, share of positions with the same most likely token; logit_std, the
    standard deviation of `want` within a position, averaged. Not finite logits
    give not finite figures.
  """
  if want_BLV.shape != got_BLV.shape:
    raise UserError(
      f"the reader gives logits of shape {got_BLV.shape}, our model "
      f"{want_BLV.shape}; the export is not that model"
    )
  rows = []
  for want_LV, got_LV in zip(want_BLV, got_BLV, strict=True):
    want_LV, got_LV = np.float64(want_LV), np.float64(got_LV)
    delta_LV = np.abs(got_LV - want_LV)
    p_LV, q_LV = _log_softmax(want_LV), _log_softmax(got_LV)
    rows.append({
      "max_abs_delta_logit": delta_LV.max(),
      "mean_abs_delta_logit": delta_LV.mean(),
      "kl": np.mean(np.sum(np.exp(p_LV) * (p_LV - q_LV), axis=-1)),
      "top1": np.mean(want_LV.argmax(-1) == got_LV.argmax(-1)),
      "logit_std": np.mean(want_LV.std(axis=-1)),
    })
  found = {
    name: float(np.mean([row[name] for row in rows])) for name in rows[0]
  }
  # np.max passes a NaN on.
  largest = np.max([row["max_abs_delta_logit"] for row in rows])
  return found | {"max_abs_delta_logit": float(largest)}


def _log_softmax(x_LV: np.ndarray) -> np.ndarray:
  x_LV = x_LV - x_LV.max(axis=-1, keepdims=True)
  return x_LV - np.log(np.sum(np.exp(x_LV), axis=-1, keepdims=True))


def bound(errors: dict[str, float], form: str, norm: str) -> float:
  """What max_abs_delta_logit in float32 may be at most."""
  layer = form == "ballast" and norm == "layer"
  unit = LAYER_BALLAST_BOUND if layer else BOUND
  return unit * max(1.0, errors["logit_std"])


@functools.partial(jax.jit, static_argnames=("gate", "config"))
def _row(params, c, gate, config, tokens_L):
  return model_lib.Transformer(config).apply(
    {"params": params}, tokens_L[None, :], gate=gate, c=c
  )[0][0]


def our_logits(
  params: dict, c: Any, config: ModelConfig, tokens_BL: np.ndarray
) -> np.ndarray:
  """Logits of our model in float32, at gate 0 where it is tapered."""
  config = config.replace(compute_dtype="float32")
  gate = 0.0 if config.tapered_sites else 1.0
  rows = [
    jax.device_get(_row(params, jnp.asarray(c), gate, config, row_L))
    for row_L in np.asarray(tokens_BL, np.int32)
  ]
  return np.stack(rows)


def version(package: str) -> str:
  return f"{package} {importlib.metadata.version(package)}"


@contextlib.contextmanager
def _transformers():
  """The library, quiet and without a network."""
  with needs("torch"), needs("transformers"):
    import torch
    import transformers
  level = transformers.logging.get_verbosity()
  transformers.logging.set_verbosity_error()
  transformers.logging.disable_progress_bar()
  try:
    with torch.no_grad():
      yield torch, transformers
  finally:
    transformers.logging.set_verbosity(level)


def _torch_logits(torch, network, tokens_BL: np.ndarray) -> np.ndarray:
  rows = [
    network(torch.tensor(row_L[None])).logits[0].float().numpy()
    for row_L in np.asarray(tokens_BL, np.int64)
  ]
  return np.stack(rows)


@contextlib.contextmanager
def _remote(remote_code: bool):
  """`_transformers`, where remote code is not copied to the user's cache."""
  with contextlib.ExitStack() as stack:
    torch, transformers = stack.enter_context(_transformers())
    if remote_code:
      modules = transformers.dynamic_module_utils
      copy = stack.enter_context(tempfile.TemporaryDirectory())
      stack.enter_context(
        unittest.mock.patch.object(modules, "HF_MODULES_CACHE", copy)
      )
      stack.enter_context(unittest.mock.patch.object(sys, "path", [*sys.path]))
    yield torch, transformers


@contextlib.contextmanager
def hf_model(folder: pathlib.Path, remote_code: bool):
  """(torch, model of a Hugging Face folder) in the dtype of its file."""
  with _remote(remote_code) as (torch, transformers):
    yield torch, transformers.AutoModelForCausalLM.from_pretrained(
      str(folder), dtype="auto", trust_remote_code=remote_code
    ).eval()


def hf_logits(
  folder: pathlib.Path, tokens_BL: np.ndarray, remote_code: bool = False
) -> tuple[np.ndarray, str]:
  """(logits, reader) of transformers, in the dtype of the file."""
  with hf_model(folder, remote_code) as (torch, network):
    return _torch_logits(torch, network, tokens_BL), version("transformers")


def hf_greedy(
  folder: pathlib.Path,
  prompts: list[list[int]],
  max_new: int,
  eos_id: int | None,
  remote_code: bool = False,
) -> list[list[int]]:
  """New ids of transformers' own greedy generate, prompts padded on the left.

  A row ends before its first `eos_id`, as rows of `decode.generate` do.
  """
  with hf_model(folder, remote_code) as (torch, network):
    longest = max(map(len, prompts))
    tokens_BL = torch.zeros((len(prompts), longest), dtype=torch.long)
    mask_BL = torch.zeros_like(tokens_BL)
    for row, ids in enumerate(prompts):
      tokens_BL[row, longest - len(ids) :] = torch.tensor(ids)
      mask_BL[row, longest - len(ids) :] = 1
    found_BM = network.generate(
      tokens_BL,
      attention_mask=mask_BL,
      max_new_tokens=max_new,
      do_sample=False,
      eos_token_id=eos_id,
      pad_token_id=0 if eos_id is None else eos_id,
    )
  rows = found_BM[:, longest:].tolist()
  return [r[: r.index(eos_id)] if eos_id in r else r for r in rows]


def hf_token_ids(
  folder: pathlib.Path, texts: list[str], remote_code: bool = False
) -> list[list[int]]:
  """Ids that AutoTokenizer gives, its own special tokens included."""
  with _remote(remote_code) as (_, transformers):
    tokenizer = transformers.AutoTokenizer.from_pretrained(
      str(folder), trust_remote_code=remote_code
    )
    return [tokenizer(text)["input_ids"] for text in texts]


def transformer_lens_logits(
  folder: pathlib.Path, tokens_BL: np.ndarray
) -> tuple[np.ndarray, str]:
  """(logits, reader) of TransformerLens, in the dtype of the file."""
  with _lens() as torch:
    page = json.loads((folder / transformer_lens.PAGE).read_text())
    bridge = transformer_lens.load(
      folder,
      dtype=getattr(torch, page["dtype"]),
      n_ctx=np.shape(tokens_BL)[1],
    )
    rows = [
      bridge(torch.tensor(row_L[None]))[0].float().numpy()
      for row_L in np.asarray(tokens_BL, np.int64)
    ]
  return np.stack(rows), version("transformer-lens")


def attribution(
  folder: pathlib.Path, tokens_BL: np.ndarray, want_BLV: np.ndarray
) -> dict[str, Any]:
  """Whether direct logit attribution sums to the logits; one row is enough."""
  with _lens():
    found = transformer_lens.check(folder, tokens_BL[:1], want_BLV[:1])
  names = ("attribution_error", "stream_error", "components", "has_norm")
  return {name: found[name] for name in names}


@contextlib.contextmanager
def _lens():
  with needs("torch"), needs("transformer_lens"):
    import torch
    import transformer_lens as _  # noqa: F401
  with torch.no_grad():
    yield torch


def stablehlo_logits(
  folder: pathlib.Path, tokens_BL: np.ndarray
) -> tuple[np.ndarray, str]:
  """(logits, reader) of the jax.export artifacts.

  Prefill of one token, a decode step for each of the next, and at the last
  position prefill of whole rows.
  """
  with needs("flatbuffers"):
    import flatbuffers  # noqa: F401
  import jax.export
  import safetensors.numpy

  weights = ()
  if (folder / "model.safetensors").exists():
    tensors = safetensors.numpy.load_file(folder / "model.safetensors")
    weights = (jax.device_put(tensors),)
  prefill, decode = (
    jax.jit(
      jax.export.deserialize(
        bytearray((folder / f"{name}.jax_export").read_bytes())
      ).call
    )
    for name in ("prefill", "decode")
  )
  tokens_BL = np.asarray(tokens_BL, np.int32)
  rows, length = tokens_BL.shape
  ones_B = np.ones(rows, np.int32)
  logits_BV, cache = prefill(*weights, tokens_BL[:, :1], ones_B)
  found = [np.asarray(logits_BV)]
  for i in range(1, length - 1):
    logits_BV, cache = decode(*weights, tokens_BL[:, i], ones_B * i, cache)
    found.append(np.asarray(logits_BV))
  whole_BV, _ = prefill(*weights, tokens_BL, ones_B * length)
  found = [*found[: length - 1], np.asarray(whole_BV)]
  return np.stack(found, axis=1), version("jax")


def safetensors_logits(
  folder: pathlib.Path, tokens_BL: np.ndarray
) -> tuple[np.ndarray, str]:
  """(logits, reader) of the file's numbers in our model."""
  from taperjax.interop import bare

  params, config = bare.read(folder)
  sites = 2 * config.num_layers + 1
  logits = our_logits(params, np.zeros(sites), config, tokens_BL)
  return logits, f"taperjax with {version('safetensors')}"


def gguf_logits(
  folder: pathlib.Path, tokens_BL: np.ndarray
) -> tuple[np.ndarray, str]:
  """(logits, reader) of llama.cpp, float32 cache; else of our own reader."""
  path = folder / "model.gguf"
  try:
    with needs("llama_cpp"):
      import llama_cpp
  except Missing:
    from taperjax.interop import gguf_files

    model = gguf_files.read(path)
    logits = our_logits(model.params, model.c, model.config, tokens_BL)
    return logits, "taperjax (llama_cpp is not installed)"
  length, found = np.shape(tokens_BL)[1], []
  with contextlib.ExitStack() as stack:
    # verbose=False leaves warnings: it rounds n_ctx up past that of training.
    stack.enter_context(contextlib.redirect_stderr(io.StringIO()))
    network = llama_cpp.Llama(
      str(path),
      n_ctx=length,
      logits_all=True,
      type_k=llama_cpp.GGML_TYPE_F32,
      type_v=llama_cpp.GGML_TYPE_F32,
      verbose=False,
    )
    stack.callback(network.close)
    for row_L in np.asarray(tokens_BL):
      network.reset()
      network.eval(row_L.tolist())  # in batches of 512
      found.append(np.array(network.scores[:length], np.float32))
  return np.stack(found), version("llama-cpp-python")


def source_logits(
  model: saved.Model, tokens_BL: np.ndarray
) -> tuple[np.ndarray, str]:
  """(logits, reader) of the files that a model was imported from.

  Raises:
    Missing: no reader, or none that understands the files as we do; or the
      files are not where they were. The text does not tell where, for it is
      written into exports.
  """
  source = model.meta["source"]
  path = pathlib.Path(source["path"])
  if not path.exists():
    raise Missing("the source is no longer where it was")
  if offset := source.get("gain_offset"):
    raise Missing(f"transformers does not add gain_offset={offset:g}")
  if source["format"].startswith("llama2.c"):
    return llama2c_logits(path, tokens_BL), "a forward pass in NumPy"
  with _transformers() as (torch, transformers):
    folder, options = path, {}
    if source["format"] == "gguf":
      with needs("gguf"), needs("accelerate"):
        import accelerate  # noqa: F401
        import gguf  # noqa: F401
      folder, options = path.parent, {"gguf_file": path.name}
    network, told = transformers.AutoModelForCausalLM.from_pretrained(
      str(folder),
      dtype=torch.float32,
      trust_remote_code=False,
      output_loading_info=True,
      ignore_mismatched_sizes=True,
      **options,
    )
    # Biases that are left out are zeros there, as with us.
    missing = [k for k in told["missing_keys"] if not k.endswith(".bias")]
    if missing or told["mismatched_keys"]:
      raise Missing("transformers does not know these names or shapes")
    logits = _torch_logits(torch, network.eval(), tokens_BL)
    return logits, version("transformers")


def llama2c_logits(path: pathlib.Path, tokens_BL: np.ndarray) -> np.ndarray:
  """Logits of a llama2.c file by its own rules, apart from our importer.

  Heads turn in neighbouring pairs, as the file has them: nothing is permuted.
  Float64 inside.
  """
  raw = path.read_bytes()
  d, f, n, h, g, v, m = np.frombuffer(raw, "<i4", 7).tolist()
  size, k, rest = abs(v), d // h, np.frombuffer(raw, "<f4", offset=28)

  def take(*shape):
    nonlocal rest
    count = int(np.prod(shape))
    found, rest = rest[:count].astype(np.float64).reshape(shape), rest[count:]
    return found

  embed = take(size, d)
  attn_gain, wq, wk = take(n, d), take(n, h * k, d), take(n, g * k, d)
  wv, wo, mlp_gain = take(n, g * k, d), take(n, d, h * k), take(n, d)
  w1, w2, w3 = take(n, f, d), take(n, d, f), take(n, f, d)
  gain, _ = take(d), take(2, m, k // 2)
  head = embed if v > 0 else take(size, d)
  norm = lambda x, w: w * x / np.sqrt(np.mean(x * x, -1, keepdims=True) + 1e-5)
  length = tokens_BL.shape[1]
  angle = np.outer(np.arange(length), 1e4 ** (-2.0 * np.arange(k // 2) / k))
  turn = np.exp(1j * angle)[:, None, :]

  def rotated(x):  # (L, heads, k): a pair is one complex number
    pairs = (x[..., 0::2] + 1j * x[..., 1::2]) * turn
    return np.stack([pairs.real, pairs.imag], -1).reshape(x.shape)

  def row(ids):
    x = embed[ids]
    for i in range(n):
      y = norm(x, attn_gain[i])
      q = rotated((y @ wq[i].T).reshape(length, h, k))
      key = rotated((y @ wk[i].T).reshape(length, g, k)).repeat(h // g, 1)
      value = (y @ wv[i].T).reshape(length, g, k).repeat(h // g, 1)
      s = np.einsum("lhk,mhk->hlm", q, key) / np.sqrt(k)
      s = np.where(np.tri(length, dtype=bool), s, -np.inf)
      p = np.exp(s - s.max(-1, keepdims=True))
      p /= p.sum(-1, keepdims=True)
      out = np.einsum("hlm,mhk->lhk", p, value).reshape(length, h * k)
      x = x + out @ wo[i].T
      y = norm(x, mlp_gain[i])
      a = y @ w1[i].T
      x = x + (a / (1 + np.exp(-a)) * (y @ w3[i].T)) @ w2[i].T
    return (norm(x, gain) @ head.T).astype(np.float32)

  return np.stack([row(ids) for ids in np.asarray(tokens_BL)])
