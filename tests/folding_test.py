"""Folding: the same logits at gate 0, from a model without its norms."""

import collections
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend import core as jax_core
from jax.interpreters import partial_eval

from taperjax import folding, model
from taperjax.config import ModelConfig
from taperjax.errors import UserError

B, L, N, D, V = 3, 7, 3, 8, 31
ALL_BIASES = ("q", "k", "v", "o", "gate", "up", "down", "head")


def make_config(**changes) -> ModelConfig:
  fields = {
    "num_layers": N,
    "embed_dim": D,
    "num_heads": 2,
    "num_kv_heads": 1,
    "head_dim": 4,
    "mlp_dim": 20,
    "mlp": "swiglu",
    "positions": "rope",
    "rope_theta": 10000.0,
    "rotary_dim": 4,
    "norm_eps": 1e-5,
    "biases": (),
    "tied": True,
    "init_std": 0.02,
    "scan_layers": False,
    "norm": "rms",
    "internal_norm": "taper",
    "final_norm": "taper",
    "vocab_size": V,
    "context_len": 16,
    "compute_dtype": "float32",
  }
  return ModelConfig(**{**fields, **changes})


def abstract_params(config: ModelConfig) -> dict:
  init = functools.partial(model.init_params, config)
  return jax.eval_shape(init, jax.random.key(0))


def random_params(config: ModelConfig, seed: int = 0) -> dict:
  """Every leaf random, so that no wrong axis or lost term can hide.

  Gains lie in [0.3, 3], one of them 0 at each site; biases and beta are not
  zero; the embedding has a mean, so centring matters. Matrices keep the stream
  at its size, which leaves logits of a standard deviation near 1.
  """
  rng = np.random.default_rng(seed)
  shapes = abstract_params(config)

  def draw(path, leaf):
    name = path[-1].key
    if name == "kernel":
      stacked = path[0].key == "blocks"
      size = leaf.size // (config.num_layers if stacked else 1)
      parent = path[-2].key
      outputs = D if parent in ("o", "down") else None
      inputs = size // outputs if outputs else D
      x = rng.normal(size=leaf.shape) / np.sqrt(inputs)
    elif name in ("scale", "taper_scale"):
      x = np.exp(rng.uniform(np.log(0.3), np.log(3.0), leaf.shape))
      x[..., 5] = 0.0
    elif name == "embedding":
      x = 0.7 + rng.normal(size=leaf.shape)
    else:
      x = rng.normal(size=leaf.shape) * 0.5
    return jnp.asarray(x, jnp.float32)

  return jax.tree_util.tree_map_with_path(draw, shapes)


def random_c(seed: int = 1) -> jax.Array:
  rng = np.random.default_rng(seed)
  return jnp.asarray(rng.uniform(0.3, 0.8, 2 * N + 1), jnp.float32)


def random_tokens(seed: int = 2) -> np.ndarray:
  rng = np.random.default_rng(seed)
  return rng.integers(0, V, (B, L + 1)).astype(np.int32)


@functools.partial(jax.jit, static_argnames="config")
def logits_at_0(params, c_S, tokens_BL, config):
  tokens_BL = jnp.asarray(tokens_BL)
  variables = {"params": params}
  return model.Transformer(config).apply(
    variables, tokens_BL, gate=0.0, c=c_S
  )[0]


def distance(config, params, folded, folded_config) -> float:
  """max |delta logit| / max(1, max |logit|)."""
  tokens_BL, c_S = random_tokens()[:, :-1], random_c()
  old = np.asarray(logits_at_0(params, c_S, tokens_BL, config), np.float64)
  new = np.asarray(logits_at_0(folded, c_S, tokens_BL, folded_config))
  assert old.std() > 0.3  # a dead model would make every fold look right
  return float(np.max(np.abs(new - old)) / max(1.0, np.max(np.abs(old))))


# Both sums run over the same D or F products in another order and association;
# a few roundings of 6e-8 through N blocks stay under 1e-5 of the largest logit.
TOLERANCE = 1e-5

