"""The Llama layout of Hugging Face against transformers, and its refusals."""

from __future__ import annotations

import json
import re

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from taperjax import api
from taperjax.config import RopeScaling
from taperjax.errors import UserError
from taperjax.interop import hf_files, llama
from tests import tiny

V, L = 61, 120  # three rows: 360 positions
SHAPE = {
  "vocab_size": V,
  "hidden_size": 32,
  "intermediate_size": 52,
  "num_hidden_layers": 2,
  "num_attention_heads": 4,
  "num_key_value_heads": 2,
  "max_position_embeddings": 128,
  "rms_norm_eps": 1e-5,
}
LLAMA3 = {
  "rope_type": "llama3",
  "rope_theta": 5e5,
  "factor": 8.0,
  "low_freq_factor": 1.0,
  "high_freq_factor": 4.0,
  "original_max_position_embeddings": 32,
}
LINEAR = {"rope_type": "linear", "rope_theta": 1e3, "factor": 4.0}
CASES = {
  "llama": ("Llama", {"head_dim": 10, "attention_bias": True}),
  "mlp_bias": ("Llama", {"mlp_bias": True, "rms_norm_eps": 1e-3}),
  "llama3": ("Llama", {"rope_parameters": LLAMA3, "tie_word_embeddings": True}),
  "linear": ("Llama", {"rope_parameters": LINEAR}),
  "mistral": ("Mistral", {"head_dim": 6, "sliding_window": None}),
  "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
}
IDS = np.random.default_rng(0).integers(0, V, (3, L))


@pytest.fixture(scope="module")
def transformers():
  return pytest.importorskip("transformers")


def build(transformers, name):
  """A random model: gains in [0.3, 3], biases of 0.3, logits of about 1."""
  import torch

  kind, changes = CASES[name]
  config = getattr(transformers, f"{kind}Config")(**{**SHAPE, **changes})
  torch.manual_seed(0)
  model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
  with torch.no_grad():
    for key, p in model.named_parameters():
      if "norm" in key:
        p.copy_(torch.exp(torch.empty_like(p).uniform_(-1.2, 1.1)))
      else:
        p.normal_(0, 0.3 if "bias" in key else 0.2)
  return model


def theirs(model):
  import torch

  with torch.no_grad():
    return model(torch.tensor(IDS)).logits.float().numpy()


