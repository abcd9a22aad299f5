"""The modeling file in transformers against our model.

Logits of 3 x 128 positions and of standard deviation about 1.
"""

import json
import pathlib

import numpy as np
import pytest

from taperjax import config as config_lib, decode
from taperjax.errors import UserError
from taperjax.interop import remote_code
from tests import lively, tiny

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

M = 128
LLAMA3 = config_lib.RopeScaling("llama3", 4.0, 1.0, 4.0, 32)
NORMS = {"internal_norm": "norm", "final_norm": "norm"}


def llama(**changes):
  """GQA, biases on the projections that Qwen2 has, a tied head."""
  fields = {
    "context_len": M, "num_heads": 4, "num_kv_heads": 2,
    "biases": ("q", "k", "v"),
  }
  return tiny.model_config(**{**fields, **changes})


CONFIGS = {
  "rms_all": llama(),
  "rms_internal": llama(final_norm="norm", rope_scaling=LLAMA3),
  "rms_baseline": llama(**NORMS, tied=False, rotary_dim=2),
  "rms_linear": llama(rope_scaling=config_lib.RopeScaling("linear", 4.0)),
  "layer_all": tiny.gpt2_config(context_len=M),
  "layer_internal": tiny.gpt2_config(
    context_len=M, final_norm="norm", mlp="gelu"
  ),
  "layer_baseline": tiny.gpt2_config(context_len=M, **NORMS),
}
PROMPTS = [[5, 7, 9, 30, 2], [1, 2], [11, 0, 3, 4, 8, 8, 17]]


def load(folder, attention="sdpa"):
  model = transformers.AutoModelForCausalLM.from_pretrained(
    folder, trust_remote_code=True, attn_implementation=attention
  )
  return model.eval()


def exported(name, folder, factor=1.0, dtype="float32"):
  params, config = lively.model(CONFIGS[name], factor)
  remote_code.write(folder, params, config, dtype=dtype)
  return params, config


@pytest.fixture(autouse=True)
def _own_module_cache(tmp_path, monkeypatch):
  """transformers copies the modeling file to a cache: here, not at home."""
  from transformers import dynamic_module_utils

  monkeypatch.setattr(
    dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules")
  )


def logits(model, tokens_BL, **kwargs):
  with torch.no_grad():
    out = model(torch.tensor(np.asarray(tokens_BL)).long(), **kwargs)
  return out.logits.float().numpy()


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_are_those_of_our_model(name, tmp_path):
  folder = tmp_path / "out"
  folder.mkdir()
  params, config = exported(name, folder)
  tokens_BL = tiny.tokens(3, M)
  want_BLV = np.asarray(lively.logits(params, config, tokens_BL))
  assert 0.5 < want_BLV.std() < 3
  for attention in ("sdpa", "eager"):
    got_BLV = logits(load(folder, attention), tokens_BL)
    np.testing.assert_allclose(got_BLV, want_BLV, atol=3e-5, err_msg=attention)


@pytest.mark.parametrize(
  "name", ["rms_all", "rms_internal", "layer_all", "layer_internal"]
)
def test_cached_generation_of_a_padded_batch_gives_our_ids(name, tmp_path):
  folder = tmp_path / "out"
  folder.mkdir()
  params, config = exported(name, folder, factor=3.0)
  want = decode.generate(params, config, PROMPTS, max_new=64)
  assert min(len(set(row)) for row in want) > 2, "the text varies"
  longest = max(map(len, PROMPTS))
  ids = np.zeros((3, longest), np.int64)
  mask = np.zeros((3, longest), np.int64)
  for row, prompt in enumerate(PROMPTS):
    ids[row, longest - len(prompt):] = prompt
    mask[row, longest - len(prompt):] = 1
  model = load(folder)
  options = {"max_new_tokens": 64, "do_sample": False, "pad_token_id": 0}
  got = model.generate(
    torch.tensor(ids), attention_mask=torch.tensor(mask), **options
  )
  assert got[:, longest:].tolist() == want
  alone = model.generate(torch.tensor([PROMPTS[1]]), **options)
  assert alone[0, 2:].tolist() == want[1]


