"""The decoder-only pre-norm transformer, one module for both families.

Tensors end in their axes, one letter each: B batch, L query length, M cache
length, D model width, H heads, G key/value heads, K head size, F MLP width,
V vocabulary, N layers, S norm sites (2 N + 1).

Parameters, with every kernel stored (in, out):

    embed/embedding (V, D)          position_embed/embedding (M, D)  [learned]
    block_n/attn_norm/scale, bias, taper_scale (D,)
    block_n/attn/{q,k,v,o}/kernel, bias
    block_n/mlp_norm/...            block_n/mlp/{gate,up,down}/kernel, bias
    final_norm/...                  head/kernel (D, V), bias         [untied]

With `scan_layers` the blocks are one tree, `blocks`, with a leading axis N.
"""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from taperjax import attention, gate as gate_lib, norms, sharding
from taperjax.config import ModelConfig, site_names

Cache = tuple[tuple[jax.Array, jax.Array], ...]


def _normal(std: float):
  return nn.initializers.normal(stddev=std)


class Linear(nn.Module):
  """x W + b over the last `in_axes` axes, in the compute dtype.

  With `out_dtype` the sums and the bias are kept in that dtype.
  """

  features: tuple[int, ...]
  in_axes: int
  use_bias: bool
  std: float
  dtype: Any
  out_dtype: Any = None  # None: dtype

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    inputs = x.shape[x.ndim - self.in_axes :]
    kernel = self.param(
      "kernel", _normal(self.std), (*inputs, *self.features), jnp.float32
    )
    contract = tuple(range(x.ndim - self.in_axes, x.ndim))
    y = jax.lax.dot_general(
      x.astype(self.dtype),
      kernel.astype(self.dtype),
      ((contract, tuple(range(self.in_axes))), ((), ())),
      preferred_element_type=self.out_dtype or self.dtype,
    )
    if self.use_bias:
      bias = self.param(
        "bias", nn.initializers.zeros, self.features, jnp.float32
      )
      lead = (1,) * (y.ndim - bias.ndim)
      y = y + bias.astype(y.dtype).reshape(lead + bias.shape)
    return y


class Attention(nn.Module):
  """Causal self-attention with grouped key/value heads."""

  config: ModelConfig

  @nn.compact
  def __call__(self, x_BLD, value_BLD, position_BL, cache):
    """value_BLD is what v reads: x_BLD itself but in a FakeLN run."""
    cfg = self.config
    dtype = jnp.dtype(cfg.compute_dtype)

    def project(name, heads, x_BLD):
      shape, bias = (heads, cfg.head_dim), name in cfg.biases
      return Linear(shape, 1, bias, cfg.init_std, dtype, name=name)(x_BLD)

    q_BLHK = project("q", cfg.num_heads, x_BLD)
    k_BLGK = project("k", cfg.num_kv_heads, x_BLD)
    v_BLGK = project("v", cfg.num_kv_heads, value_BLD)
    if cfg.positions == "rope":
      frequency_R = attention.frequencies(
        cfg.rope_theta, cfg.rotary_dim, cfg.rope_scaling
      )
      q_BLHK = attention.rotary(q_BLHK, position_BL, frequency_R)
      k_BLGK = attention.rotary(k_BLGK, position_BL, frequency_R)
    if cache is None:
      out_BLHK = sharding.by_part(
        attention.causal_attention,
        *(q_BLHK, k_BLGK, v_BLGK),
        join=lambda x: x.reshape(-1, *x.shape[2:]),
      )
    else:
      out_BLHK, cache = attention.cached_attention(
        q_BLHK, k_BLGK, v_BLGK, cache, position_BL
      )
    std, bias = cfg.residual_std, "o" in cfg.biases
    out_BLD = Linear((cfg.embed_dim,), 2, bias, std, dtype, name="o")(out_BLHK)
    return out_BLD, cache


