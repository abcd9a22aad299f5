"""Tapered models in stock classes: the same logits, in our model and in theirs.

At least 300 positions, logits of standard deviation 1, gains in [0.3, 3].
"""

import copy
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from taperjax import folding, model
from taperjax.errors import UserError
from taperjax.interop import gpt2, llama, stock
from tests import tiny

ROWS = 30  # of tiny.M tokens: 390 positions
MODES = {"huge_eps": ("taper", "taper"), "ballast": ("taper", "norm")}
LLAMA = {"rotary_dim": tiny.K}
KINDS = {
  "llama, tied": (tiny.model_config, LLAMA),
  "llama, untied, grouped": (
    tiny.model_config, {**LLAMA, "num_kv_heads": 1, "tied": False}
  ),
  "llama, biases": (
    tiny.model_config,
    {**LLAMA, "biases": ("q", "k", "v", "o", "gate", "up", "down")},
  ),
  "llama, head_dim apart from width": (
    tiny.model_config, {"num_heads": 3, "num_kv_heads": 3, "head_dim": 6,
                        "rotary_dim": 6, "embed_dim": 12}
  ),
  "rms and gelu": (
    tiny.model_config, {"mlp": "gelu", "positions": "learned"}
  ),
  "gpt2, tied": (tiny.gpt2_config, {}),
  "gpt2, untied": (tiny.gpt2_config, {"tied": False, "mlp": "gelu"}),
  "gpt2, untied, head bias": (
    tiny.gpt2_config,
    {"tied": False, "biases": ("q", "k", "v", "o", "up", "down", "head")},
  ),
  "gpt2, no biases, grouped": (
    tiny.gpt2_config,
    {"num_heads": 4, "num_kv_heads": 2, "head_dim": 2, "biases": ()},
  ),
}


# Compilation is the cost here, so XLA does not optimise.
@functools.partial(
  jax.jit,
  static_argnames=("config", "gate"),
  compiler_options={"xla_backend_optimization_level": 0},
)
def _logits(params, tokens_BL, c, *, config, gate):
  apply = model.Transformer(config).apply
  return apply({"params": params}, tokens_BL, gate=gate, c=c)[0]


def logits(params, config, tokens_BL, gate=1.0, c=None):
  return np.asarray(_logits(params, tokens_BL, c, config=config, gate=gate))


def make(form, kind, length=tiny.M, **changes):
  """(params, c, config, tokens, logits at gate 0), logits of deviation 1."""
  build, fields = KINDS[kind]
  internal, final = MODES[form]
  config = build(
    internal_norm=internal, final_norm=final, **{**fields, **changes}
  )
  params, c_S = tiny.params(config), tiny.c(config)
  tokens_BL = tiny.tokens(ROWS, length)
  std = logits(params, config, tokens_BL, gate=0.0, c=c_S).std()
  params = dict(params)
  scaled = {name: x / std for name, x in params["final_norm"].items()}
  params["final_norm"] = scaled
  if "bias" in params.get("head", {}):
    params["head"] = params["head"] | {"bias": params["head"]["bias"] / std}
  want_BLV = logits(params, config, tokens_BL, gate=0.0, c=c_S)
  assert abs(want_BLV.std() - 1) < 1e-3
  return params, c_S, config, tokens_BL, want_BLV


@pytest.mark.parametrize(("form", "kind"), [
  *(("ballast", kind) for kind in KINDS),
  ("huge_eps", "llama, untied, grouped"),
  ("huge_eps", "gpt2, tied"),
  ("huge_eps", "gpt2, untied, head bias"),
])
def test_the_stock_form_has_the_logits_of_gate_0(form, kind):
  params, c_S, config, tokens_BL, want_BLV = make(form, kind)
  got, stock_config, info = stock.stock_form(params, c_S, config)
  assert info["form"] == form
  assert stock_config.internal_norm == stock_config.final_norm == "norm"
  assert stock_config.tied == config.tied
  assert "taper_scale" not in str(got.keys()) + str(got["block_0"])
  assert stock_config.embed_dim % 8 == 0 or form == "huge_eps"
  got_BLV = logits(got, stock_config, tokens_BL)
  assert np.abs(got_BLV - want_BLV).max() < 1e-5


def test_a_huge_eps_gives_the_bits_of_the_fixed_map():
  """2^20 is exact and 2^40 swallows the variance: one rounding is left."""
  params, c_S, config, tokens_BL, want_BLV = make("huge_eps", "llama, tied")
  got, stock_config, info = stock.huge_eps(params, c_S, config)
  assert stock_config.norm_eps == info["eps"] == 1_099_511_627_776.0
  # The product c gamma~ is rounded once here and in float32 there.
  got_BLV = logits(got, stock_config, tokens_BL)
  assert np.abs(got_BLV - want_BLV).max() < 1e-6
  taper_scale_D = np.float64(params["block_0"]["mlp_norm"]["taper_scale"])
  want_D = np.float64(c_S[1]) * taper_scale_D
  got_D = got["block_0"]["mlp_norm"]["scale"]
  np.testing.assert_array_equal(got_D, np.float32(want_D * 2.0**20))


