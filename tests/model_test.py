"""The transformer against a float64 numpy one, and the promises of the gate."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.interpreters import partial_eval

from taperjax import model
from tests import tiny

B, L, D, V, S = tiny.B, tiny.L, tiny.D, tiny.V, tiny.S


@functools.cache
def jitted(config, gate="traced"):
  """Logits and aux of a model, compiled once for each branch."""
  run = lambda params, tokens, g, c, mask: model.Transformer(config).apply(
    {"params": params}, tokens, gate=g, c=c, mask_BL=mask
  )
  if gate == "traced":
    return jax.jit(run)
  return jax.jit(lambda p, t, g, c, m: run(p, t, gate, c, m))


def logits(config, params, tokens, gate=1.0, c=None, mask=None):
  c = tiny.c(config) if c is None else c
  branch = gate if gate in (0.0, 1.0) else "traced"
  run = jitted(config, branch)
  return run(params, tokens, jnp.float32(gate), c, mask)


# --- The same model in numpy, float64, one head and one block after another.


def np_norm(site, h, config, gate, c):
  eps, tapered = config.norm_eps, "taper_scale" in site
  bias = site.get("bias", 0.0)
  x = h - h.mean(-1, keepdims=True) if config.norm == "layer" else h
  r = np.sqrt((x**2).mean(-1, keepdims=True) + eps)
  if not tapered:
    return x / r * site["scale"] + bias
  fixed = c * x * site["taper_scale"]
  return gate * x / r * site["scale"] + (1 - gate) * fixed + bias


def np_linear(site, x, axes=1):
  y = np.tensordot(x, site["kernel"], axes)
  return y + site["bias"] if "bias" in site else y


def np_turn(x, theta, rotary_dim):
  half = rotary_dim // 2
  frequency = theta ** (-2.0 * np.arange(half) / rotary_dim)
  angle = np.arange(x.shape[1])[:, None] * frequency
  turn = np.exp(1j * angle)[None, :, None, :]
  pair = (x[..., :half] + 1j * x[..., half:rotary_dim]) * turn
  return np.concatenate([pair.real, pair.imag, x[..., rotary_dim:]], -1)


def np_attention(site, x, config, value=None):
  q, k = np_linear(site["q"], x), np_linear(site["k"], x)
  v = np_linear(site["v"], x if value is None else value)
  if config.positions == "rope":
    q = np_turn(q, config.rope_theta, config.rotary_dim)
    k = np_turn(k, config.rope_theta, config.rotary_dim)
  share = config.num_heads // config.num_kv_heads
  out = np.zeros_like(q)
  for h in range(config.num_heads):
    s = np.einsum("blk,bmk->blm", q[:, :, h], k[:, :, h // share])
    s = s / np.sqrt(config.head_dim)
    s = np.where(np.tri(s.shape[1], dtype=bool), s, -np.inf)
    p = np.exp(s - s.max(-1, keepdims=True))
    p = p / p.sum(-1, keepdims=True)
    out[:, :, h] = p @ v[:, :, h // share]
  return np_linear(site["o"], out, 2)


def np_mlp(site, x, config):
  up = np_linear(site["up"], x)
  if config.mlp == "swiglu":
    gate = np_linear(site["gate"], x)
    return np_linear(site["down"], gate / (1 + np.exp(-gate)) * up)
  if config.mlp == "gelu_tanh":
    inner = np.sqrt(2 / np.pi) * (up + 0.044715 * up**3)
    return np_linear(site["down"], 0.5 * up * (1 + np.tanh(inner)))
  erf = np.vectorize(__import__("math").erf)
  return np_linear(site["down"], 0.5 * up * (1 + erf(up / np.sqrt(2))))


def np_logits(config, params, tokens, gate, c):
  """Pre-norm blocks that add to the raw stream, then norm and head."""
  params = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
  c = np.asarray(c, np.float64)
  embedding = params["embed"]["embedding"]
  h = embedding[np.asarray(tokens)]
  if config.positions == "learned":
    h = h + params["position_embed"]["embedding"][: h.shape[1]]
  for n in range(config.num_layers):
    block = params[f"block_{n}"]
    x = np_norm(block["attn_norm"], h, config, gate, c[2 * n])
    h = h + np_attention(block["attn"], x, config)
    x = np_norm(block["mlp_norm"], h, config, gate, c[2 * n + 1])
    h = h + np_mlp(block["mlp"], x, config)
  x = np_norm(params["final_norm"], h, config, gate, c[-1])
  if config.tied:
    return x @ embedding.T, h
  return np_linear(params["head"], x), h


LLAMA = tiny.model_config(num_heads=6, num_kv_heads=2, rotary_dim=2)
GPT2 = tiny.gpt2_config()
UNTIED = tiny.gpt2_config(
  tied=False, biases=("k", "gate", "up", "head"), mlp="swiglu", norm="rms"
)
EXACT_GELU = tiny.model_config(mlp="gelu", internal_norm="norm", norm="layer")


@pytest.mark.parametrize(
  "config, gate",
  [
    (LLAMA, 1.0),
    (LLAMA, 0.4),
    (LLAMA, 0.0),
    (GPT2, 1.0),
    (GPT2, 0.4),
    (GPT2, 0.0),
    (UNTIED, 0.4),
    (EXACT_GELU, 0.4),
  ],
  ids=lambda x: x if isinstance(x, float) else f"{x.norm}-{x.mlp}",
)
def test_model_is_the_textbook_one(config, gate):
  """A wrong baseline makes a false gain, and a wrong GELU is off by 1e-3.

  Logits of standard deviation 1 in float32 are within 1e-5 of float64; the
  weakest mistake to find is ten times that, the bound of conversions 1e-4.
  """
  params, tokens, c = tiny.params(config), tiny.tokens(50), tiny.c(config)
  expected, h = np_logits(config, params, tokens, gate, c)
  assert 0.3 < expected.std() < 3
  got, aux = logits(config, params, tokens, gate)
  assert got.dtype == jnp.float32 and got.shape == (50, L, V)
  np.testing.assert_allclose(got, expected, rtol=0, atol=2e-5)
  # s(h) is that of the raw stream before the final norm, whatever the gate.
  x = h - h.mean(-1, keepdims=True) if config.norm == "layer" else h
  s = np.sqrt((x**2).mean(-1) + config.norm_eps)
  np.testing.assert_allclose(aux["scale_BL"], s, rtol=1e-5)


@pytest.mark.parametrize(
  "size, heads, expected",
  [
    (64, 16, 1_042_496),
    (128, 16, 2_863_232),
    (256, 16, 8_888_576),
    (512, 16, 30_327_296),
  ],
)
def test_named_sizes_have_the_parameters_of_the_paper(size, heads, expected):
  """Vocabulary 10,000, tied, 8 layers; gamma~ is counted apart."""
  import configs.tinystories
  from taperjax import config as config_lib

  name = {64: "1m", 128: "3m", 256: "9m", 512: "30m"}[size]
  for variant, sites in {"baseline": 0, "internal_aux": 16, "all": 17}.items():
    fields = configs.tinystories.get_config(f"{name},{variant}")
    config = config_lib.parse(fields).model
    assert (config.embed_dim, config.num_heads) == (size, heads)
    shapes = jax.eval_shape(
      lambda config=config: model.init_params(config, jax.random.key(0))
    )
    assert model.count_params(shapes) == (expected, sites * size)


def without_taper(params):
  """The parameters of the plain model inside a tapered one."""
  return {
    name: without_taper(value) if isinstance(value, dict) else value
    for name, value in params.items()
    if name != "taper_scale"
  }


@pytest.mark.parametrize("config", [tiny.model_config(), tiny.gpt2_config()],
                         ids=["rms", "layer"])
def test_at_gate_one_the_tapered_model_is_the_plain_one_bit_for_bit(config):
  """The promise that lets both share their warm-up: same arithmetic.

  Collecting statistics beside it must not change a bit either.
  """
  plain = config.replace(internal_norm="norm", final_norm="norm")
  params, tokens = tiny.params(config), tiny.tokens()
  expected, _ = logits(plain, without_taper(params), tokens)
  got, _ = logits(config, params, tokens)
  np.testing.assert_array_equal(got, expected)
  collecting, aux = logits(config, params, tokens, mask=tiny.mask())
  np.testing.assert_array_equal(collecting, expected)
  assert np.all(np.asarray(aux["sums_S2"]) > 0)
  # The taper branch at g = 1 is another program: to rounding.
  traced, _ = jitted(config)(
    params, tokens, jnp.float32(1), tiny.c(config), None
  )
  np.testing.assert_allclose(traced, expected, rtol=0, atol=1e-5)


# --- What the graph computes on the way to the logits.

REDUCTIONS = (
  "reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce",
  "reduce_window", "argmax", "argmin", "cumsum", "cumlogsumexp", "cumprod",
  "cummax", "cummin", "reduce_precision",
)


def equations(jaxpr):
  """All equations, those of pjit, scan, cond, remat, custom_jvp included."""
  for eqn in jaxpr.eqns:
    subs = [
      sub
      for value in eqn.params.values()
      for sub in (value if isinstance(value, tuple | list) else (value,))
      if hasattr(sub, "eqns") or hasattr(sub, "jaxpr")
    ]
    times = eqn.params["length"] if eqn.primitive.name == "scan" else 1
    for sub in subs:
      for _ in range(times):
        yield from equations(getattr(sub, "jaxpr", sub))
    if not subs:
      yield eqn


def stream_statistics(config, gate):
  """(reductions over the width D, roots) on the way to the logits.

  D is no other axis of the model, so that softmax, head and loss do not count.
  A product of two activations over D would be a reduction as well.
  """
  sizes = (B, L, config.head_dim, config.mlp_dim, V, S, config.num_heads)
  assert D not in sizes
  params, c = tiny.params(config.replace(scan_layers=False)), tiny.c(config)
  if config.scan_layers:
    blocks = [params.pop(f"block_{n}") for n in range(config.num_layers)]
    params["blocks"] = jax.tree.map(lambda *x: jnp.stack(x), *blocks)

  def run(params, c, tokens, gate=gate):
    apply = model.Transformer(config).apply
    return apply({"params": params}, tokens, gate=gate, c=c)[0]

  args = (params, c, tiny.tokens())
  if gate not in (0.0, 1.0):
    args = (*args, jnp.float32(gate))
  closed = jax.make_jaxpr(run)(*args)
  # The model also returns s(h) for the scale loss: not the way to the logits.
  jaxpr, _ = partial_eval.dce_jaxpr(closed.jaxpr, [True])
  reductions, roots, seen = 0, 0, 0
  for eqn in equations(jaxpr):
    seen += 1
    name = eqn.primitive.name
    if name in ("sqrt", "rsqrt", "cbrt", "pow"):
      # theta^-x of the rotary frequencies is a power of shape (K / 2,).
      roots += eqn.outvars[0].aval.shape[:1] == (B,)
    if name in REDUCTIONS:
      shape = eqn.invars[0].aval.shape
      axes = eqn.params.get("axes", range(len(shape)))
      reductions += D in [shape[axis] for axis in axes]
    if name == "dot_general":
      (left, right), _ = eqn.params["dimension_numbers"]
      a, b = (var.aval.shape for var in eqn.invars)
      both = len(a) >= 3 and len(b) >= 3 and a[:1] == b[:1] == (B,)
      reductions += both and D in [a[axis] for axis in left]
  assert seen > 50, "the walk saw nothing"
  return reductions, roots


@pytest.mark.parametrize("scan", [False, True], ids=["unrolled", "scan"])
@pytest.mark.parametrize("backend", ["cpu", "gpu"])
def test_at_gate_zero_no_norm_statistic_is_on_the_way_to_the_logits(
  scan, backend, monkeypatch
):
  """The point of the method. RMS has no reduction of the stream at all; the
  layer norm keeps one mean at each site, the centring, and no root.

  At g = 0.5, and at g = 1, the same count finds every site: it can fail.
  """
  # The other attention routine is traced as well, though it runs elsewhere.
  monkeypatch.setattr(jax, "default_backend", lambda: backend)
  rms = tiny.model_config(scan_layers=scan)
  layer = tiny.gpt2_config(scan_layers=scan)
  assert stream_statistics(rms, 0.0) == (0, 0)
  assert stream_statistics(layer, 0.0) == (S, 0)
  assert stream_statistics(rms, 0.5) == (S, S)
  reductions, roots = stream_statistics(layer, 0.5)
  assert reductions >= 2 * S and roots == S
  assert stream_statistics(rms, 1.0) == (S, S)


@pytest.mark.parametrize(
  "internal, final, kept",
  [("norm", "norm", S), ("taper", "norm", 1), ("norm", "taper", S - 1)],
)
def test_at_gate_zero_the_untapered_norms_stay(internal, final, kept):
  """Table 1: internal tapers keep the final norm, and the other way round."""
  config = tiny.model_config(internal_norm=internal, final_norm=final)
  assert stream_statistics(config, 0.0) == (kept, kept)
  folded = {"taper": "none", "norm": "norm"}
  config = tiny.model_config(
    internal_norm=folded[internal], final_norm=folded[final]
  )
  assert stream_statistics(config, 1.0) == (kept, kept)


@pytest.mark.parametrize("name", ["rms", "layer"])
def test_no_gradient_comes_from_future_tokens(name):
  """A leak makes the loss too good; at g = 0.4 both branches are in."""
  config = {"rms": LLAMA, "layer": GPT2}[name]
  params, c = tiny.params(config), tiny.c(config)
  at = 3

  # Through the embedding: each position gets its own row of the table.
  tokens = jnp.tile(jnp.arange(L)[None], (B, 1))

  @jax.jit
  @jax.grad
  def grad(embedding):
    untied = config.replace(tied=False)
    tree = {
      **params,
      "embed": {"embedding": embedding},
      "head": {"kernel": params["embed"]["embedding"].T},
    }
    out, _ = model.Transformer(untied).apply(
      {"params": tree}, tokens, gate=jnp.float32(0.4), c=c
    )
    return jnp.sum(jnp.sin(out[:, at]))

  size = np.abs(np.asarray(grad(params["embed"]["embedding"]))).sum(-1)
  assert np.all(size[at + 1 : L] == 0)
  assert np.all(size[: at + 1] > 0)


@pytest.mark.parametrize(
  "config, gate", [(LLAMA, 1.0), (GPT2, 0.4)], ids=["rms", "layer"]
)
def test_scanned_layers_are_the_unrolled_ones(config, gate):
  """One compiled block for all layers; c and statistics by site as well.

  Another program for the same arithmetic: to float32 rounding.
  """
  config = config.replace(num_layers=5)
  scanned = config.replace(scan_layers=True)
  params = tiny.params(scanned)
  flat, unrolled = model.unstack_layers(params, scanned)
  assert unrolled == config and "blocks" not in flat
  assert "blocks" in params  # the caller's tree is not emptied
  c = tiny.c(config)
  mask = tiny.mask()
  got, aux = logits(scanned, params, tiny.tokens(), gate, c, mask)
  want, expected = logits(config, flat, tiny.tokens(), gate, c, mask)
  np.testing.assert_allclose(got, want, rtol=0, atol=2e-5)
  np.testing.assert_allclose(aux["scale_BL"], expected["scale_BL"], rtol=1e-5)
  np.testing.assert_allclose(aux["sums_S2"], expected["sums_S2"], rtol=2e-5)
  same, again = model.unstack_layers(flat, config)
  assert same is flat and again is config


def test_hidden_output_times_the_head_is_the_logits():
  """The trainer forms its logits itself, in chunks."""
  for config in (LLAMA, UNTIED):
    params, c = tiny.params(config), tiny.c(config)
    hidden, _ = model.Transformer(config).apply(
      {"params": params}, tiny.tokens(), gate=0.0, c=c, output="hidden"
    )
    kernel, bias = model.head_weights(params, config)
    assert (bias is not None) == ("head" in config.biases)
    got = hidden @ kernel
    got = got if bias is None else got + bias[None, None, :]
    want, _ = logits(config, params, tiny.tokens(), 0.0)
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-5)


def test_bfloat16_keeps_float32_parameters_logits_and_scales():
  """Only matrix products and the stream are narrow.

  2^-8 for each rounding of the stream, at logits of about 1.
  """
  config = tiny.model_config(compute_dtype="bfloat16")
  params = tiny.params(config)
  assert all(x.dtype == jnp.float32 for x in jax.tree.leaves(params))
  got, aux = logits(config, params, tiny.tokens(), mask=tiny.mask())
  want, _ = logits(tiny.model_config(), params, tiny.tokens())
  assert got.dtype == jnp.float32
  assert aux["scale_BL"].dtype == aux["sums_S2"].dtype == jnp.float32
  difference = np.abs(np.asarray(got) - np.asarray(want))
  assert 1e-4 < difference.max() < 0.15
  shapes = jax.eval_shape(
    lambda: model.init_params(config, jax.random.key(0))
  )
  assert {x.dtype for x in jax.tree.leaves(shapes)} == {jnp.dtype("float32")}


def test_cached_pass_equals_the_full_one_at_every_position():
  """A prompt, then one token after another, in both families."""
  for config, gate in ((LLAMA, 0.4), (GPT2, 0.0)):
    params, c, tokens = tiny.params(config), tiny.c(config), tiny.tokens()
    full, _ = logits(config, params, tokens, gate)
    g = gate if gate in (0.0, 1.0) else jnp.float32(gate)

    @jax.jit
    def step(tokens, cache, start, config=config, params=params, g=g, c=c):
      position = jnp.tile(start + jnp.arange(tokens.shape[1])[None], (B, 1))
      out, aux = model.Transformer(config).apply(
        {"params": params}, tokens, gate=g, c=c, cache=cache,
        position_BL=position,
      )
      return out, aux["cache"]

    cache = model.init_cache(config, B, L + 2)
    out, cache = step(tokens[:, :4], cache, 0)
    np.testing.assert_allclose(out, full[:, :4], rtol=0, atol=1e-5)
    for at in range(4, L):
      out, cache = step(tokens[:, at : at + 1], cache, at)
      np.testing.assert_allclose(out[:, 0], full[:, at], rtol=0, atol=1e-5)


def test_a_tapered_model_below_gate_one_asks_for_c():
  """Zeros would silently give a model without any signal."""
  config = tiny.model_config()
  with pytest.raises(ValueError, match="needs c where the gate is below 1"):
    model.Transformer(config).apply(
      {"params": tiny.params(config)}, tiny.tokens(), gate=0.0
    )


def test_a_scanned_model_refuses_a_cache():
  """Decoding runs unrolled, and the message names the function to call."""
  config = tiny.model_config(scan_layers=True)
  with pytest.raises(ValueError, match="use unstack_layers first"):
    model.Transformer(config).apply(
      {"params": tiny.params(config)},
      tiny.tokens(),
      cache=model.init_cache(config, B, L),
    )


def test_initial_values_have_the_documented_spread():
  """Gains 1, biases 0, N(0, 0.02^2), residual outputs / sqrt(2 N).

  The embedding's 0.02 sets the paper's first logit norm. Spreads of 2,048 and
  more numbers are known to 5 percent at three standard errors.
  """
  config = tiny.gpt2_config(
    num_layers=1, embed_dim=64, mlp_dim=160, num_heads=16, num_kv_heads=16,
    vocab_size=310,
  )
  params = jax.jit(
    lambda: model.init_params(config, jax.random.key(0))
  )()
  checked = 0
  for path, leaf in jax.tree_util.tree_leaves_with_path(params):
    names = [part.key for part in path]
    if names[-1] in ("scale", "taper_scale"):
      assert np.all(np.asarray(leaf) == 1)
    elif names[-1] == "bias":
      assert np.all(np.asarray(leaf) == 0)
    elif leaf.size > 2_000:
      residual = names[-2] in ("o", "down")
      std = 0.02 / np.sqrt(2 * config.num_layers) if residual else 0.02
      np.testing.assert_allclose(np.std(leaf), std, rtol=0.05, err_msg=names)
      assert abs(np.mean(leaf)) < 0.1 * std
      checked += 1
  assert checked == 1 + 6 * config.num_layers
