"""`taper.sites`: some norms taper, the others stay, from config to export."""

from __future__ import annotations

import json

import jax
import numpy as np
import pytest

import taperjax
from taperjax import api, config as config_lib, decode, gate, saved, state, step
from taperjax.errors import UserError
from taperjax.interop import exporting
from tests import tiny

CHOSEN = ("mlp_norm", "block_0.attn_norm")
MODES = ("taper", "taper", "norm", "taper", "norm")
KINDS = {"rms": tiny.model_config, "layer": tiny.gpt2_config}


def mixed(kind: str, **changes) -> saved.Model:
  config = KINDS[kind](**changes).with_modes(MODES)
  params = tiny.params(config)
  return saved.Model(params, config, tiny.c(config), 0.0)


@pytest.mark.parametrize("sites, variant, modes", [
  (CHOSEN, "internal", MODES),
  (CHOSEN, "all_aux", MODES),
  (("final_norm",), "all", ("norm",) * 4 + ("taper",)),
  (("attn_norm", "mlp_norm"), "all", ("taper",) * 4 + ("norm",)),
  (None, "all", ("taper",) * 5),
])
def test_sites_choose_among_those_of_the_variant(sites, variant, modes):
  """A group of one mode is named by it, as ever; it survives JSON."""
  config = tiny.config(taper__sites=sites, variant=variant)
  assert config.model.modes == modes
  names = {*config.model.modes[:-1]}
  assert config.model.internal_norm == (
    names.pop() if len(names) == 1 else "mixed"
  )
  text = json.dumps(config_lib.to_dict(config))
  assert config_lib.config_from_dict(json.loads(text)) == config


@pytest.mark.parametrize("changes, words", [
  ({"taper__sites": ()}, "nothing to taper"),
  ({"taper__sites": ("block_2.mlp_norm",)}, "no site"),
  ({"taper__sites": ("attn",)}, "no site"),
  ({"taper__sites": ("attn_norm", "final_norm"), "variant": "internal"},
   "does not taper with variant=internal"),
  ({"taper__sites": ("attn_norm",), "variant": "baseline"}, "does not taper"),
  ({"taper__sites": ("attn_norm",), "variant": "fakeln"}, "no effect"),
  ({"taper__sites": ("block_0.attn_norm",), "model__scan_layers": True},
   "model.scan_layers"),
  ({"taper__sites": "attn_norm"}, "not a list"),
])
def test_sites_that_cannot_be_are_refused(changes, words):
  with pytest.raises(UserError, match="taper.sites") as error:
    tiny.config(**changes)
  assert words in str(error.value) and "\n" not in str(error.value)


def test_a_norm_that_stays_has_no_factor_and_no_second_gain():
  config = tiny.config(
    taper__sites=("mlp_norm",), variant="all_aux", model__num_layers=1
  )
  modes = ("norm", "taper", "norm")
  now = jax.jit(state.create, static_argnums=(0, 1))(config, 0)
  batch = np.asarray(tiny.tokens(length=tiny.L + 1)), tiny.mask()
  now, _ = step.make_train_step(config, gate.NORM)(now, *batch)
  now = step.make_calibrate(config)(now)
  now, _ = step.make_train_step(config, gate.TAPER)(now, *batch)
  now, metrics = step.make_train_step(config, gate.SCALE)(now, *batch)
  assert np.isfinite(metrics["loss"])
  np.testing.assert_array_equal(
    np.asarray(now.taper.c) > 0, [mode == "taper" for mode in modes]
  )
  for name, mode in zip(config_lib.site_names(1), modes, strict=True):
    block, _, norm = name.rpartition(".")
    gains = (now.params[block] if block else now.params)[norm]
    assert ("taper_scale" in gains) == (mode == "taper"), name


@pytest.mark.parametrize("kind", KINDS)
def test_only_tapered_sites_fold(kind):
  """1e-5 of logits near 1: two float32 orders of the same products."""
  model = mixed(kind)
  folded = taperjax.fold(model)
  assert folded.config.modes == ("none", "none", "norm", "none", "norm")
  assert folded.config.tied
  tokens = np.asarray(tiny.tokens())
  np.testing.assert_allclose(
    taperjax.apply(model, tokens), taperjax.apply(folded, tokens), atol=1e-5
  )
  assert "attn_norm" not in folded.params["block_0"]
  kept = folded.params["block_1"]["attn_norm"]["scale"]
  np.testing.assert_array_equal(
    kept, model.params["block_1"]["attn_norm"]["scale"]
  )
  greedy = decode.Sampling(temperature=0.0)
  texts = [  # decoded with a cache, token by token
    api.generate_ids(m, [[1, 2, 3]], max_new=6, sampling=greedy)
    for m in (model, folded)
  ]
  np.testing.assert_array_equal(*texts)