class MLP(nn.Module):
  """SwiGLU, or GELU with one input projection."""

  config: ModelConfig

  @nn.compact
  def __call__(self, x_BLD):
    cfg = self.config
    dtype = jnp.dtype(cfg.compute_dtype)

    def linear(name, width, std):
      return Linear((width,), 1, name in cfg.biases, std, dtype, name=name)

    up_BLF = linear("up", cfg.mlp_dim, cfg.init_std)(x_BLD)
    if cfg.mlp == "swiglu":
      gate_BLF = linear("gate", cfg.mlp_dim, cfg.init_std)(x_BLD)
      hidden_BLF = jax.nn.silu(gate_BLF) * up_BLF
    else:
      hidden_BLF = jax.nn.gelu(up_BLF, approximate=cfg.mlp == "gelu_tanh")
    return linear("down", cfg.embed_dim, cfg.residual_std)(hidden_BLF)


class Block(nn.Module):
  """H1 = H0 + Attn(Norm(H0)); H2 = H1 + MLP(Norm(H1)). Paper section 3.1."""

  config: ModelConfig
  phase: str
  modes: tuple[str, ...]  # of its two norms, see ModelConfig
  watched: bool = False  # the mean square of what leaves it is wanted

  @nn.compact
  def __call__(self, h_BLD, c, cache, gate_2, position_BL, mask_BL, kind_BL):
    cfg = self.config

    def norm(name, h_BLD, i):
      mode, eps = self.modes[i], cfg.norm_eps
      if mode == "fake":  # c is (3, 3): for q and k, for v, for the MLP
        site = norms.FakeNorm(cfg.norm, eps, name=name)
        c_R3 = c[:2] if name == "attn_norm" else c[2:]
        outs, sums_2 = site(h_BLD, c_R3, kind_BL, mask_BL)
        return outs[0], outs[-1], sums_2
      site = norms.Norm(cfg.norm, mode, eps, self.phase, name=name)
      x_BLD, sums_2 = site(h_BLD, gate_2[i], c[i], mask_BL)
      return x_BLD, x_BLD, sums_2

    x_BLD, value_BLD, attn_sums_2 = norm("attn_norm", h_BLD, 0)
    out_BLD, cache = Attention(cfg, name="attn")(
      x_BLD, value_BLD, position_BL, cache
    )
    h_BLD = sharding.split_rows(h_BLD + out_BLD)
    x_BLD, _, mlp_sums_2 = norm("mlp_norm", h_BLD, 1)
    h_BLD = sharding.split_rows(h_BLD + MLP(cfg, name="mlp")(x_BLD))
    square_BL = _mean_square(h_BLD) if self.watched else None
    return h_BLD, (jnp.stack([attn_sums_2, mlp_sums_2]), cache, square_BL)


def _look_up(embed: nn.Embed, ids_BL: jax.Array) -> jax.Array:
  """embed(ids); on a mesh each device looks its rows up in the whole table."""
  if not sharding.here():
    return embed(ids_BL)
  table_VD = sharding.whole(embed.embedding.astype(embed.dtype))
  return jnp.take(table_VD, ids_BL, axis=0)


def _mean_square(h_BLD):
  h_BLD = h_BLD.astype(jnp.float32)
  return jnp.mean(h_BLD * h_BLD, axis=-1)