@pytest.mark.parametrize("kind", ["llama, tied", "gpt2, tied"])
def test_a_spike_in_the_stream_does_not_lift_the_ballast(kind):
  """Real models have tokens of a norm far above the others' (position 0).

  The residual stream has a deviation of about 1, the spike of 11.
  """
  params, c_S, config, tokens_BL, _ = make("ballast", kind)
  embedding_VD = np.array(params["embed"]["embedding"]) / 0.3
  embedding_VD[5] *= 11.0
  params = params | {"embed": {"embedding": jnp.asarray(embedding_VD)}}
  for name in ("block_0", "block_1"):  # or the stream grows without norms
    block = dict(params[name])
    for part, last in (("attn", "o"), ("mlp", "down")):
      out = {k: 0.2 * x for k, x in block[part][last].items()}
      block[part] = block[part] | {last: out}
    params[name] = block
  c_S = c_S * 0.3
  tokens_BL = tokens_BL.at[:, 0].set(5)
  want_BLV = logits(params, config, tokens_BL, gate=0.0, c=c_S)
  got, stock_config, _ = stock.stock_form(params, c_S, config)
  got_BLV = logits(got, stock_config, tokens_BL)
  assert np.abs(got_BLV - want_BLV).max() < 2e-5 * want_BLV.std()


def test_a_root_that_is_off_by_one_ulp_leaves_little_ballast():
  """GPUs round a reciprocal root otherwise: C times that ulp stays behind."""
  params, c_S, config, tokens_BL, want_BLV = make("ballast", "llama, tied")
  _, aux = model.Transformer(config).apply(
    {"params": params}, tokens_BL, gate=0.0, c=c_S
  )
  c_last = 1 / aux["scale_BL"].mean()  # as calibration would have it
  norm = params["block_1"]["mlp_norm"]
  norm["taper_scale"] *= c_S[-2] / c_last
  c_S = c_S.at[-2].set(c_last)
  got, stock_config, _ = stock.stock_form(params, c_S, config)
  scale_D = got["block_1"]["mlp_norm"]["scale"]
  scale_D[tiny.D] = np.nextafter(scale_D[tiny.D], np.float32(9))
  delta_BLV = logits(got, stock_config, tokens_BL) - want_BLV
  assert 0 < np.sqrt(np.mean(delta_BLV**2)) < 1e-5
  # The smallest token of this model has a seventh of the usual norm.
  assert np.abs(delta_BLV).max() < 5e-4


def test_the_last_mlp_takes_the_ballast_off():
  """The constants of the removal, and that float16 holds all of it."""
  params, c_S, config, tokens_BL, want_BLV = make("ballast", "llama, tied")
  got, stock_config, info = stock.ballast(
    params, c_S, config, dtype="float16", log2=14
  )
  nb, width = info["ballast"], stock_config.embed_dim
  assert info["embed_dim"] == [tiny.D, width] == [8, 16]
  assert info["mlp_dim"] == [tiny.F, tiny.F + 4]
  assert "float16" in info["dtypes"]
  pads_VD = got["embed"]["embedding"][:, tiny.D :]
  want_D = np.zeros(width - tiny.D)
  want_D[:nb] = 2**14
  np.testing.assert_array_equal(pads_VD, np.broadcast_to(want_D, pads_VD.shape))
  mlp = got["block_1"]["mlp"]
  assert mlp["gate"]["kernel"][tiny.D, tiny.F] == 64
  assert mlp["up"]["kernel"][tiny.D, tiny.F] == 1
  assert set(mlp["down"]["kernel"][tiny.F, tiny.D :]) == {0, -(2**8)}
  assert not got["block_0"]["mlp"]["down"]["kernel"][tiny.F :].any()
  assert not got["final_norm"]["scale"][tiny.D :].any()
  np.testing.assert_array_equal(
    got["embed"]["embedding"][:, : tiny.D], params["embed"]["embedding"]
  )
  _, _, info = stock.ballast(params, c_S, config, log2=20)
  assert "float16" not in info["dtypes"]


@pytest.mark.parametrize(
  ("d", "unit", "pairs", "width", "count"),
  [
    (64, 8, False, 96, 24), (256, 16, False, 288, 18), (512, 8, False, 576, 36),
    (576, 9, False, 864, 216), (2048, 32, False, 2112, 33),
    (48, 16, True, 64, 4), (384, 64, True, 448, 28), (768, 64, True, 832, 52),
  ],
)
def test_widths_leave_room_for_the_ballast(d, unit, pairs, width, count):
  got, nb, j = stock._width(d, unit, pairs)
  assert (got, nb) == (width, count)
  assert got == nb * 4**j and got % unit == 0 and got - d > nb


def test_the_mean_beside_the_ballast_is_that_of_the_row():
  """Or the final LayerNorm would centre by another mean."""
  rng = np.random.default_rng(0)
  rows_Vd = np.float32(rng.normal(0.1, 1.0, (50, 48)))
  ballast_D = np.zeros(64)
  ballast_D[48:52] = [2**15, -(2**15)] * 2
  for dtype, bound in (("float32", 1e-8), ("bfloat16", 1e-8)):
    wide_VD = stock._with_means(rows_Vd, ballast_D, 4, dtype)
    held_VD = np.float64(wide_VD) - ballast_D
    means_V = np.float64(rows_Vd).mean(axis=1)
    np.testing.assert_allclose(held_VD.mean(axis=1), means_V, atol=bound)


