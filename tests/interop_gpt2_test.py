"""GPT-2 layout in and out, against transformers and a real trained model."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from taperjax import folding, model
from taperjax.errors import UserError
from taperjax.interop import gpt2, hf_files, stock
from tests import nano_sort, tiny

ALL = ("q", "k", "v", "o", "up", "down")


def config(**changes):
  fields = {
    "internal_norm": "norm", "final_norm": "norm", "biases": ALL,
    "rope_theta": 10_000.0,  # without effect
  }
  return tiny.gpt2_config(**{**fields, **changes})


def logits(params, config, tokens_BL, **gate):
  apply = jax.jit(
    lambda params, tokens_BL: model.Transformer(config).apply(
      {"params": params}, tokens_BL, **gate
    )[0]
  )
  return np.asarray(apply(params, tokens_BL))


def folder_of(tmp_path, tensors, hf_config, dtype="float32"):
  hf_files.write_folder(tmp_path / "m", tensors, hf_config, dtype)
  return tmp_path / "m"


@pytest.fixture(scope="module")
def layout():
  return gpt2.to_hf(tiny.params(config()), config())


def test_what_is_written_reads_back_bit_by_bit(layout, tmp_path):
  """And what is read is written again with the same bytes."""
  tensors, hf_config = layout
  folder = folder_of(tmp_path, tensors, hf_config)
  got = gpt2.read(folder)
  assert (got.gate, got.step, got.config) == (1.0, 0, config())
  jax.tree.map(np.testing.assert_array_equal, got.params, tiny.params(config()))
  assert not got.c.any() and got.c.shape == (tiny.S,)
  source = got.meta["source"]
  assert (source["format"], source["dtype"]) == ("gpt2", "float32")
  assert set(source["files"]) == {"config.json", "model.safetensors"}
  again, again_config = gpt2.to_hf(got.params, got.config)
  assert again_config == hf_config
  stored = (folder / "model.safetensors").read_bytes()
  folder = folder_of(tmp_path / "again", again, again_config)
  assert (folder / "model.safetensors").read_bytes() == stored


@pytest.mark.parametrize("prefix", ["", "_orig_mod.", "_orig_mod.transformer."])
@pytest.mark.parametrize("storage", ["(in, out)", "(out, in)"])
def test_every_storage_gives_the_same_model(layout, prefix, storage):
  """Prefixes, transposed matrices (square ones as well), masks, a tied head."""
  tensors, hf_config = layout
  other = {}
  for name, x in tensors.items():
    matrix = ".c_" in name and x.ndim == 2
    short = name.removeprefix("transformer.")
    other[prefix + short] = x.T if matrix and storage == "(out, in)" else x
  causal = np.tril(np.ones((1, 1, tiny.M, tiny.M), np.float32))
  for n in range(tiny.N):
    other[f"{prefix}h.{n}.attn.bias"] = causal
    other[f"{prefix}h.{n}.attn.masked_bias"] = np.float32(-1e4)
  other["lm_head.weight"] = tensors["transformer.wte.weight"]
  got = gpt2.from_tensors(hf_config, other)
  assert got.config == config()
  jax.tree.map(np.testing.assert_array_equal, got.params, tiny.params(config()))
  assert got.meta["source"]["notes"] == [
    "stored causal masks are left out",
    "lm_head.weight is the embedding again and is left out",
  ]


@pytest.mark.parametrize(
  "changes",
  [
    {"tied": False, "mlp": "gelu", "norm_eps": 1e-3},
    {"biases": ("q", "k", "v", "up")},
    {"biases": ()},
  ],
)
def test_untied_heads_and_missing_biases(changes):
  """A bias that the file lacks is none here, and zeros when written."""
  made = config(**changes)
  tensors, hf_config = gpt2.to_hf(tiny.params(made), made)
  assert hf_config["layer_norm_epsilon"] == made.norm_eps
  parts = {"o": "attn.c_proj", "up": "mlp.c_fc", "down": "mlp.c_proj",
           "q": "attn.c_attn"}
  missing = [name for name in ALL if name not in made.biases]
  assert ("zeros" in str(gpt2.notes(made))) == bool(missing)
  for name in missing:
    if name in parts:
      for n in range(tiny.N):
        bias = tensors.pop(f"transformer.h.{n}.{parts[name]}.bias")
        assert not bias.any()
  got = gpt2.from_tensors(hf_config, tensors)
  assert got.config == made
  jax.tree.map(np.testing.assert_array_equal, got.params, tiny.params(made))


def test_a_model_without_biases_in_its_norms(layout):
  tensors, hf_config = layout
  tensors = {k: x for k, x in tensors.items() if not k.endswith(".bias")}
  got = gpt2.from_tensors(hf_config, tensors)
  assert got.config.biases == ()
  assert not got.params["block_1"]["mlp_norm"]["bias"].any()
  assert "biases of the norms" in got.meta["source"]["notes"][0]


def test_fewer_positions_on_request(layout):
  tensors, hf_config = layout
  got = gpt2.from_tensors(hf_config, tensors, context_len=5)
  assert got.config.context_len == 5
  np.testing.assert_array_equal(
    got.params["position_embed"]["embedding"],
    tensors["transformer.wpe.weight"][:5],
  )
  with pytest.raises(UserError, match="context_len=99 must be from 1 to 13"):
    gpt2.from_tensors(hf_config, tensors, context_len=99)


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"scale_attn_weights": False}, "scale_attn_weights=False"),
    ({"scale_attn_by_inverse_layer_idx": True}, "inverse_layer_idx=True"),
    ({"add_cross_attention": True}, "add_cross_attention=True"),
    ({"activation_function": "relu"}, "activation_function='relu'.*gelu_new"),
    ({"model_type": "llama"}, "model_type='llama' is not gpt2"),
    ({"qk_norm": True}, "qk_norm=True is not understood"),
    ({"quantization_config": {"bits": 4}}, "quantization_config"),
    ({"n_head": 3}, "n_embd=8 is not divisible by n_head=3"),
    ({"n_ctx": 4}, "n_ctx=4 is not n_positions=13"),
    ({"n_layer": 3}, "'h.0.attn.c_attn.bias'|'h.2.*missing"),
    ({"n_layer": 2**31 - 1}, "is more than the file's .* tensors"),
    ({"n_positions": 2**31}, "below 2.31"),
    ({"layer_norm_epsilon": 10**400}, "that float32 holds"),
    ({"layer_norm_epsilon": 1e-320}, "that float32 holds"),
    ({"activation_function": []}, r"activation_function=\[\].*gelu_new"),
    ({"n_layer": 1}, r"'h\.1\..*not part of the GPT-2 layout with n_layer=1"),
    ({"n_embd": "8"}, "n_embd='8' .*must be a whole number"),
    ({"vocab_size": 32}, r"'wte.weight' has shape \[31, 8\].*\[32, 8\]"),
    ({"n_inner": None}, r"c_fc.weight' has shape \[8, 20\].*\[8, 32\]"),
    ({"layer_norm_epsilon": 0}, "layer_norm_epsilon=0 .* finite number above"),
    ({"tie_word_embeddings": False}, "'lm_head.weight' is missing"),
    ({"tie_word_embeddings": "no"}, "must be true or false"),
  ],
)
def test_a_config_that_is_not_understood_is_refused(layout, changes, message):
  tensors, hf_config = layout
  with pytest.raises(UserError, match=message) as error:
    gpt2.from_tensors({**hf_config, **changes}, tensors)
  assert "\n" not in str(error.value)


def test_fields_without_effect_are_taken(layout):
  tensors, hf_config = layout
  extra = {
    "reorder_and_upcast_attn": True, "summary_type": "cls_index",
    "task_specific_params": {"text-generation": {"do_sample": True}},
    "_name_or_path": "gpt2", "bos_token_id": 50256, "quantization_config": None,
  }
  got = gpt2.from_tensors({**hf_config, **extra}, tensors)
  assert got.config == config()


def test_tensors_that_are_not_understood_are_refused(layout):
  tensors, hf_config = layout

  def refused(message, remove=(), **changes):
    other = {k: x for k, x in tensors.items() if k not in remove}
    with pytest.raises(UserError, match=message):
      gpt2.from_tensors(hf_config, {**other, **changes})

  h = "transformer.h.1."
  refused("'h.1.attn.q_norm.weight' is not", **{
    h + "attn.q_norm.weight": np.ones(4)})
  refused("'lm_head.bias' is not part", **{"lm_head.bias": np.ones(31)})
  refused("'h.1.ln_2.weight' is missing", [h + "ln_2.weight"])
  refused("'h.1.mlp.c_fc.bias' is missing, and", [h + "mlp.c_fc.bias"])
  refused("ln_1 and ln_f", ["transformer.ln_f.bias"])
  refused("are the same one", **{"ln_f.bias": np.ones(8)})
  refused("is not the embedding", **{"lm_head.weight": np.ones((31, 8))})
  refused("no causal mask", **{h + "attn.bias": np.ones((1, 1, 13, 13))})
  refused(r"'h.1.attn.c_attn.weight' has shape \[24, 8\]", **{
    h + "attn.c_attn.weight": tensors[h + "attn.c_attn.weight"].T})


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"norm": "rms"}, "norm=rms: the GPT-2 layout has layer"),
    ({"positions": "rope"}, "positions=rope"),
    ({"mlp": "swiglu"}, "mlp=swiglu"),
    ({"internal_norm": "none"}, "internal_norm=none"),
    ({"final_norm": "taper"}, "final_norm=taper"),
    ({"tied": False, "biases": ("head",)}, "no bias at the head.*remote-code"),
    ({"head_dim": 5}, "num_heads=2 times head_dim"),
  ],
)
def test_what_the_layout_cannot_hold_is_refused(changes, message):
  with pytest.raises(UserError, match=message):
    gpt2.to_hf({}, config(**changes))


@pytest.mark.parametrize("eps", [1e12, 2.0**40])
def test_a_file_without_norms_becomes_a_norm_free_model(eps):
  """weight x scale at a huge eps, as LN-free GPT-2 models are published."""
  made = config()
  params = tiny.params(made)
  tensors, hf_config = gpt2.to_hf(params, made)
  gains = {}
  for name, x in tensors.items():
    if ".ln_" in name and name.endswith("weight"):
      gains[name] = x
      tensors[name] = np.float32(np.float64(x) * eps**0.5)
  hf_config["layer_norm_epsilon"] = eps
  got = gpt2.from_tensors(hf_config, tensors)
  assert got.gate == 0.0 and got.calibrated and got.config.norm_eps == 1e-5
  assert "fixed maps" in got.meta["source"]["notes"][-1]
  np.testing.assert_allclose(
    got.params["block_1"]["mlp_norm"]["taper_scale"],
    gains["transformer.h.1.ln_2.weight"], rtol=1.2e-7,
  )
  tokens_BL = tiny.tokens(30, tiny.M)
  want_BLV = logits(got.params, got.config, tokens_BL, gate=0.0, c=got.c)
  folded, folded_config = folding.fold(got.params, got.c, got.config)
  assert folded_config.internal_norm == folded_config.final_norm == "none"
  scale = np.abs(want_BLV).max()
  folded_BLV = logits(folded, folded_config, tokens_BL)
  assert np.abs(folded_BLV - want_BLV).max() < 1e-5 * scale
  again, again_config, _ = stock.stock_form(got.params, got.c, got.config)
  written, _ = gpt2.to_hf(again, again_config)
  if eps == 2.0**40:
    for name, x in tensors.items():
      np.testing.assert_array_equal(written[name], x)
  stored_BLV = logits(again, again_config, tokens_BL)
  assert np.abs(stored_BLV - want_BLV).max() < 1e-5 * scale


@pytest.mark.parametrize(
  "changes",
  [
    {},
    {"tied": False, "mlp": "gelu", "norm_eps": 1e-3},
    {"biases": (), "num_kv_heads": 1},
  ],
)
def test_transformers_has_the_same_logits(changes, tmp_path):
  """390 positions, float32, in both directions; erf for tanh is told apart."""
  pytest.importorskip("transformers")
  import torch
  import transformers

  made = config(**changes)
  params = tiny.params(made)
  tokens_BL = tiny.tokens(30, tiny.M)
  std = logits(params, made, tokens_BL).std()
  params["final_norm"] = {k: x / std for k, x in params["final_norm"].items()}
  want_BLV = logits(params, made, tokens_BL)
  tensors, hf_config = gpt2.to_hf(params, made)
  ids = {"bos_token_id": None, "eos_token_id": None}
  folder = folder_of(tmp_path, tensors, {**hf_config, **ids})
  theirs = transformers.GPT2LMHeadModel.from_pretrained(
    folder, dtype=torch.float32
  ).eval()
  with torch.no_grad():
    got_BLV = theirs(torch.tensor(np.asarray(tokens_BL)).long()).logits.numpy()
  assert np.abs(got_BLV - want_BLV).max() < 1e-5
  theirs.save_pretrained(tmp_path / "theirs")
  back = gpt2.read(tmp_path / "theirs")
  got_BLV = logits(back.params, back.config, tokens_BL)
  assert np.abs(got_BLV - want_BLV).max() < 1e-5
  other = {"gelu": "gelu_tanh", "gelu_tanh": "gelu"}[made.mlp]
  other_BLV = logits(params, made.replace(mlp=other), tokens_BL)
  assert np.abs(other_BLV - want_BLV).max() > 1e-4


@pytest.fixture(scope="module")
def sorter(test_data):
  return nano_sort.read(test_data)


def test_gpt_nano_sort_sorts_every_input(sorter):
  got, _ = sorter
  c = np.zeros(2 * got.config.num_layers + 1, np.float32)
  assert nano_sort.sorted_inputs(got.params, c, 1.0, got.config) == 729


def test_gpt_nano_sort_has_its_stored_intermediates(sorter, test_data):
  """Every stage that a module of ours returns, to 1e-5 of the largest value."""
  got, _ = sorter
  path = test_data / "gpt-nano-sort" / "gpt-nano-sort-t0-partials.json"
  _, want = nano_sort.tensors_of(path)
  tokens_BL = jnp.asarray(want["idx"], jnp.int32)
  (out_BLV, aux), state = model.Transformer(got.config).apply(
    {"params": got.params}, tokens_BL, capture_intermediates=True
  )
  state = state["intermediates"]
  block = state["block_0"]
  first = lambda tree: tree["__call__"][0]
  heads = lambda x_BHLK: x_BHLK.swapaxes(1, 2)
  found = {
    "tok_emb": (first(state["embed"]), want["tok_emb"]),
    "ln1": (first(block["attn_norm"])[0], want["ln1"]),
    "q": (first(block["attn"]["q"]), heads(want["q"])),
    "k": (first(block["attn"]["k"]), heads(want["k"])),
    "v": (first(block["attn"]["v"]), heads(want["v"])),
    "yProj": (first(block["attn"])[0], want["yProj"]),
    "ln2": (first(block["mlp_norm"])[0], want["ln2"]),
    "fc": (first(block["mlp"]["up"]), want["fc"]),
    "mlp": (first(block["mlp"]), want["mlp"]),
    "block0": (first(block)[0], want["block0"]),
    "block1": (first(state["block_1"])[0], want["block1"]),
    "block2": (first(state["block_2"])[0], want["block2"]),
    "ln_f": (first(state["final_norm"])[0], want["ln_f"]),
    "lm_head": (out_BLV, want["lm_head"]),
    "probs": (jax.nn.softmax(out_BLV), want["probs"]),
  }
  for name, (ours, theirs) in found.items():
    assert ours.shape == theirs.shape, name
    bound = 1e-5 * max(1.0, np.abs(theirs).max())
    assert np.abs(ours - theirs).max() < bound, name


def test_gpt_nano_sort_is_written_with_the_bytes_it_had(sorter):
  got, tensors = sorter
  written, _ = gpt2.to_hf(got.params, got.config)
  masks = {name for name in tensors if name.endswith(".attn.bias")}
  assert set(written) == set(tensors) - masks
  for name, x in written.items():
    matrix = ".c_" in name and x.ndim == 2
    assert (x.T if matrix else x).tobytes() == tensors[name].tobytes(), name