def assert_close(got, want):
  """1e-4 at logit standard deviation 1."""
  scale = want.std()
  assert 0.3 < scale < 6
  np.testing.assert_allclose(got / scale, want / scale, rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", CASES)
def test_logits_are_those_of_transformers_both_ways(
  transformers, tmp_path, name
):
  """The scaled cases run past the original context of 32."""
  model = build(transformers, name)
  want = theirs(model)
  # Small shards for one of them: the index is read as well.
  size = "20KB" if name == "linear" else "1GB"
  model.save_pretrained(tmp_path / "in", max_shard_size=size)
  assert (tmp_path / "in" / hf_files.INDEX).exists() == (name == "linear")
  ours = llama.read(tmp_path / "in")
  assert_close(np.asarray(api.apply(ours, IDS)), want)
  assert ours.meta["source"]["dtype"] == "float32"

  tensors, hf_config = llama.to_hf(ours.params, ours.config)
  hf_files.write_folder(tmp_path / "out", tensors, hf_config, "float32")
  back, loading = transformers.AutoModelForCausalLM.from_pretrained(
    tmp_path / "out", output_loading_info=True
  )
  assert not any(loading.values()), loading
  qwen = name == "qwen2"
  assert type(back).__name__ == f"{'Qwen2' if qwen else 'Llama'}ForCausalLM"
  np.testing.assert_array_equal(theirs(back), want)
  again = llama.read(tmp_path / "out")
  assert again.config == ours.config
  stored = model.state_dict()
  stored.pop(hf_files.HEAD) if ours.config.tied else None
  assert tensors.keys() == stored.keys()
  for key, value in tensors.items():
    np.testing.assert_array_equal(value, stored[key].numpy(), err_msg=key)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_files_of_16_bits_are_read_exactly(transformers, tmp_path, dtype):
  import torch

  model = build(transformers, "llama").to(getattr(torch, dtype))
  model.save_pretrained(tmp_path)
  ours = llama.read(tmp_path)
  assert ours.meta["source"]["dtype"] == dtype
  model = transformers.AutoModelForCausalLM.from_pretrained(
    tmp_path, dtype=torch.float32
  )
  assert_close(np.asarray(api.apply(ours, IDS)), theirs(model))


@pytest.mark.parametrize("name", ["llama3", "linear"])
def test_config_of_transformers_4_means_the_same(transformers, tmp_path, name):
  """rope_theta and rope_scaling beside each other; the type was `type`."""
  build(transformers, name).save_pretrained(tmp_path)
  path = tmp_path / "config.json"
  fields = json.loads(path.read_text())
  want = llama.config_from_hf(fields)
  scaling = fields.pop("rope_parameters")
  fields["rope_theta"] = scaling.pop("rope_theta")
  for key in ("rope_type", "type"):
    scaling[key] = scaling.pop("rope_type", None) or scaling.pop("type")
    assert llama.config_from_hf({**fields, "rope_scaling": scaling}) == want
  assert want.rope_scaling.kind == name


# From here on without transformers: folders made by our own writer.


def our_config(**changes):
  fields = {
    "internal_norm": "norm",
    "final_norm": "norm",
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 6,
    "rotary_dim": 6,
  }
  return tiny.model_config(**{**fields, **changes})


def our_folder(folder, dtype="float32", **changes):
  """Writes a folder of ours: (parameters, configuration)."""
  config = our_config(**changes)
  params = tiny.params(config)
  hf_files.write_folder(folder, *llama.to_hf(params, config), dtype)
  return params, config


def change_config(folder, **changes):
  path = folder / "config.json"
  fields = json.loads(path.read_text()) | changes
  fields = {k: v for k, v in fields.items() if v != "remove"}
  path.write_text(json.dumps(fields))


def change_tensors(folder, change):
  tensors = safetensors.numpy.load_file(folder / hf_files.WEIGHTS)
  change(tensors)
  safetensors.numpy.save_file(tensors, folder / hf_files.WEIGHTS)


@pytest.mark.parametrize(
  "changes",
  [
    {},
    {"tied": False, "norm_eps": float(2**40)},
    {"biases": ("q", "k", "v"), "norm_eps": 1e-7},
    {"biases": ("q", "k", "v", "o", "gate", "up", "down"), "rope_theta": 5e5},
    {"rope_scaling": RopeScaling("llama3", 8.0, 1.0, 4.0, 8)},
    {"rope_scaling": RopeScaling("linear", 2.5)},
  ],
)
def test_round_trip_keeps_every_bit(tmp_path, changes):
  """eps 2^40 is what an export of a model without norms relies on."""
  params, config = our_folder(tmp_path, **changes)
  model = llama.read(tmp_path)
  assert model.config == config
  assert model.gate == 1.0 and not np.any(model.c)
  assert model.c.shape == (tiny.S,)
  tiny_leaves = dict(leaves(params))
  read_leaves = dict(leaves(model.params))
  assert tiny_leaves.keys() == read_leaves.keys()
  for path, leaf in tiny_leaves.items():
    assert read_leaves[path].dtype == np.float32
    np.testing.assert_array_equal(read_leaves[path], leaf, err_msg=path)


def leaves(tree, prefix=""):
  for name, value in tree.items():
    if isinstance(value, dict):
      yield from leaves(value, f"{prefix}{name}/")
    else:
      yield prefix + name, value


def test_stacked_layers_are_written_one_by_one(tmp_path):
  """A checkpoint of a training run has one tree for all layers."""
  config = our_config(scan_layers=True)
  params = tiny.params(config)
  assert params["blocks"]
  tensors, _ = llama.to_hf(params, config)
  up_NDF = params["blocks"]["mlp"]["up"]["kernel"]
  np.testing.assert_array_equal(
    tensors["model.layers.1.mlp.up_proj.weight"].T, up_NDF[1]
  )


def test_gain_offset_is_added_to_every_gain(tmp_path):
  """Five sites, the final one too."""
  params, _ = our_folder(tmp_path)
  plain, shifted = llama.read(tmp_path), llama.read(tmp_path, gain_offset=1.0)
  seen = 0
  for (path, a), (_, b) in zip(
    leaves(plain.params), leaves(shifted.params), strict=True
  ):
    is_gain = path.endswith("scale")
    seen += is_gain
    np.testing.assert_array_equal(a + np.float32(is_gain), b)
  assert seen == tiny.S
  assert shifted.meta["source"]["gain_offset"] == 1.0
  for odd in (float("nan"), 1e300):
    match = f"gain_offset={re.escape(str(odd))} is not finite"
    with pytest.raises(UserError, match=match):
      llama.read(tmp_path, gain_offset=odd)


def test_context_is_shortened_and_never_lengthened(tmp_path):
  our_folder(tmp_path)
  assert llama.read(tmp_path, context_len=5).config.context_len == 5
  with pytest.raises(UserError, match="context_len=14 must be from 1 to 13"):
    llama.read(tmp_path, context_len=14)


def test_sliding_window_is_refused_where_it_bites(tmp_path):
  """Not where the context fits, it is off, or no layer slides."""
  our_folder(tmp_path)
  change_config(tmp_path, model_type="mistral", sliding_window=12)
  with pytest.raises(UserError, match="sliding_window=12.*--context-len 12"):
    llama.read(tmp_path)
  assert llama.read(tmp_path, context_len=12).config.context_len == 12
  change_config(tmp_path, sliding_window=13)
  llama.read(tmp_path)
  fields = json.loads((tmp_path / "config.json").read_text())
  del fields["sliding_window"]  # Mistral's own is 4,096
  fields["max_position_embeddings"] = 4_097
  with pytest.raises(UserError, match="sliding_window=4096"):
    llama.config_from_hf(fields)
  fields |= {"model_type": "qwen2", "sliding_window": 9}
  llama.config_from_hf(fields)
  fields["use_sliding_window"] = True
  with pytest.raises(UserError, match="sliding_window=9"):
    llama.config_from_hf(fields)
  llama.config_from_hf({**fields, "max_window_layers": 2})
  with pytest.raises(UserError, match="sliding_window=9"):
    llama.config_from_hf({**fields, "max_window_layers": 1})
  llama.config_from_hf({**fields, "layer_types": ["full_attention"] * 2})


def test_fields_that_are_left_out_have_the_values_of_the_layout(tmp_path):
  """Llama 2 names neither theta nor head_dim, older files no key heads."""
  _, config = our_folder(tmp_path, num_heads=2, head_dim=4, rotary_dim=4)
  fields = json.loads((tmp_path / "config.json").read_text())
  for name in (
    "rope_theta", "rope_parameters", "rope_scaling", "head_dim",
    "num_key_value_heads", "hidden_act", "attention_bias", "mlp_bias",
  ):
    del fields[name]
  got = llama.config_from_hf(fields)
  assert got == config.replace(rope_theta=1e4)


def test_fields_of_published_models_do_nothing(tmp_path):
  """As SmolLM2, TinyLlama and fine-tuning tools write them."""
  _, config = our_folder(tmp_path)
  fields = json.loads((tmp_path / "config.json").read_text())
  fields |= {
    "is_llama_config": True, "rope_interleaved": False, "use_mrope": False,
    "transformers.js_config": {"dtype": "q4"}, "pretraining_tp": 1,
    "unsloth_fixed": True, "_name_or_path": "x", "layer_types": None,
    "auto_map": {}, "eos_token_id": [1, 2], "attention_dropout": 0.1,
    "logits_scaling": None,
  }
  assert llama.config_from_hf(fields) == config


REFUSED_CONFIGS = {
  "gemma": ({"model_type": "gemma2"}, r"multiplies the embedding.*GELU.*llama"),
  "qwen3": ({"model_type": "qwen3"}, "'qwen3' is not understood; .*qwen2"),
  "no type": ({"model_type": "remove"}, "model_type=None is not understood"),
  "no eps": ({"rms_norm_eps": "remove"}, "rms_norm_eps=None .* above 0"),
  "eps 0": ({"rms_norm_eps": 0.0}, "rms_norm_eps=0.0 .* above 0"),
  "eps text": ({"rms_norm_eps": "1e-5"}, "rms_norm_eps='1e-5'"),
  "unknown": (
    {"logits_scaling": 8.0},
    "logits_scaling=8.0 is not understood; if it has no effect",
  ),
  "softcap": ({"final_logit_softcapping": 30.0}, "final_logit_softcapping=30"),
  "pairs": ({"rope_interleaved": True}, "=True is not supported; only False"),
  "layer types": (
    {"layer_types": ["full_attention", "chunked_attention"]},
    "layer_types=.*chunked_attention.* is not understood with model_type='ll",
  ),
  "types 5": ({"layer_types": 5}, "layer_types=5 is not understood"),
  "types": ({"layer_types": "many"}, "layer_types='many' is not understood"),
  "act": ({"hidden_act": "gelu"}, "hidden_act='gelu'.*SwiGLU"),
  "layers": ({"num_hidden_layers": 2.5}, "num_hidden_layers=2.5 .*whole"),
  "flag": ({"tie_word_embeddings": 1}, "tie_word_embeddings=1 .*true or false"),
  "huge": ({"vocab_size": 2**31}, "vocab_size=2147483648 .*below 2"),
  "kv": ({"num_key_value_heads": 3}, "=3 does not divide num_attention_h.*=4"),
  "odd": ({"head_dim": 5}, "head_dim=5 is odd"),
  "width": (
    {"head_dim": None, "num_attention_heads": 3, "num_key_value_heads": 3},
    "hidden_size=8 is not divisible by num_attention_heads=3",
  ),
  "mistral": (
    {"model_type": "mistral", "num_key_value_heads": None},
    "num_key_value_heads=None",
  ),
  "quantized": ({"quantization_config": {"bits": 4}}, "weights are quantized"),
  "yarn": (
    {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}},
    "'yarn' is not understood; .*default, linear, llama3",
  ),
  "yarn 5": (
    {"rope_parameters": {"rope_type": "yarn", "factor": 2.0}},
    "rope_parameters: rope type 'yarn'",
  ),
  "type": ({"rope_scaling": {"type": []}}, r"rope type '\[\]' is not underst"),
  "two types": (
    {"rope_scaling": {"rope_type": "linear", "type": "yarn", "factor": 2.0}},
    "rope_scaling has two types",
  ),
  "factor": ({"rope_scaling": {"type": "linear"}}, "factor=None"),
  "rope key": (
    {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "mscale": 1.0}},
    "mscale=1.0 is not understood with rope type 'linear'",
  ),
  "rope text": ({"rope_scaling": "linear"}, "'linear' .*must be an object"),
  "no original": (
    {
      "rope_scaling": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
      }
    },
    "original_max_position_embeddings=None",
  ),
  "low high": (
    {"rope_scaling": {**LLAMA3, "low_freq_factor": 4.0, "rope_theta": 100.0}},
    "low_freq_factor=4.0 must be below high_freq_factor=4.0",
  ),
  "differ": (
    {"rope_scaling": {"type": "linear", "factor": 2.0}},
    "rope_scaling and rope_parameters in config.json differ",
  ),
  "theta": ({"rope_theta": 50.0}, "rope_theta is told twice, as 50.0 and 100"),
  "original twice": (
    {
      "rope_parameters": {**LLAMA3, "rope_theta": 100.0},
      "original_max_position_embeddings": 64,
    },
    "original_max_position_embeddings=64 differs .* 32",
  ),
  "partial": ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
  "shape": ({"intermediate_size": 21}, r"\(20, 8\), against \(21, 8\)"),
  "more layers": ({"num_hidden_layers": 3}, r"'model.layers.2.* is missing"),
  "fewer layers": (
    {"num_hidden_layers": 1}, r"'model.layers.1.*num_hidden_layers=1"
  ),
  "bias": ({"attention_bias": True}, r"q_proj.bias' is missing"),
  "qwen bias": ({"model_type": "qwen2"}, r"q_proj.bias' is missing"),
  "no head": (
    {"tie_word_embeddings": False}, "tie_word.*=False, but .*lm_head.* missing"
  ),
}