class Transformer(nn.Module):
  """Logits, the input of the head or the last stream of a token sequence."""

  config: ModelConfig

  @nn.compact
  def __call__(
    self,
    tokens_BL: jax.Array,
    *,
    gate: float | jax.Array = 1.0,
    c: jax.Array | None = None,
    mask_BL: jax.Array | None = None,
    cache: Cache | None = None,
    position_BL: jax.Array | None = None,
    output: str = "logits",
  ) -> tuple[jax.Array, dict[str, Any]]:
    """Runs the model.

    Args:
      tokens_BL: token ids, int32.
      gate: g of every tapered norm. A Python 1.0 or 0.0 builds one branch
        only; an array builds both: a float scalar, or bool (S,) that chooses
        between norm and fixed map by site. Ignored by a model without tapers.
      c: calibrated factors by site, (S,); needed where gate is not 1.0. Of a
        FakeLN run (3 N + 1, 3), see `fakeln.FakeState`, and always needed.
      mask_BL: weight of each token; when given, tapered norms collect their
        calibration sums unless the gate is 0.0, a FakeLN run sums of s(h).
      cache: keys and values of earlier tokens, from `init_cache`.
      position_BL: positions of the tokens; 0..L-1 when left out.
      output: "logits" (float32), "hidden" for the input of the head, or
        "stream" for the residual stream before the final norm.

    Returns:
      logits_BLV, hidden_BLD or stream_BLD, and a dict: `scale_BL`, s(h) of the
      stream before the final norm, float32 (paper section 3.5: r for RMSNorm,
      sigma for LayerNorm); `sums_S2`, sums by site; `cache`; `weight_BL2`, of a
      FakeLN run with a mask: weights of regular tokens and of position 0.
      With "stream" the dict holds `square_NBL` alone, float32 (N + 1, B, L):
      |h|^2 / D of each token before the first block and behind each block.
    """
    cfg = self.config
    tapers = "taper" in cfg.modes
    fake = cfg.internal_norm == "fake"  # and the final norm, too
    phase = norms.phase_of(gate if tapers else 1.0)
    if c is None:
      if phase != gate_lib.NORM or fake and not self.is_initializing():
        raise ValueError("a tapered model needs c where the gate is below 1")
      shape = (3 * cfg.num_layers + 1, 3) if fake else (2 * cfg.num_layers + 1,)
      c = jnp.zeros(shape, jnp.float32)
    if position_BL is None:
      steps_L = jnp.arange(tokens_BL.shape[1], dtype=jnp.int32)
      position_BL = jnp.broadcast_to(steps_L[None, :], tokens_BL.shape)
    dtype = jnp.dtype(cfg.compute_dtype)
    embedding_VD = nn.Embed(
      cfg.vocab_size,
      cfg.embed_dim,
      embedding_init=_normal(cfg.init_std),
      dtype=dtype,
      name="embed",
    )
    h_BLD = _look_up(embedding_VD, tokens_BL)
    if cfg.positions == "learned":
      position_MD = nn.Embed(
        cfg.context_len,
        cfg.embed_dim,
        embedding_init=_normal(cfg.init_std),
        dtype=dtype,
        name="position_embed",
      )
      h_BLD = h_BLD + _look_up(position_MD, position_BL)
    h_BLD = sharding.split_rows(h_BLD)

    c_N, c_final = c[:-1].reshape(cfg.num_layers, -1, *c.shape[1:]), c[-1]
    gate_S = jnp.broadcast_to(gate, (2 * cfg.num_layers + 1,))
    gate_N2, gate_final = gate_S[:-1].reshape(-1, 2), gate_S[-1]
    first_BLD, watched = h_BLD, output == "stream"
    kind_BL = weight_BL2 = None
    if fake:
      kind_BL = norms.token_kinds(tokens_BL, position_BL, cfg.eot_id)
      if mask_BL is not None:
        kinds_2 = jnp.arange(2)
        weight_BL2 = mask_BL[..., None] * (
          kind_BL[..., None] == kinds_2[None, None, :]
        )
        mask_BL = weight_BL2
    kind_of_block = Block
    if cfg.remat and cache is None:
      kind_of_block = nn.remat(Block, prevent_cse=not cfg.scan_layers)
    if cfg.scan_layers:
      if cache is not None:
        raise ValueError("decoding runs unrolled: use unstack_layers first")
      blocks = nn.scan(
        kind_of_block,
        variable_axes={"params": 0},
        split_rngs={"params": True},
        in_axes=(0, nn.broadcast, 0, *[nn.broadcast] * 3),
        length=cfg.num_layers,
      )(cfg, phase, cfg.modes[:2], watched, name="blocks")
      h_BLD, (sums_N22, _, square_NBL) = blocks(
        h_BLD, c_N, None, gate_N2, position_BL, mask_BL, kind_BL
      )
      caches = None
    else:
      sums, caches, squares = [], [], []
      for n in range(cfg.num_layers):
        modes = cfg.modes[2 * n : 2 * n + 2]
        block = kind_of_block(cfg, phase, modes, watched, name=f"block_{n}")
        past = None if cache is None else cache[n]
        h_BLD, (sums_22, past, square_BL) = block(
          h_BLD, c_N[n], past, gate_N2[n], position_BL, mask_BL, kind_BL
        )
        sums.append(sums_22)
        caches.append(past)
        squares.append(square_BL)
      sums_N22 = jnp.stack(sums)
      square_NBL = jnp.stack(squares) if watched else None
      caches = None if cache is None else tuple(caches)

    if watched:
      first_1BL = _mean_square(first_BLD)[None]
      return h_BLD, {"square_NBL": jnp.concatenate([first_1BL, square_NBL])}
    measure = norms.rms_scale if cfg.norm == "rms" else norms.layer_scale
    scale_BL = measure(h_BLD, cfg.norm_eps)[..., 0]
    if fake:
      site = norms.FakeNorm(cfg.norm, cfg.norm_eps, name="final_norm")
      outs, final_sums_2 = site(h_BLD, c_final[None, :], kind_BL, mask_BL)
      h_BLD = outs[0]
    else:
      h_BLD, final_sums_2 = norms.Norm(
        cfg.norm, cfg.final_norm, cfg.norm_eps, phase, name="final_norm"
      )(h_BLD, gate_final, c_final, mask_BL)
    sums_S2 = jnp.concatenate([sums_N22.reshape(-1, 2), final_sums_2[None, :]])
    aux = {"scale_BL": scale_BL, "sums_S2": sums_S2, "cache": caches}
    if fake:
      aux["weight_BL2"] = weight_BL2
    if not cfg.tied:
      head = Linear(
        (cfg.vocab_size,), 1, "head" in cfg.biases, cfg.init_std, dtype,
        jnp.float32, name="head",
      )
    if output == "hidden":
      if not cfg.tied and self.is_initializing():
        head(h_BLD)
      return h_BLD, aux
    if cfg.tied:
      logits_BLV = jax.lax.dot_general(
        h_BLD,
        embedding_VD.embedding.astype(dtype),
        (((2,), (1,)), ((), ())),
        preferred_element_type=jnp.float32,
      )
      return logits_BLV, aux
    return head(h_BLD), aux


