"""One token through packed weights: what the loop of `decode` repeats.

`pack` is done once for each call, before the loop. The query, key and value
projections become one matrix, gate and up another, in the compute dtype and
stored (out, in), which a product with few rows reads fastest on a CPU. The
cache of the loop has the heads first, so that neither product of attention has
to transpose it; and no axis of size 1, which XLA drops from a product by a
bitcast, and copies the cache for it: (J, K, M) or (J, M, K), see `order_of`.

With weights "int8" a matrix is kept as int8 with a scale for each output, see
`int8`, and converted in the step: the product s (q x) is in the compute dtype.
On a CPU it lies in P parts of outputs, each converted and multiplied while it
is in the processor's cache; see `_scaled`.

Axes: B rows, D width, H heads, G key/value heads, J = B G heads of all rows,
R = H / G readers of each, K head size, M cache length, NN these two in either
order, F outputs of a product, P parts of them, V vocabulary, N layers.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from taperjax import attention, int8, model, norms
from taperjax.config import ModelConfig

PART = 2**17  # weights of a part, about: half a megabyte in float32
WIDE, SHORT = 16, 256  # head sizes from, slots up to: see `order_of`


def packs(config: ModelConfig) -> bool:
  """Whether the model has packed weights; a FakeLN run's v reads apart."""
  return config.internal_norm != "fake"