@pytest.mark.parametrize("name", REFUSED_CONFIGS)
def test_config_that_we_cannot_hold_is_refused_in_one_line(tmp_path, name):
  changes, message = REFUSED_CONFIGS[name]
  our_folder(tmp_path)
  llama.read(tmp_path)  # it is the change that is refused
  change_config(tmp_path, **changes)
  with pytest.raises(UserError, match=message) as caught:
    llama.read(tmp_path)
  assert "\n" not in str(caught.value)


LAYER = "model.layers.1."
ONES = np.ones(6, np.float32)
REFUSED_TENSORS = {
  "q norm": (LAYER + "self_attn.q_norm.weight", ONES, "qk-norm"),
  "k norm": (LAYER + "self_attn.k_norm.weight", ONES, "qk-norm"),
  "sandwich": (LAYER + "pre_feedforward_layernorm.weight", ONES, "sandwich"),
  "post": (LAYER + "post_feedforward_layernorm.weight", ONES, "after the MLP"),
  "adapter": (LAYER + "self_attn.q_proj.lora_A.weight", ONES, "not merged"),
  "unknown": ("model.extra.weight", ONES, "a Llama layout has no such tensor"),
  "bias": (LAYER + "mlp.up_proj.bias", ONES, r"only \[\] have a bias"),
  "other head": (
    "lm_head.weight", np.ones((31, 8), np.float32), "=True, but .*differs from"
  ),
  "shape": ("model.norm.weight", ONES, r"shape \(6,\), against \(8,\)"),
  "dtype": (
    "model.norm.weight", np.ones(8, np.int8), "'model.norm.weight' .*dtype I8"
  ),
  "double": (
    "model.norm.weight", np.ones(8), "'model.norm.weight' .*dtype F64"
  ),
  "infinite": (
    "model.norm.weight", np.full(8, np.inf, np.float32), "not finite"
  ),
  "nan": (
    "model.norm.weight", np.full(8, np.nan, ml_dtypes.bfloat16), "not finite"
  ),
}