def test_kept_norms_without_biases_get_zeros_where_others_gain_one():
  """`biases` holds for all blocks, so that trees of all blocks are alike."""
  model = mixed("layer", biases=())
  folded = taperjax.fold(model)
  zeros = folded.params["block_1"]["attn"]["q"]["bias"]
  assert zeros.shape == (tiny.H, tiny.K) and not np.any(zeros)
  assert np.any(folded.params["block_0"]["attn"]["q"]["bias"])
  tokens = np.asarray(tiny.tokens())
  np.testing.assert_allclose(
    taperjax.apply(model, tokens), taperjax.apply(folded, tokens), atol=1e-5
  )


def test_the_norm_that_stays_still_divides():
  """A stream twice as large is the same behind a norm, not behind a map."""
  model = mixed("rms", positions="learned")
  sites = tuple(m if m == "norm" else "taper" for m in MODES)
  assert model.config.modes == sites
  other = model.config.with_modes(("taper",) * 4 + ("norm",))
  tokens = np.asarray(tiny.tokens())
  params = model.params
  gains = params["block_1"]["attn_norm"]
  tapered = {**params, "block_1": {**params["block_1"], "attn_norm": {
    **gains, "taper_scale": gains["scale"]
  }}}
  c = np.array(model.c)
  c[2] = 1.0
  fixed = saved.Model(tapered, other, c, 0.0)
  assert np.max(np.abs(
    taperjax.apply(model, tokens) - taperjax.apply(fixed, tokens)
  )) > 1e-2


@pytest.mark.parametrize("norm", ["rms", "layer"])
def test_scanned_layers_may_taper_one_kind_of_norm(norm):
  from taperjax import folding, model as model_lib

  config = KINDS[norm]().with_modes(("taper", "norm") * 2 + ("norm",))
  params, c = tiny.params(config), tiny.c(config)
  stacked = model_lib.stack_layers(params, config)
  scanned = config.replace(scan_layers=True)
  tokens = tiny.tokens()
  logits = []
  for tree, shape in (
    (params, config),
    (stacked, scanned),
    folding.fold(params, c, config),
    folding.fold(stacked, c, scanned),
  ):
    out = model_lib.Transformer(shape).apply(
      {"params": tree}, tokens, gate=0.0, c=c
    )
    logits.append(out[0])
  for other in logits[1:]:
    np.testing.assert_allclose(logits[0], other, atol=1e-5)


def test_a_probe_sees_the_norms_that_stand():
  model = mixed("rms")
  stream = np.asarray(tiny.tokens(1, 4 * tiny.M + 1))[0]
  found = taperjax.probe(model, stream)
  assert {site["site"] for site in found["sites"]} == {
    "block_1.attn_norm", "final_norm"
  }


@pytest.mark.parametrize("to", ["hf", "transformer-lens", "gguf"])
def test_formats_without_a_place_for_them_refuse(to):
  with pytest.raises(UserError, match="internal_norm=mixed.*safetensors"):
    exporting.form_of(mixed("rms"), to, "float32", False)
  with pytest.raises(UserError, match="internal_norm=mixed"):
    exporting.form_of(taperjax.fold(mixed("rms")), to, "float32", False)


def test_the_bare_tree_says_which_norms_are_left(tmp_path):
  from taperjax.interop import bare

  form = exporting.form_of(mixed("layer"), "safetensors", "float32", False)
  assert form.name == "folded"
  bare.write(tmp_path, form.params, form.config, dtype="float32")
  page = json.loads((tmp_path / bare.PAGE).read_text())
  assert any("in block_1.attn_norm; elsewhere" in x for x in page["forward"])
  params, config = bare.read(tmp_path)
  assert config == form.config
  np.testing.assert_array_equal(
    params["block_1"]["attn_norm"]["bias"],
    form.params["block_1"]["attn_norm"]["bias"],
  )