CASES = {
  "rms": {},
  "rms_untied_all_biases": {"tied": False, "biases": ALL_BIASES},
  "rms_internal_scan_gelu": {
    "final_norm": "norm", "scan_layers": True, "mlp": "gelu",
    "num_heads": 6, "num_kv_heads": 2,
  },
  "rms_final": {"internal_norm": "norm"},
  "layer": {"norm": "layer"},
  "layer_gpt2": {
    "norm": "layer", "mlp": "gelu_tanh", "positions": "learned",
    "num_heads": 2, "num_kv_heads": 2,
    "biases": ("q", "k", "v", "o", "up", "down"),
  },
  "layer_scan_untied": {
    "norm": "layer", "scan_layers": True, "tied": False,
    "biases": ("k", "up", "head"), "num_heads": 6, "num_kv_heads": 2,
  },
  "layer_internal": {"norm": "layer", "final_norm": "norm"},
  "layer_final_untied": {
    "norm": "layer", "internal_norm": "norm", "tied": False,
  },
  # Inputs as wide as outputs: a gain on the wrong side keeps every shape.
  "square": {
    "num_heads": 2, "num_kv_heads": 2, "mlp_dim": 8, "norm": "layer",
    "vocab_size": V,
  },
}


@functools.cache
def folded_case(name):
  config = make_config(**CASES[name])
  params = random_params(config)
  return (config, params, *folding.fold(params, random_c(), config))


@pytest.mark.parametrize("name", CASES)
def test_folding_keeps_every_logit(name):
  """Export promises the same model without the scaling step at gate 0."""
  assert distance(*folded_case(name)) <= TOLERANCE


@pytest.mark.parametrize("name", CASES)
def test_folded_tree_is_what_its_config_makes_and_has_no_folded_norm(name):
  config, _, folded, folded_config = folded_case(name)
  made = abstract_params(folded_config)
  shape = lambda tree: jax.tree.map(lambda x: (x.shape, x.dtype), tree)
  assert shape(folded) == shape(made)
  paths = [
    jax.tree_util.keystr(path)
    for path, _ in jax.tree_util.tree_leaves_with_path(folded)
  ]
  assert not [p for p in paths if "taper_scale" in p]
  if config.internal_norm == "taper":
    assert not [p for p in paths if "attn_norm" in p or "mlp_norm" in p]
  assert ("final_norm" in folded) == (config.final_norm == "norm")
  assert "taper" not in (folded_config.internal_norm, folded_config.final_norm)


def test_folding_keeps_the_embedding_and_unties_the_head():
  config, params, folded, folded_config = folded_case("layer")
  np.testing.assert_array_equal(
    folded["embed"]["embedding"], params["embed"]["embedding"]
  )
  assert config.tied and not folded_config.tied
  assert "head" in folded_config.biases and folded["head"]["bias"].any()


def test_a_gain_of_zero_zeroes_its_row_in_every_reader():
  """A gated MLP's second input projection is easily forgotten."""
  _, params, folded, _ = folded_case("rms")
  checked = 0
  for n in range(N):
    for module, names in (("attn", "qkv"), ("mlp", ("gate", "up"))):
      for name in names:
        kernel = np.asarray(folded[f"block_{n}"][module][name]["kernel"])
        assert not kernel[5].any(), (n, name)
        assert np.all(np.any(kernel.reshape(D, -1)[:5], axis=-1))
        checked += 1
    for module, name in (("attn", "o"), ("mlp", "down")):
      np.testing.assert_array_equal(
        folded[f"block_{n}"][module][name]["kernel"],
        params[f"block_{n}"][module][name]["kernel"],
      )
  assert checked == 5 * N


def test_fold_equals_the_formula_in_float64():
  """W' = c (I - 1 1^T / D) D_gamma~ W and b' = b + beta W, written out."""
  _, params, folded, _ = folded_case("layer_gpt2")
  norm, up = (params["block_1"][k] for k in ("mlp_norm", "mlp"))
  w = np.asarray(up["up"]["kernel"], np.float64)
  gains = np.asarray(norm["taper_scale"], np.float64)
  c = float(random_c()[3])
  a = c * (np.eye(D) - np.ones((D, D)) / D) @ np.diag(gains)
  beta = np.asarray(norm["bias"], np.float64)
  bias = np.asarray(up["up"]["bias"], np.float64) + beta @ w
  found = folded["block_1"]["mlp"]["up"]
  # One rounding to float32: half a unit in the last place, 6e-8.
  np.testing.assert_allclose(found["kernel"], a @ w, rtol=6e-8, atol=1e-9)
  np.testing.assert_allclose(found["bias"], bias, rtol=6e-8, atol=1e-9)