@pytest.mark.parametrize("name", REFUSED_TENSORS)
def test_tensor_that_we_cannot_hold_is_refused_by_name(tmp_path, name):
  tensor, value, message = REFUSED_TENSORS[name]
  our_folder(tmp_path)
  change_tensors(tmp_path, lambda tensors: tensors.update({tensor: value}))
  with pytest.raises(UserError, match=message) as caught:
    llama.read(tmp_path)
  assert tensor in str(caught.value)


def test_head_equal_to_the_embedding_and_old_tables_are_no_fault(tmp_path):
  """Old Llama files hold both."""
  our_folder(tmp_path)

  def change(tensors):
    tensors["lm_head.weight"] = tensors[llama.EMBED].copy()
    for n in range(tiny.N):
      tensors[f"model.layers.{n}.self_attn.rotary_emb.inv_freq"] = ONES

  change_tensors(tmp_path, change)
  assert llama.read(tmp_path).config.tied


def test_untied_model_may_have_equal_tensors(tmp_path):
  """The configuration decides."""
  our_folder(tmp_path, tied=False)
  change_tensors(
    tmp_path, lambda t: t.update({hf_files.HEAD: t[llama.EMBED].copy()})
  )
  assert not llama.read(tmp_path).config.tied


REFUSED_EXPORTS = [
  ({"internal_norm": "none"}, "internal_norm='none': a Llama layout needs"),
  ({"final_norm": "taper"}, "final_norm='taper'"),
  ({"norm": "layer"}, "norm='layer'"),
  ({"mlp": "gelu"}, "mlp='gelu'"),
  ({"positions": "learned"}, "positions='learned'"),
  ({"rotary_dim": 4}, "rotary_dim=4: a Llama layout needs 6"),
  ({"biases": ("q", "v")}, r"biases=\['q', 'v'\]"),
  ({"biases": ("q", "k", "v", "up")}, r"biases=\['q', 'k', 'v', 'up'\]"),
  ({"biases": ("head",), "tied": False}, r"biases=\['head'\]"),
  ({"num_heads": 3, "num_kv_heads": 3}, "embed_dim=8 is not divisible"),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED_EXPORTS)
