r"""Tapered models at gate 0 in the form of stock classes, with real norms.

No stock class knows a model without norms. Two constructions make its norms
compute the fixed map that a taper ends in; what comes out has the config of a
baseline (both modes "norm"), so our own model, a Hugging Face class or
llama.cpp runs it. They hold at gate 0 only: the caller checks the gate.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np

from taperjax import folding, model
from taperjax.config import BIASES, ModelConfig, site_names
from taperjax.errors import UserError
from taperjax.interop import gpt2

DTYPES = ["float32", "bfloat16", "float16"]
LOG2_EPS = 40
# Largest variance of a stream for which var + 2^40 rounds to 2^40 in float32.
MAX_VARIANCE = 2**16
# nb C^2 over the usual |x|^2 of the stream, and the most that float16 holds as
# a power of two; see `ballast`.
_BALLAST = 2.0**26
_LOG2_FLOAT16 = 15
_BLOCK = 32  # llama.cpp quantises 32 numbers of a row at a time


def stock_form(
  params: dict, c: Any, config: ModelConfig, *, dtype: str = "float32"
) -> tuple[dict, ModelConfig, dict[str, Any]]:
  """A model at gate 0 as one whose norms are all real.

  Args:
    params, config: a baseline, or a tapered model that is not folded.
    c: calibrated factors by site, (2 N + 1,).
    dtype: of the file that is to hold it: float32, bfloat16 or float16.

  Returns:
    (params, config, info): float32 numpy parameters by layer, without a
    taper_scale. `info` names the `form` ("plain", "huge_eps" or "ballast") and
    the `dtypes` that hold it, and gives the figures of the construction and,
    in `notes`, its limits.

  Raises:
    UserError: folded already, only the final norm tapered, c not calibrated,
      or a dtype that does not hold the form.
  """
  modes = (config.internal_norm, config.final_norm)
  told = f"internal_norm={modes[0]} and final_norm={modes[1]}"
  if modes[0] == "mixed":
    raise UserError(
      f"{told}: stock classes have one eps for all norms; export to stablehlo "
      "or safetensors"
    )
  if "none" in modes:
    raise UserError(
      f"{told}: stock classes have no model without norms; export the unfolded "
      "checkpoint at gate 0"
    )
  if modes == ("taper", "taper"):
    return huge_eps(params, c, config, dtype=dtype)
  if modes == ("taper", "norm"):
    return ballast(params, c, config, dtype=dtype)
  if modes == ("norm", "taper"):
    raise UserError(
      f"{told}: stock classes have one eps for all norms, so the final norm "
      "cannot be fixed alone; export with --remote-code, or to stablehlo or "
      "safetensors"
    )
  params, config = _numpy(params, config)
  return params, config, {"form": "plain", "dtypes": DTYPES, "notes": []}


def huge_eps(
  params: dict, c: Any, config: ModelConfig, *, dtype: str = "float32"
) -> tuple[dict, ModelConfig, dict[str, Any]]:
  r"""All norms tapered: an eps beside which the statistic vanishes.

  With eps = 2^40 a norm is h / sqrt(var + 2^40) w. In float32 var + 2^40 is
  2^40 while var is below 65,536; the root and the division are exact, so
  w = c gamma~ 2^20 gives c h gamma~ as one rounded product. LayerNorm keeps
  its centring and its bias. A tied head stays tied. Arguments and result as
  `stock_form`.

  Raises:
    UserError: c is not calibrated, or dtype is float16.
  """
  if dtype == "float16":
    raise UserError(
      "dtype=float16: the gains c gamma~ 2^20 of an all-tapered model leave "
      "its range; use bfloat16 or float32, or export with --remote-code"
    )
  c_S = np.asarray(c, np.float64)
  names = site_names(config.num_layers)
  folding.check_c(c_S, config, "export")
  params, config = _numpy(params, config)
  norms = _norms(params, config)
  for name, norm, c_site in zip(names, norms, c_S, strict=True):
    scale_D = c_site * norm.pop("taper_scale").astype(np.float64)
    with np.errstate(over="ignore"):
      norm["scale"] = np.float32(scale_D * 2.0 ** (LOG2_EPS // 2))
    if not np.all(np.isfinite(norm["scale"])):
      raise UserError(
        f"c={c_site:g} at {name}: c gamma~ 2^20 leaves float32; export to "
        "stablehlo or safetensors"
      )
  eps = 2.0**LOG2_EPS
  config = config.replace(
    internal_norm="norm", final_norm="norm", norm_eps=eps
  )
  return params, config, {
    "form": "huge_eps",
    "dtypes": ["float32", "bfloat16"],
    "eps": eps,
    "max_variance": MAX_VARIANCE,
    "notes": [
      "holds while the variance of the stream stays below 65,536",
      "cannot be served as float16: the gains leave its range",
    ],
  }


def ballast(
  params: dict,
  c: Any,
  config: ModelConfig,
  *,
  dtype: str = "float32",
  log2: int | None = None,
) -> tuple[dict, ModelConfig, dict[str, Any]]:
  r"""Internal norms tapered: a constant in the stream that swamps its scale.

  The stream is widened from d to D'. The embedding writes C = 2^log2 on nb of
  the pads, where D' / nb = 4^j, so that every internal norm divides by
  sqrt((|x|^2 + nb C^2) / D') = C 2^-j (1 + |x|^2 / (2 nb C^2)), and with the
  gain C 2^-j (0 on the pads) is the identity. The maps themselves are folded
  into the matrices behind them. The last MLP takes the ballast off, and the
  final norm sees the d real coordinates alone: its gain times sqrt(d / D'), 0
  on the pads, and eps d / D' (the internal norms share that eps; C^2 dwarfs
  it).

  - RMSNorm: the last MLP norm has gain 2^-j on one pad, which gives 1 there.
    One more hidden unit reads gate 64 and up 1, and silu(64) = 64; its down
    row is -C / 64 on the ballast. Other layers leave the unit 0.
  - LayerNorm: half of the ballast is -C, so the mean does not see it. The
    folded matrices are blind to the mean of the stream, so that every write
    but a tied embedding can be centred; there the pads hold the row's mean, by
    which the final norm still centres x as before. The last down bias takes
    the ballast off. Heads without weights fill heads * head_dim up to D', and
    grouped keys and values are written out, as the GPT-2 layout wants both.

  D' is a multiple of the heads (rms) or of head_dim (layer), and it and the MLP
  width are as divisible by 2 as they were, up to 32.

  A larger C hides the stream better, but what stays behind where a root is off
  by an ulp (GPUs) grows with it, and so does float32's grid under the means.
  Errors are 1 / (2 B) and 2 B ulp^2 for B = nb C^2 / |x|^2. So C is chosen for
  B = 2^26, with |x|^2 = d / c^2 at the last internal norm, where c is 1 / r:
  tokens 30 times as large, or half as large, still have errors below 1e-5.

  Args:
    params, c, config: as in `stock_form`; the final norm is not tapered.
    dtype: of the file; means beside the ballast are rounded to it.
    log2: of C; None chooses it as above, and 15 at most for float16.

  Returns:
    As `stock_form`.
  """
  layer = config.norm == "layer"
  params, config = folding.fold(params, c, config)
  params, config = _numpy(params, config)
  if layer:
    params, config = gpt2.full_heads(params, config)
  d, hidden = config.embed_dim, config.mlp_dim
  unit = config.head_dim if layer else config.num_heads
  width, count, j = _width(d, unit, pairs=layer)
  if log2 is None:
    stream_scale = math.sqrt(d / count) / float(np.asarray(c)[-2])
    log2 = round(math.log2(math.sqrt(_BALLAST) * stream_scale))
    if dtype == "float16":
      log2 = min(log2, _LOG2_FLOAT16)
  big = 2.0**log2
  if layer:
    heads = kv_heads = width // config.head_dim
  else:
    heads, kv_heads = config.num_heads, config.num_kv_heads
    hidden = _up(hidden + 1, math.gcd(hidden, _BLOCK))
  wide = _Wide(width, hidden, heads, kv_heads, centred=layer)
  ballast_D = np.zeros(width)
  ballast_D[d : d + count] = big
  if layer:
    ballast_D[d + 1 : d + count : 2] = -big

  embedding_VD = params["embed"]["embedding"]
  if layer and config.tied:
    embedding_VD = _with_means(embedding_VD, ballast_D, count, dtype)
  else:
    embedding_VD = np.float32(wide.write(embedding_VD) + ballast_D)
  out = {"embed": {"embedding": embedding_VD}}
  if config.positions == "learned":
    position_MD = wide.write(params["position_embed"]["embedding"])
    out["position_embed"] = {"embedding": np.float32(position_MD)}
  unit_D = np.zeros(width, np.float32)
  unit_D[:d] = big * 2.0**-j
  for n in range(config.num_layers):
    out[f"block_{n}"] = _wide_block(params[f"block_{n}"], wide, unit_D)
  _take_off(out[f"block_{config.num_layers - 1}"], ballast_D, config, j)
  final = params["final_norm"]
  scale_D = np.float64(final["scale"]) * math.sqrt(d / width)
  out["final_norm"] = {"scale": np.float32(wide.stream(scale_D))}
  if layer:
    out["final_norm"]["bias"] = wide.stream(final["bias"])
  if not config.tied:
    head = dict(params["head"])
    head["kernel"] = wide.stream(head["kernel"], 0)
    out["head"] = head

  biases = {*config.biases, *(["down"] if layer else [])}
  info = {
    "form": "ballast",
    "dtypes": DTYPES if log2 <= _LOG2_FLOAT16 else DTYPES[:2],
    "log2": log2,
    "ballast": count,
    "embed_dim": [d, width],
    "mlp_dim": [config.mlp_dim, hidden],
    "num_heads": [config.num_heads, heads],
    "notes": [
      "holds while |x|^2 of the stream stays far below "
      f"{2 * count} * 2^{2 * log2}"
    ],
  }
  config = config.replace(
    internal_norm="norm",
    embed_dim=width,
    mlp_dim=hidden,
    num_heads=heads,
    num_kv_heads=kv_heads,
    norm_eps=config.norm_eps * d / width,
    biases=tuple(name for name in BIASES if name in biases),
  )
  return out, config, info


@dataclasses.dataclass(frozen=True)
class _Wide:
  """Sizes of the widened model, and how tensors grow to them by zeros."""

  width: int
  hidden: int
  heads: int
  kv_heads: int
  centred: bool  # what is written to the stream has mean 0

  def stream(self, x, axis=-1):
    return _pad(x, axis, self.width)

  def inner(self, x, axis):
    return _pad(x, axis, self.hidden)

  def write(self, x):
    """What is added to the stream, float64: centred where it may be."""
    x = np.float64(x)
    if self.centred:
      x = x - x.mean(axis=-1, keepdims=True)
    return self.stream(x)


def _wide_block(block: dict, wide: _Wide, unit_D: np.ndarray) -> dict:
  """A folded block for the wide stream, its norms made identities."""
  own = {"q": wide.heads, "k": wide.kv_heads, "v": wide.kv_heads}
  attn = {
    name: {
      k: _pad(wide.stream(x, 0) if k == "kernel" else x, -2, own[name])
      for k, x in block["attn"][name].items()
    }
    for name in "qkv"
  }
  attn["o"] = {
    k: np.float32(
      _pad(wide.write(x), 0, wide.heads) if k == "kernel" else wide.write(x)
    )
    for k, x in block["attn"]["o"].items()
  }
  mlp = {
    name: {
      k: wide.inner(wide.stream(x, 0) if k == "kernel" else x, -1)
      for k, x in block["mlp"][name].items()
    }
    for name in ("gate", "up") if name in block["mlp"]
  }
  mlp["down"] = {
    k: np.float32(
      wide.inner(wide.write(x), 0) if k == "kernel" else wide.write(x)
    )
    for k, x in block["mlp"]["down"].items()
  }
  norms = {name: {"scale": unit_D.copy()} for name in ("attn_norm", "mlp_norm")}
  if wide.centred:  # LayerNorm
    zeros_D = np.zeros(wide.width, np.float32)
    mlp["down"].setdefault("bias", zeros_D.copy())
    for norm in norms.values():
      norm["bias"] = zeros_D.copy()
  return {"attn": attn, "mlp": mlp, **norms}


def _take_off(
  last: dict, ballast_D: np.ndarray, config: ModelConfig, j: int
) -> None:
  """Lets the last MLP take the ballast off; `config` has the narrow sizes."""
  if config.norm == "layer":
    last["mlp"]["down"]["bias"] -= np.float32(ballast_D)
    return
  pad, unit = config.embed_dim, config.mlp_dim  # the first of each that is new
  last["mlp_norm"]["scale"][pad] = 2.0**-j
  if config.mlp == "swiglu":
    last["mlp"]["gate"]["kernel"][pad, unit] = 64.0
    last["mlp"]["up"]["kernel"][pad, unit] = 1.0
  else:
    last["mlp"]["up"]["kernel"][pad, unit] = 64.0
  last["mlp"]["down"]["kernel"][unit] = -ballast_D / 64.0


def _with_means(
  embedding_Vd: np.ndarray, ballast_D: np.ndarray, count: int, dtype: str
) -> np.ndarray:
  """The embedding with pads that hold the mean of its row, and the ballast.

  Beside C the mean is rounded to the grid of the dtype there; the pads without
  ballast make up for it, so that the mean of the wide row is that of the row.
  """
  import ml_dtypes

  kind = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
  d, width = embedding_Vd.shape[1], len(ballast_D)
  mean_V1 = np.float64(embedding_Vd).mean(axis=-1, keepdims=True)
  out_VD = np.zeros((len(embedding_Vd), width), np.float32)
  out_VD[:, :d] = embedding_Vd
  loaded = slice(d, d + count)
  out_VD[:, loaded] = (mean_V1 + ballast_D[loaded]).astype(kind)
  held_VC = np.float64(out_VD[:, loaded]) - ballast_D[loaded]
  rest_V = (width - d) * mean_V1[:, 0] - held_VC.sum(axis=-1)
  free = width - d - count
  out_VD[:, d + count :] = (rest_V / free)[:, None]
  return out_VD


def _width(d: int, unit: int, pairs: bool) -> tuple[int, int, int]:
  """(D', nb, j): the least D' = nb 4^j with room for nb pads and one more.

  D' is a multiple of `unit` and as divisible by 2 as d, up to 32; nb is even
  where `pairs`. Of equal widths the one with the larger nb is taken.
  """
  found = []
  for j in (1, 2, 3):
    step = math.lcm(4**j * (1 + pairs), unit, math.gcd(d, _BLOCK))
    width = _up(-(-(d + 1) * 4**j // (4**j - 1)), step)
    found.append((width, j))
  width, j = min(found)
  return width, width // 4**j, j


def _up(x: int, multiple: int) -> int:
  return -(-x // multiple) * multiple


def _pad(x: np.ndarray, axis: int, size: int) -> np.ndarray:
  """A copy of x with zeros behind one axis, `size` long."""
  pads = [(0, 0)] * x.ndim
  pads[axis] = (0, size - x.shape[axis])
  return np.pad(x, pads)


def _numpy(params: dict, config: ModelConfig) -> tuple[dict, ModelConfig]:
  """A copy by layer, in numpy."""
  params, config = model.unstack_layers(params, config)
  return _copy(params), config


def _copy(tree):
  if isinstance(tree, dict):
    return {name: _copy(x) for name, x in tree.items()}
  return np.array(tree)


def _norms(params: dict, config: ModelConfig) -> list[dict]:
  """The norms in the order of their sites."""
  blocks = [params[f"block_{n}"] for n in range(config.num_layers)]
  norms = [block[k] for block in blocks for k in ("attn_norm", "mlp_norm")]
  return [*norms, params["final_norm"]]