@functools.partial(jax.jit, static_argnums=(1, 2))
def pack(
  params: dict, config: ModelConfig, weights: str = "float"
) -> dict[str, Any]:
  """The weights of one step; the parameters are left as they are.

  Args:
    params: layers unstacked.
    config: of a model that `packs`.
    weights: "float" or "int8".

  Returns:
    embed (V, D), position_embed (M, D) if learned, head {kernel (D, V), bias
    (V,)} and final_norm, if any; and a list of layers, each with its norms and
    qkv, o, up and down {kernel (F, in), bias (F,)}. With int8 these and the
    head have an int8 kernel (P, F / P, in), rows of zeros behind its last, and
    scale (F,), float32. A tied model then has no embed: the rows of the head
    are looked up.
  """
  dtype = jnp.dtype(config.compute_dtype)

  def matrix(kernel_FD):
    if weights == "float":
      return {"kernel": kernel_FD.astype(dtype)}
    kernel_FD, scale_F1 = int8.quantize(kernel_FD, (1,))
    outputs, inputs = kernel_FD.shape
    parts = 1
    if jax.default_backend() == "cpu":
      parts = -(-kernel_FD.size // PART)
    size = -(-outputs // parts)
    kernel_FD = jnp.pad(kernel_FD, ((0, parts * size - outputs), (0, 0)))
    kernel_PFD = kernel_FD.reshape(parts, size, inputs)
    return {"kernel": kernel_PFD, "scale": scale_F1[:, 0]}

  def rows(*linears, inputs):
    """(in, out) kernels side by side, as one (out, in)."""
    kernels = [x["kernel"].reshape(inputs, -1).T for x in linears]
    packed = matrix(jnp.concatenate(kernels))
    if any("bias" in x for x in linears):
      packed["bias"] = jnp.concatenate([
        x["bias"].reshape(-1) if "bias" in x
        else jnp.zeros(k.shape[0], k.dtype)
        for x, k in zip(linears, kernels, strict=True)
      ]).astype(dtype)
    return packed

  layers = []
  for n in range(config.num_layers):
    block = params[f"block_{n}"]
    attn, mlp, width = block["attn"], block["mlp"], config.embed_dim
    first = ("gate", "up") if config.mlp == "swiglu" else ("up",)
    layers.append({
      "attn_norm": block.get("attn_norm"),
      "qkv": rows(*(attn[name] for name in "qkv"), inputs=width),
      "o": rows(attn["o"], inputs=config.num_heads * config.head_dim),
      "mlp_norm": block.get("mlp_norm"),
      "up": rows(*(mlp[name] for name in first), inputs=width),
      "down": rows(mlp["down"], inputs=config.mlp_dim),
    })
  kernel_DV, bias_V = model.head_weights(params, config)
  if weights == "float":
    head = {"kernel": kernel_DV.astype(dtype)}
  else:
    head = matrix(kernel_DV.T)
  if bias_V is not None:
    head["bias"] = bias_V.astype(jnp.float32)
  packed = {
    "layers": layers,
    "final_norm": params.get("final_norm"),
    "head": head,
  }
  if weights == "float" or not config.tied:
    packed["embed"] = params["embed"]["embedding"].astype(dtype)
  if config.positions == "learned":
    table_MD = params["position_embed"]["embedding"]
    packed["position_embed"] = table_MD.astype(dtype)
  return packed


def order_of(head_dim: int, slots: int) -> str:
  """Axes of the cache in the loop, as measured in docs/benchmarks.md.

  With the channels last a write is in one piece for each head, but the products
  are slower over small heads and over many slots.
  """
  return "JMK" if head_dim >= WIDE and slots <= SHORT else "JKM"


def enter(cache: model.Cache, position_B: jax.Array) -> model.Cache:
  """(B, M, G, K) to the loop's `order_of`, all rows to end at one slot.

  Rows of unequal lengths are moved up until their next slots agree: so one
  write serves them all, and stays a write in place.

  Args:
    cache: slots are positions.
    position_B: the next position of each row.
  """
  _, slots, _, head_dim = cache[0][0].shape
  order = order_of(head_dim, slots)

  def turn(x_BMGK):
    x_BMGK = _moved(x_BMGK, jnp.max(position_B) - position_B)
    x_BGNN = jnp.einsum(f"BMGK->BG{order[1:]}", x_BMGK)
    return x_BGNN.reshape(-1, *x_BGNN.shape[2:])

  return jax.tree.map(turn, cache)


def leave(
  cache: model.Cache, position_B: jax.Array, order: str = "JKM"
) -> model.Cache:
  """Undoes `enter`, at any later positions; order is from `order_of`."""

  def turn(x_JNN):
    x_BGNN = x_JNN.reshape(position_B.shape[0], -1, *x_JNN.shape[1:])
    x_BMGK = jnp.einsum(f"BG{order[1:]}->BMGK", x_BGNN)
    return _moved(x_BMGK, position_B - jnp.max(position_B))

  return jax.tree.map(turn, cache)


def _moved(x_BMGK, shift_B):
  """Row b moved up by shift_b slots, around the end."""
  batch, size = x_BMGK.shape[:2]
  rows_B1 = jnp.arange(batch)[:, None]
  from_BM = (jnp.arange(size)[None, :] - shift_B[:, None]) % size
  return x_BMGK[rows_B1, from_BM]


def step(
  packed: dict[str, Any],
  config: ModelConfig,
  token_B: jax.Array,
  position_B: jax.Array,
  cache: model.Cache,
  *,
  gate: float | jax.Array,
  c: jax.Array | None,
) -> tuple[jax.Array, model.Cache]:
  """Logits after one token of each row.

  Args:
    packed, config: of `pack`.
    token_B, position_B: the tokens and their places, below M.
    cache: from `enter`: keys and values of what came before.
    gate, c: as in `model.Transformer`.

  Returns:
    (logits_BV, cache), the logits float32, the cache with the token in it.
  """
  cfg, modes = config, config.modes
  if c is None:
    c = jnp.zeros((2 * cfg.num_layers + 1,), jnp.float32)
  phase = norms.phase_of(gate if "taper" in modes else 1.0)

  def norm(gains, site, h_B1D):
    module = norms.Norm(cfg.norm, modes[site], cfg.norm_eps, phase)
    return module.apply({"params": gains or {}}, h_B1D, gate, c[site], None)[0]

  h_B1D = _look_up(packed, token_B, jnp.dtype(cfg.compute_dtype))[:, None]
  if cfg.positions == "learned":
    h_B1D = h_B1D + packed["position_embed"][position_B][:, None]
  turn = _rotation(cfg, position_B)
  slot = jnp.max(position_B)
  slots = math.prod(cache[0][0].shape[1:]) // cfg.head_dim
  order = order_of(cfg.head_dim, slots)
  slots_1M = jnp.arange(slots)[None, :]
  first_B1 = (slot - position_B)[:, None]  # of each row, see `enter`
  seen_BM = (first_B1 <= slots_1M) & (slots_1M <= slot)
  caches = []
  for n, layer in enumerate(packed["layers"]):
    x_B1D = norm(layer["attn_norm"], 2 * n, h_B1D)
    out_BD, past = _attend(
      layer, cfg, x_B1D[:, 0], turn, slot, seen_BM, cache[n], order
    )
    caches.append(past)
    h_B1D = h_B1D + out_BD[:, None]
    x_B1D = norm(layer["mlp_norm"], 2 * n + 1, h_B1D)
    h_B1D = h_B1D + _mlp(layer, cfg, x_B1D[:, 0])[:, None]
  h_B1D = norm(packed["final_norm"], 2 * cfg.num_layers, h_B1D)
  if "scale" in packed["head"]:
    logits_BV = _scaled(h_B1D[:, 0], packed["head"])
  else:
    logits_BV = jnp.dot(
      h_B1D[:, 0], packed["head"]["kernel"],
      preferred_element_type=jnp.float32,
    )
  if "bias" in packed["head"]:
    logits_BV = logits_BV + packed["head"]["bias"][None, :]
  return logits_BV, tuple(caches)


def _look_up(packed, token_B, dtype):
  if "embed" in packed:
    return packed["embed"][token_B]
  kernel_PFD, scale_V = packed["head"]["kernel"], packed["head"]["scale"]
  kernel_VD = kernel_PFD.reshape(-1, kernel_PFD.shape[-1])
  h_BD = kernel_VD[token_B].astype(jnp.float32) * scale_V[token_B][:, None]
  return h_BD.astype(dtype)


def _linear(x_BD, linear):
  if "scale" in linear:
    y_BF = _scaled(x_BD, linear).astype(x_BD.dtype)
  else:
    y_BF = _dot(x_BD, linear["kernel"], x_BD.dtype)
  return y_BF + linear["bias"][None, :] if "bias" in linear else y_BF


def _dot(x_BD, kernel_FD, dtype):
  return jax.lax.dot_general(
    x_BD, kernel_FD, (((1,), (1,)), ((), ())), preferred_element_type=dtype
  )


def _scaled(x_BD, linear):
  """s (q x), float32; the integers are exact in any compute dtype.

  XLA would take the conversion of a whole matrix out of the decoding loop, and
  keep a copy of all weights in the compute dtype. A loop over parts prevents
  it, and its parts stay in the cache of a processor; a single part is tied to
  the step by a barrier.
  """
  kernel_PFD, scale_F = linear["kernel"], linear["scale"]

  def product(x_BD, kernel_FD):
    return _dot(x_BD, kernel_FD.astype(x_BD.dtype), jnp.float32)

  if len(kernel_PFD) == 1:
    y_BF = product(*jax.lax.optimization_barrier((x_BD, kernel_PFD[0])))
  else:
    y_PBF = jax.lax.map(functools.partial(product, x_BD), kernel_PFD)
    y_BF = jnp.moveaxis(y_PBF, 0, 1).reshape(len(x_BD), -1)
  return y_BF[:, : len(scale_F)] * scale_F[None, :]


def _rotation(cfg, position_B):
  """x_BHK -> x_BHK, the rotary turn of all heads at these positions."""
  if cfg.positions != "rope":
    return lambda x_BHK: x_BHK
  frequency_R = attention.frequencies(
    cfg.rope_theta, cfg.rotary_dim, cfg.rope_scaling
  )
  return lambda x_BHK: attention.rotary(
    x_BHK[:, None], position_B[:, None], frequency_R
  )[:, 0]


def _attend(layer, cfg, x_BD, turn, slot, seen_BM, cache, order):
  batch = x_BD.shape[0]
  heads, groups, size = cfg.num_heads, cfg.num_kv_heads, cfg.head_dim
  qkv_BHK = _linear(x_BD, layer["qkv"]).reshape(batch, -1, size)
  qk_BHK = turn(qkv_BHK[:, : heads + groups])
  q_JRK = qk_BHK[:, :heads].reshape(-1, heads // groups, size)
  k_JNN = _write(cache[0], qk_BHK[:, heads:], slot, order)
  v_JNN = _write(cache[1], qkv_BHK[:, heads + groups :], slot, order)
  f32 = {"preferred_element_type": jnp.float32}
  s_JRM = jnp.einsum(f"JRK,{order}->JRM", q_JRK, k_JNN, **f32)
  seen_JM = jnp.repeat(seen_BM, groups, axis=0)
  s_JRM = jnp.where(seen_JM[:, None, :], s_JRM * size**-0.5, -jnp.inf)
  p_JRM = jnp.exp(s_JRM - jnp.max(s_JRM, axis=-1, keepdims=True))
  sum_JR1 = jnp.sum(p_JRM, axis=-1, keepdims=True)
  out_JRK = jnp.einsum(
    f"JRM,{order}->JRK", p_JRM.astype(v_JNN.dtype), v_JNN, **f32
  )
  out_BD = (out_JRK / sum_JR1).astype(x_BD.dtype).reshape(batch, -1)
  return _linear(out_BD, layer["o"]), (k_JNN, v_JNN)


def _write(cache_JNN, new_BGK, slot, order):
  """The new vectors of all rows at their common slot."""
  axis = order.index("M")
  new_JK = new_BGK.astype(cache_JNN.dtype).reshape(len(cache_JNN), -1)
  return jax.lax.dynamic_update_slice_in_dim(
    cache_JNN, jnp.expand_dims(new_JK, axis), slot, axis=axis
  )


def _mlp(layer, cfg, x_BD):
  up_BF = _linear(x_BD, layer["up"])
  if cfg.mlp == "swiglu":
    gate_BF, up_BF = jnp.split(up_BF, 2, axis=1)
    hidden_BF = jax.nn.silu(gate_BF) * up_BF
  else:
    hidden_BF = jax.nn.gelu(up_BF, approximate=cfg.mlp == "gelu_tanh")
  return _linear(hidden_BF, layer["down"])