def test_model_of_another_layout_is_not_written(changes, message):
  with pytest.raises(UserError, match=message):
    llama.to_hf({}, our_config(**changes))


# The folder itself.


def shard(folder):
  """Turns model.safetensors into two shards: the weight map."""
  tensors = safetensors.numpy.load_file(folder / hf_files.WEIGHTS)
  (folder / hf_files.WEIGHTS).unlink()
  halves = {"a.safetensors": {}, "b.safetensors": {}}
  for i, (name, value) in enumerate(tensors.items()):
    halves["ab"[i % 2] + ".safetensors"][name] = value
  for name, part in halves.items():
    safetensors.numpy.save_file(part, folder / name)
  return {t: name for name, part in halves.items() for t in part}


def write_index(folder, weight_map):
  text = json.dumps({"metadata": {}, "weight_map": weight_map})
  (folder / hf_files.INDEX).write_text(text)


def test_shards_are_read_as_one(tmp_path):
  params, _ = our_folder(tmp_path)
  weight_map = shard(tmp_path)
  write_index(tmp_path, weight_map)
  model = llama.read(tmp_path)
  for (path, a), (_, b) in zip(
    sorted(leaves(params)), sorted(leaves(model.params)), strict=True
  ):
    np.testing.assert_array_equal(a, b, err_msg=path)
  files = model.meta["source"]["files"]
  assert set(files) == {
    "config.json", hf_files.INDEX, "a.safetensors", "b.safetensors"
  }
  assert files["config.json"] == hf_files.sha256(tmp_path / "config.json")