WRONG_FOLDS = {
  "scale before centring": lambda w, beta, gain, c: (
    c * gain[:, None] * (w - w.mean(0, keepdims=True)), beta @ w
  ),
  "beta left out": lambda w, beta, gain, c: (
    center_rows(c * gain[:, None] * w), 0 * (beta @ w)
  ),
  "beta scaled by c": lambda w, beta, gain, c: (
    center_rows(c * gain[:, None] * w), c * (beta @ w)
  ),
  "no centring": lambda w, beta, gain, c: (c * gain[:, None] * w, beta @ w),
  "gain on the outputs": lambda w, beta, gain, c: (
    center_rows(c * w * gain[None, :]), beta @ w
  ),
}


def center_rows(w):
  return w - w.mean(axis=0, keepdims=True)


@pytest.mark.parametrize("name", WRONG_FOLDS)
def test_a_wrong_fold_is_seen(name):
  """The bound above is only worth what it rejects; `up` is square here."""
  config, params, folded, folded_config = folded_case("square")
  block = params["block_1"]
  w, norm = np.asarray(block["mlp"]["up"]["kernel"]), block["mlp_norm"]
  arrays = (np.asarray(norm["bias"]), np.asarray(norm["taper_scale"]))
  kernel, bias = WRONG_FOLDS[name](w, *arrays, float(random_c()[3]))
  folded = jax.tree.map(lambda x: x, folded)
  folded["block_1"]["mlp"]["up"] = {"kernel": kernel, "bias": bias}
  assert distance(config, params, folded, folded_config) > 100 * TOLERANCE


def test_stacked_layers_fold_like_single_ones():
  config, params, folded, folded_config = folded_case("layer_scan_untied")
  single = folding.fold(
    *(lambda p, c: (p, random_c(), c))(*model.unstack_layers(params, config))
  )
  unstacked = model.unstack_layers(folded, folded_config)
  assert unstacked[1] == single[1]
  jax.tree.map(np.testing.assert_array_equal, unstacked[0], single[0])


@pytest.mark.parametrize("kind", ["jax", "numpy"])
def test_the_original_is_untouched_and_shares_no_buffer(kind):
  """A shared buffer would die with the donated tree."""
  config = make_config(norm="layer", scan_layers=True)
  params = random_params(config)
  before = jax.tree.map(np.array, params)
  given = before if kind == "numpy" else params
  kept = jax.tree.map(np.array, params)
  folded, _ = folding.fold(given, random_c(), config)
  jax.tree.map(np.testing.assert_array_equal, given, kept)
  if kind == "numpy":
    assert all(isinstance(x, np.ndarray) for x in jax.tree.leaves(folded))
    for x in jax.tree.leaves(folded):
      x[...] = 0
  else:
    for x in jax.tree.leaves(folded):
      x.delete()
  jax.tree.map(np.testing.assert_array_equal, given, kept)


def test_folding_rounds_once_from_the_dtype_of_the_leaf():
  """bfloat16 leaves: products in float64, one cast, the dtype kept."""
  config = make_config()
  params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), random_params(config))
  folded, _ = folding.fold(params, random_c(), config)
  assert {x.dtype for x in jax.tree.leaves(folded)} == {jnp.dtype("bfloat16")}
  norm, attn = (params["block_0"][k] for k in ("attn_norm", "attn"))
  exact = (
    float(random_c()[0])
    * np.asarray(norm["taper_scale"], np.float64)[:, None, None]
    * np.asarray(attn["q"]["kernel"], np.float64)
  )
  np.testing.assert_array_equal(
    folded["block_0"]["attn"]["q"]["kernel"], exact.astype(jnp.bfloat16)
  )


REDUCTIONS = {
  "reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "argmax", "argmin",
  "cumsum", "reduce_precision", "rsqrt", "sqrt",
}