@pytest.mark.parametrize("form", MODES)
def test_stacked_layers_and_the_arrays_of_the_caller(form):
  """Parameters of a scan come apart, and nothing is changed in place."""
  params, c_S, config, _, _ = make(form, "llama, tied")
  before = copy.deepcopy(params)
  want, want_config, _ = stock.stock_form(params, c_S, config)
  jax.tree.map(np.testing.assert_array_equal, params, before)
  blocks = [params.pop(f"block_{n}") for n in range(config.num_layers)]
  params["blocks"] = jax.tree.map(lambda *x: jnp.stack(x), *blocks)
  got, stock_config, _ = stock.stock_form(
    params, c_S, config.replace(scan_layers=True)
  )
  assert stock_config == want_config
  jax.tree.map(np.testing.assert_array_equal, got, want)


def test_a_baseline_stays_as_it_is():
  config = tiny.model_config(internal_norm="norm", final_norm="norm")
  params = tiny.params(config)
  got, same, info = stock.stock_form(params, np.zeros(tiny.S), config)
  assert same == config and info["form"] == "plain"
  jax.tree.map(np.testing.assert_array_equal, got, params)


def test_what_has_no_stock_form_is_refused_in_one_line():
  config = tiny.model_config(internal_norm="norm")
  params = tiny.params(config)
  with pytest.raises(UserError, match="final_norm=taper.*one eps.*remote-code"):
    stock.stock_form(params, tiny.c(config), config)
  config = tiny.model_config()
  params, c_S = tiny.params(config), tiny.c(config)
  folded, folded_config = folding.fold(params, c_S, config)
  with pytest.raises(UserError, match="norm=none.*unfolded checkpoint"):
    stock.stock_form(folded, c_S, folded_config)
  with pytest.raises(UserError, match="dtype=float16.*bfloat16"):
    stock.stock_form(params, c_S, config, dtype="float16")
  for broken in (0.0, np.nan):
    with pytest.raises(UserError, match="at block_1.mlp_norm is not a calib"):
      stock.stock_form(params, c_S.at[3].set(broken), config)
  internal = config.replace(final_norm="norm")
  with pytest.raises(UserError, match="c=0 at block_0.attn_norm"):
    stock.stock_form(params, c_S.at[0].set(0.0), internal)
  with pytest.raises(UserError, match="leaves float32"):
    stock.stock_form(params, c_S.at[0].set(1e38), config)


@pytest.mark.parametrize("form", MODES)
@pytest.mark.parametrize("kind", ["llama, untied, grouped", "gpt2, tied"])
def test_the_real_class_has_the_logits_and_the_greedy_text(
  form, kind, tmp_path
):
  """transformers, without remote code, saved and loaded again, with a cache."""
  pytest.importorskip("transformers")
  import torch
  import transformers

  length = 24
  params, c_S, config, tokens_BL, want_BLV = make(
    form, kind, length, context_len=40
  )
  got, stock_config, _ = stock.stock_form(params, c_S, config)
  if config.norm == "rms":
    tensors, hf_config = llama.to_hf(got, stock_config)
    kind = transformers.LlamaConfig, transformers.LlamaForCausalLM
  else:
    tensors, hf_config = gpt2.to_hf(got, stock_config)
    kind = transformers.GPT2Config, transformers.GPT2LMHeadModel
  ids = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
  theirs = kind[1](kind[0](**{**hf_config, **ids}))
  state = {name: torch.from_numpy(x) for name, x in tensors.items()}
  missing = theirs.load_state_dict(state, strict=False)
  assert missing.unexpected_keys == []
  assert set(missing.missing_keys) <= {"lm_head.weight"}
  theirs.tie_weights()
  theirs.save_pretrained(tmp_path)
  theirs = kind[1].from_pretrained(tmp_path, dtype=torch.float32).eval()
  with torch.no_grad():
    ids_BL = torch.tensor(np.asarray(tokens_BL)).long()
    got_BLV = theirs(ids_BL).logits.numpy()
    assert np.abs(got_BLV - want_BLV).max() < 2e-5
    text = theirs.generate(
      ids_BL[:3, :8], attention_mask=torch.ones_like(ids_BL[:3, :8]),
      max_new_tokens=16, do_sample=False, use_cache=True, pad_token_id=0,
    ).numpy()
  want_BL = np.asarray(tokens_BL[:3, :8])
  apply = lambda x: logits(params, config, jnp.asarray(x), gate=0.0, c=c_S)
  for _ in range(16):
    padded_BL = np.pad(want_BL, ((0, 0), (0, length - want_BL.shape[1])))
    next_B = apply(padded_BL)[:, want_BL.shape[1] - 1].argmax(axis=-1)
    want_BL = np.concatenate([want_BL, next_B[:, None]], axis=1)
  np.testing.assert_array_equal(text, want_BL)