@pytest.mark.parametrize(
  ("name", "message"),
  [
    ("../a.safetensors", "no file name of this folder"),
    ("/a.safetensors", "no file name of this folder"),
    ("sub/a.safetensors", "no file name of this folder"),
    ("..", "no file name of this folder|no safetensors file"),
    (3, "no file name of this folder"),
    ("c.safetensors", ".c.safetensors. does not exist"),
    ("a.bin", "no safetensors file"),
    ("b.safetensors", "a.safetensors holds tensor '.*norm.weight', against"),
  ],
)
def test_index_that_points_elsewhere_is_refused(tmp_path, name, message):
  """It is data of others: nothing outside the folder may be opened."""
  folder = tmp_path / "model"
  our_folder(folder)
  weight_map = shard(folder)
  (tmp_path / "a.safetensors").write_bytes(
    (folder / "a.safetensors").read_bytes()
  )
  tensor = next(
    t for t, n in weight_map.items() if n[0] == "a" and "norm" in t
  )
  write_index(folder, weight_map | {tensor: name})
  with pytest.raises(UserError, match=message):
    llama.read(folder)


def test_tensors_in_no_index_or_in_two_shards_are_refused(tmp_path):
  our_folder(tmp_path)
  weight_map = shard(tmp_path)
  left_out = dict(weight_map)
  del left_out["model.norm.weight"]
  write_index(tmp_path, left_out)
  with pytest.raises(UserError, match="holds tensor 'model.norm.weight', ag"):
    llama.read(tmp_path)
  write_index(tmp_path, {})
  with pytest.raises(UserError, match="has no weight_map"):
    llama.read(tmp_path)
  write_index(tmp_path, weight_map)
  (tmp_path / hf_files.WEIGHTS).write_bytes(b"")
  with pytest.raises(UserError, match="holds both"):
    llama.read(tmp_path)


def test_pickles_are_refused_by_name(tmp_path):
  our_folder(tmp_path)
  (tmp_path / hf_files.WEIGHTS).unlink()
  with pytest.raises(UserError, match="holds no model.safetensors"):
    llama.read(tmp_path)
  (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x02}q\x00.")
  with pytest.raises(UserError, match="pytorch_model.bin .*convert"):
    llama.read(tmp_path)