def stream_reductions(config: ModelConfig, params, gate=0.0) -> int:
  """Reductions over a stream (B, L, D) on the way to the logits.

  Dead equations are cut first, then every sub-jaxpr is walked.
  """

  def logits(params, tokens_BL, c_S):
    variables = {"params": params}
    return model.Transformer(config).apply(
      variables, tokens_BL, gate=gate, c=c_S
    )[0]

  tokens_BL = random_tokens()[:, :-1]
  jaxpr = jax.make_jaxpr(logits)(params, tokens_BL, random_c()).jaxpr
  jaxpr, _ = partial_eval.dce_jaxpr(jaxpr, [True], instantiate=True)
  seen = collections.Counter()

  def walk(jaxpr):
    for eqn in jaxpr.eqns:
      seen["equations"] += 1
      shapes = [v.aval.shape for v in eqn.invars]
      if eqn.primitive.name in REDUCTIONS and (B, L, D) in shapes:
        seen["reductions"] += 1
      for value in jax.tree.leaves(
        list(eqn.params.values()), is_leaf=is_jaxpr
      ):
        if isinstance(value, jax_core.ClosedJaxpr):
          walk(value.jaxpr)
        elif isinstance(value, jax_core.Jaxpr):
          walk(value)

  def is_jaxpr(x):
    return isinstance(x, jax_core.ClosedJaxpr | jax_core.Jaxpr)

  walk(jaxpr)
  assert seen["equations"] > 50  # else the walk saw nothing
  return seen["reductions"]


@pytest.mark.parametrize("name", ["rms", "layer", "layer_scan_untied"])
def test_the_folded_graph_has_no_reduction_of_a_folded_norm(name):
  """Not even the mean that centring takes; the unfolded LayerNorm has it."""
  config, params, folded, folded_config = folded_case(name)
  assert stream_reductions(folded_config, folded) == 0
  blocks = 1 if config.scan_layers else N
  means = 2 * blocks + 1 if config.norm == "layer" else 0
  assert stream_reductions(config, params) == means
  half = stream_reductions(config, params, gate=jnp.float32(0.5))
  assert half >= 2 * blocks + 1


def test_a_final_norm_that_stays_is_the_one_reduction_left():
  _, _, folded, folded_config = folded_case("rms_internal_scan_gelu")
  assert folded_config.final_norm == "norm"
  assert stream_reductions(folded_config, folded) == 1


def test_folded_tensors_names_every_changed_leaf_and_no_other():
  for name, (changed_sites, scanned) in {
    "layer_gpt2": (2 * N + 1, False),
    "layer_scan_untied": (2 * N + 1, True),
    "rms_internal_scan_gelu": (2 * N, True),
    "rms_final": (1, False),
  }.items():
    config, params, folded, _ = folded_case(name)
    entries = folding.folded_tensors(config)
    assert len({e["name"] for e in entries}) == len(entries)
    assert len({e["norm"] for e in entries}) == changed_sites
    key = lambda path: "/".join(part.key for part in path)
    leaves = jax.tree_util.tree_leaves_with_path
    old = {key(p): x for p, x in leaves(params)}
    changed = {
      key(p) for p, x in leaves(folded)
      if key(p) not in old or not np.array_equal(x, old[key(p)])
    }
    assert {e["name"].split("[")[0] for e in entries} == changed, name
    assert any("[2]" in e["name"] for e in entries) == scanned
  entry = folding.folded_tensors(make_config())[0]
  assert entry == {
    "name": "block_0/attn/q/kernel",
    "formula": "W' = c diag(taper_scale) W",
    "norm": "block_0.attn_norm",
  }
  assert folding.folded_tensors(make_config(norm="layer"))[-1] == {
    "name": "head/bias",
    "formula": "b' = bias embedding^T",
    "norm": "final_norm",
  }


def reference_report(old, new, targets, mask):
  """The measures of `compare` in float64, written out."""
  old, new = old.astype(np.float64), new.astype(np.float64)
  soft = lambda z: z - np.log(np.sum(np.exp(z), -1, keepdims=True))
  p, q = soft(old), soft(new)
  mean = lambda x: float(np.sum(mask * x) / np.sum(mask))
  pick = lambda x: np.take_along_axis(x, targets[..., None], -1)[..., 0]
  scored = mask > 0
  return {
    "max_abs_delta_logit": np.abs(new - old)[scored].max(),
    "mean_abs_delta_logit": mean(np.abs(new - old).mean(-1)),
    "logit_scale": np.abs(old)[scored].max(),
    "kl": mean((np.exp(p) * (p - q)).sum(-1)),
    "top1": mean(old.argmax(-1) == new.argmax(-1)),
    "loss_delta": mean(pick(p) - pick(q)),
  }