@pytest.mark.parametrize("name", ["rms_all", "layer_all"])
def test_left_padding_does_not_move_the_positions(name, tmp_path):
  """A plain call has an attention mask and no position ids."""
  folder = tmp_path / "out"
  folder.mkdir()
  exported(name, folder)
  tokens_BL = np.asarray(tiny.tokens(3, 40))
  padded = np.pad(tokens_BL, ((0, 0), (9, 0)))
  mask = torch.tensor(np.pad(np.ones_like(tokens_BL), ((0, 0), (9, 0))))
  model = load(folder)
  np.testing.assert_allclose(
    logits(model, padded, attention_mask=mask)[:, 9:],
    logits(model, tokens_BL), atol=3e-5,
  )


def norms_of(model):
  return [
    name for name, module in model.named_modules()
    if "norm" in type(module).__name__.lower()
  ]


def test_a_folded_model_has_no_norm_module(tmp_path):
  for name, count in (
    ("rms_all", 0), ("layer_all", 0), ("rms_internal", 1),
    ("layer_internal", 1), ("rms_baseline", 2 * tiny.N + 1),
  ):
    folder = tmp_path / name
    folder.mkdir()
    exported(name, folder)
    assert len(norms_of(load(folder))) == count, name


def test_saved_again_it_loads_again(tmp_path):
  folder, again = tmp_path / "out", tmp_path / "again"
  folder.mkdir()
  exported("layer_all", folder)
  model = load(folder)
  model.save_pretrained(again)
  tokens_BL = tiny.tokens(2, 20)
  np.testing.assert_array_equal(
    logits(load(again), tokens_BL), logits(model, tokens_BL)
  )


def test_a_tied_head_is_stored_once(tmp_path):
  folder = tmp_path / "out"
  folder.mkdir()
  exported("rms_internal", folder)
  from safetensors import safe_open

  with safe_open(folder / "model.safetensors", "np") as file:
    assert "lm_head.weight" not in file.keys()  # noqa: SIM118
    assert file.metadata() == {"format": "pt"}
  model = load(folder)
  assert model.lm_head.weight is model.model.embed_tokens.weight


def test_bfloat16_is_the_default_dtype_of_its_file(tmp_path):
  folder = tmp_path / "out"
  folder.mkdir()
  params, config = exported("rms_all", folder, dtype="bfloat16")
  model = load(folder)
  assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
  tokens_BL = tiny.tokens(3, M)
  want_BLV = lively.logits(params, config, tokens_BL)
  delta_BLV = logits(model, tokens_BL) - np.asarray(want_BLV)
  assert 1e-4 < np.sqrt(np.mean(delta_BLV**2)) < 0.1


def test_special_ids_reach_the_config_and_training_has_a_loss(tmp_path):
  folder = tmp_path / "out"
  folder.mkdir()
  params, config = lively.model(CONFIGS["rms_all"])
  info = remote_code.write(
    folder, params, config, dtype="float32",
    special_ids={"bos_token_id": 1, "eos_token_id": 2},
  )
  assert info["files"] == sorted(p.name for p in folder.iterdir())
  fields = json.loads((folder / "config.json").read_text())
  assert (fields["bos_token_id"], fields["eos_token_id"]) == (1, 2)
  model = load(folder)
  assert model.generation_config.eos_token_id == 2
  ids = torch.tensor(np.asarray(tiny.tokens(3, 20))).long()
  out = model(ids, labels=ids)
  picked = out.logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])
  torch.testing.assert_close(out.loss, -picked.mean())


def test_mistakes_are_told(tmp_path):
  config = CONFIGS["rms_all"]
  with pytest.raises(UserError, match="fold the model first"):
    remote_code.write(tmp_path, tiny.params(config), config, dtype="float32")
  params, config = lively.model(config)
  params["head"]["kernel"] = params["head"]["kernel"].at[0, 0].set(1e9)
  with pytest.raises(UserError, match=r"float16.*lm_head\.weight"):
    remote_code.write(tmp_path, params, config, dtype="float16")


def test_the_modeling_file_is_short():
  files = pathlib.Path(remote_code.__file__).parent / "files"
  text = (files / "modeling_taperjax.py").read_text()
  assert len(text.splitlines()) <= 260