def test_damaged_files_are_told_in_one_line(tmp_path):
  """Cut at every kind of place, and bytes of the header turned."""
  our_folder(tmp_path)
  path = tmp_path / hf_files.WEIGHTS
  whole = path.read_bytes()
  header = int.from_bytes(whole[:8], "little")
  cuts = [0, 4, 8, 8 + header // 2, 8 + header, len(whole) - 1]
  damaged = [whole[:cut] for cut in cuts] + [whole + b"\0"]
  rng = np.random.default_rng(0)
  for at in rng.integers(0, 8 + header, 60):
    part = bytearray(whole)
    part[at] ^= 1 << int(rng.integers(8))
    damaged.append(bytes(part))
  refused = 0
  for data in damaged:
    path.write_bytes(data)
    try:
      llama.read(tmp_path)
    except UserError as error:
      refused += 1
      assert "\n" not in str(error)
  assert refused >= len(damaged) - 3  # a bit of the metadata may be harmless
  path.write_bytes(whole)
  for text in ("", "{", "[]", '{"a": }', "\udcff", "[" * 100_000):
    (tmp_path / "config.json").write_text(text, errors="surrogateescape")
    with pytest.raises(UserError, match="config.json"):
      llama.read(tmp_path)
  with pytest.raises(UserError, match="config.json cannot be read"):
    llama.read(tmp_path / "none")


def test_a_name_that_is_there_twice_is_refused(tmp_path):
  """Of a field that is told twice, readers take one or the other."""
  our_folder(tmp_path)
  path = tmp_path / "config.json"
  path.write_text('{"vocab_size": 5, ' + path.read_text().lstrip()[1:])
  with pytest.raises(UserError, match="no JSON .*'vocab_size' is there twice"):
    llama.read(tmp_path)


def test_weights_are_cast_once_and_stored_in_order(tmp_path):
  """safetensors stores a transposed view wrong without a word."""
  config = our_config()
  tensors, hf_config = llama.to_hf(tiny.params(config), config)
  name = LAYER + "mlp.up_proj.weight"
  tensors[name] = np.asfortranarray(tensors[name])
  for dtype, kind in (
    ("bfloat16", ml_dtypes.bfloat16), ("float16", np.float16),
    ("float32", np.float32),
  ):
    hf_files.write_folder(tmp_path, tensors, hf_config, dtype)
    told, stored, _ = hf_files.read_folder(tmp_path)
    assert told["dtype"] == dtype == hf_files.stored_dtype(tmp_path)
    np.testing.assert_array_equal(
      stored[name], tensors[name].astype(kind).astype(np.float32)
    )
    assert stored.keys() == tensors.keys()
  modes = {path.stat().st_mode for path in tmp_path.iterdir()}
  assert len(modes) == 1  # safetensors alone would be private


def test_writer_refuses_what_a_reader_would_misread(tmp_path):
  config = our_config()
  tensors, hf_config = llama.to_hf(tiny.params(config), config)
  head = {hf_files.HEAD: tensors[llama.EMBED]}
  untied = hf_config | {"tie_word_embeddings": False}
  big = tensors | {"model.norm.weight": np.full(8, 7e4, np.float32)}
  for args, message in (
    ((tensors | head, hf_config, "float32"), "=True and lm_head.* is present"),
    ((tensors, untied, "float32"), "=False and lm_head.weight is missing"),
    ((big, hf_config, "float16"), "float16: .* model.norm.weight is 70000"),
    ((tensors, hf_config, "int8"), "dtype='int8' is not one of"),
  ):
    with pytest.raises(UserError, match=message):
      hf_files.write_folder(tmp_path / "out", *args)
  assert not (tmp_path / "out").exists()
  (tmp_path / "file").write_text("")
  with pytest.raises(UserError, match="cannot be written"):
    hf_files.write_folder(tmp_path / "file", tensors, hf_config, "float32")