def test_compare_measures_what_it_says_on_a_damaged_fold():
  """Against float64 numpy; the worst token of all is masked."""
  config, params, folded, folded_config = folded_case("layer_gpt2")
  folded = jax.tree.map(lambda x: x, folded)
  noise = np.random.default_rng(5).normal(size=(D, V)).astype(np.float32)
  folded["head"]["kernel"] = folded["head"]["kernel"] + 0.02 * noise
  tokens, mask = random_tokens(), np.ones((B, L), np.float32)
  old, new = (
    np.asarray(logits_at_0(p, random_c(), tokens[:, :-1], c))
    for p, c in ((params, config), (folded, folded_config))
  )
  for worst_BL in (np.abs(new - old).max(-1), np.abs(old).max(-1)):
    mask[np.unravel_index(worst_BL.argmax(), mask.shape)] = 0
  mask[1, 5:] = 0
  report = folding.compare(
    params, random_c(), config, folded, folded_config, tokens, mask
  )
  expected = reference_report(old, new, tokens[:, 1:], mask)
  assert expected["kl"] > 1e-4 and expected["loss_delta"] != 0
  for name, value in expected.items():
    # Float32 sums of some hundred terms.
    np.testing.assert_allclose(
      report[f"{name}_f32"], value, rtol=2e-5, atol=2e-6, err_msg=name
    )
    assert isinstance(report[f"{name}_bf16"], float)
  assert set(report) == {
    f"{name}_{suffix}" for name in expected for suffix in ("f32", "bf16")
  }


def test_compare_of_a_true_fold_is_at_rounding():
  report = folding.compare(
    *folded_report_arguments(), random_tokens(), np.ones((B, L))
  )
  scale = max(1.0, report["logit_scale_f32"])
  assert 0 < report["max_abs_delta_logit_f32"] <= TOLERANCE * scale
  assert 0 <= report["kl_f32"] < 1e-10
  assert report["top1_f32"] == 1.0
  # bfloat16 rounds at 4e-3 of every value; this only says it ran there.
  assert 1e-4 < report["max_abs_delta_logit_bf16"] < 0.3 * scale
  assert report["logit_scale_bf16"] != report["logit_scale_f32"]


def folded_report_arguments():
  config, params, folded, folded_config = folded_case("layer_gpt2")
  return params, random_c(), config, folded, folded_config


ERRORS = {
  "nothing is tapered, so nothing can be folded; train a tapered variant": (
    {"internal_norm": "norm", "final_norm": "norm"}, 1.0
  ),
  "internal_norm=none and final_norm=norm: this model is folded already": (
    {"internal_norm": "none", "final_norm": "norm"}, 1.0
  ),
  r"c=0 at block_1.mlp_norm .* calibrate \(train past taper start\)": (
    {}, 0.0
  ),
  "c=nan at block_1.mlp_norm": ({}, np.nan),
  "c=inf at block_1.mlp_norm": ({}, np.inf),
}


@pytest.mark.parametrize("message", ERRORS)
def test_what_cannot_be_folded_says_why(message):
  changes, value = ERRORS[message]
  c_S = np.asarray(random_c()).copy()
  c_S[3] = value
  with pytest.raises(UserError, match=message) as caught:
    folding.fold({}, c_S, make_config(**changes))
  assert "\n" not in str(caught.value)


def test_c_of_a_norm_that_stays_is_not_asked_for():
  config, params, *_ = folded_case("rms_final")
  c_S = np.zeros(2 * N + 1)
  c_S[-1] = 0.5
  folding.fold(params, c_S, config)


def test_folding_twice_says_so():
  _, _, folded, folded_config = folded_case("rms")
  with pytest.raises(UserError, match="folded already; use it as it is"):
    folding.fold(folded, random_c(), folded_config)


def test_a_run_folds_at_gate_zero_only():
  config = make_config()
  folding.check_foldable(0.0, 400, config)
  with pytest.raises(
    UserError,
    match=r"gate=0.35 at step 400, .* finish the run \(it is 0 from step 900\)",
  ):
    folding.check_foldable(np.float32(0.35), 400, config, taper_end=900)
  with pytest.raises(UserError, match="finish the run, then fold"):
    folding.check_foldable(1.0, 3, config)
  with pytest.raises(UserError, match="nothing is tapered"):
    folding.check_foldable(
      1.0, 3, config.replace(internal_norm="norm", final_norm="norm")
    )