def head_weights(
  params: dict, config: ModelConfig
) -> tuple[jax.Array, jax.Array | None]:
  """The head as (kernel_DV, bias_V or None), tied or not, float32."""
  if config.tied:
    return params["embed"]["embedding"].T, None
  return params["head"]["kernel"], params["head"].get("bias")


def init_params(config: ModelConfig, key: jax.Array) -> dict:
  """Fresh parameters: N(0, init_std^2), residual outputs / sqrt(2 N).

  The embedding's 0.02 is derived from the paper's Fig. 3, the rest is [U]:
  the paper does not say; ours follows GPT-2's habit.
  """
  tokens_BL = jnp.zeros((1, 1), jnp.int32)
  return Transformer(config).init(key, tokens_BL)["params"]


def add_tapers(params: dict, config: ModelConfig) -> dict:
  """Parameters of a model with plain norms, with gamma~ where they taper."""
  def tapered(norm):
    return {**norm, "taper_scale": jnp.copy(norm["scale"])}

  params = dict(params)
  names = site_names(config.num_layers)
  for site in config.tapered_sites:
    block, _, norm = names[site].rpartition(".")
    if block:
      params[block] = {**params[block], norm: tapered(params[block][norm])}
    else:
      params[norm] = tapered(params[norm])
  return params


def init_cache(config: ModelConfig, batch_size: int, length: int) -> Cache:
  """Empty keys and values for every layer, in the compute dtype."""
  shape = (batch_size, length, config.num_kv_heads, config.head_dim)
  empty = lambda: jnp.zeros(shape, jnp.dtype(config.compute_dtype))
  return tuple((empty(), empty()) for _ in range(config.num_layers))


def stack_layers(params: dict, config: ModelConfig) -> dict:
  """One tree for all layers, as `scan_layers` wants it."""
  params = dict(params)
  blocks = [params.pop(f"block_{n}") for n in range(config.num_layers)]
  params["blocks"] = jax.tree.map(lambda *xs: jnp.stack(xs), *blocks)
  return params


def unstack_layers(
  params: dict, config: ModelConfig
) -> tuple[dict, ModelConfig]:
  """The same model with one tree for each layer, as decoding wants it."""
  if not config.scan_layers:
    return params, config
  params = dict(params)
  stacked = params.pop("blocks")
  for n in range(config.num_layers):
    params[f"block_{n}"] = jax.tree.map(lambda x, n=n: x[n], stacked)
  return params, config.replace(scan_layers=False)


def count_params(params: dict) -> tuple[int, int]:
  """(parameters of the model, gamma~ apart: `params_taper`)."""
  total, taper = 0, 0
  for path, leaf in jax.tree_util.tree_leaves_with_path(params):
    if path[-1].key == "taper_scale":
      taper += leaf.size
    else:
      total += leaf.size
  return total, taper
