"""TransformerLens 4 against our model: logits, and attribution that sums up.

Logits of 3 x 128 positions and of standard deviation about 1.
"""

import json
import pathlib

import numpy as np
import pytest

from taperjax.config import RopeScaling
from taperjax.errors import UserError
from taperjax.interop import transformer_lens as lens
from tests import lively, tiny

M = 128


def llama(**changes):
  fields = {"context_len": M, "num_heads": 4, "num_kv_heads": 2}
  return tiny.model_config(**{**fields, **changes})


CONFIGS = {
  "rms_all": llama(biases=("q", "k", "v")),
  "rms_internal": llama(
    final_norm="norm", rope_scaling=RopeScaling("llama3", 4.0, 1.0, 4.0, 32)
  ),
  "rms_partial": llama(
    head_dim=8, rotary_dim=6, rope_scaling=RopeScaling("linear", 4.0)
  ),
  "swiglu_layer_all": llama(norm="layer"),
  "layer_all": tiny.gpt2_config(context_len=M),
  "layer_internal": tiny.gpt2_config(
    context_len=M, final_norm="norm", mlp="gelu"
  ),
}


@pytest.fixture(scope="module", autouse=True)
def _lens():
  """Its import takes seconds, so it waits for the first test."""
  pytest.importorskip("transformer_lens")


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_are_ours_and_the_components_sum_to_them(name, tmp_path):
  params, config = lively.model(CONFIGS[name])
  info = lens.write(tmp_path, params, config, dtype="float32")
  assert info["files"] == sorted(p.name for p in tmp_path.iterdir())
  tokens_BL = tiny.tokens(3, M)
  want_BLV = np.asarray(lively.logits(params, config, tokens_BL))
  assert 0.5 < want_BLV.std() < 3
  found = lens.check(tmp_path, tokens_BL, want_BLV)
  assert found["max_abs_delta_logit"] < 3e-5
  assert found["stream_error"] < 3e-6
  assert found["attribution_error"] < 3e-5
  learned = config.positions == "learned"
  assert found["components"] == 1 + learned + tiny.N * (config.num_heads + 2)
  assert found["has_norm"] == {
    "rms_internal": "NativeRMSNorm", "layer_internal": "LayerNorm",
  }.get(name)


def test_a_folded_model_has_no_norm_module(tmp_path):
  for name, count in (("rms_all", 0), ("layer_internal", 1)):
    folder = tmp_path / name
    folder.mkdir()
    lens.write(folder, *lively.model(CONFIGS[name]), dtype="float32")
    bridge = lens.load(folder)
    norms = [
      module for module in bridge.modules()
      if type(module).__name__ in ("NativeRMSNorm", "LayerNorm")
    ]
    assert len(norms) == count


def test_ablating_a_head_takes_its_attribution_away(tmp_path):
  """The last layer's heads reach the logits on a straight path only."""
  import torch

  params, config = lively.model(
    CONFIGS["rms_all"].replace(num_layers=1, mlp="gelu")
  )
  # Without an MLP behind them, that is.
  down = params["block_0"]["mlp"]["down"]
  down["kernel"] = 0 * down["kernel"]
  lens.write(tmp_path, params, config, dtype="float32")
  bridge = lens.load(tmp_path)
  ids = torch.tensor(np.asarray(tiny.tokens(3, M))).long()

  def drop(z, hook):
    z = z.clone()
    z.view(*z.shape[:2], 4, tiny.K)[:, :, 1] = 0
    return z

  with torch.no_grad():
    logits, cache = bridge.run_with_cache(ids)
    hooks = [("blocks.0.attn.hook_z", drop)]
    without = bridge.run_with_hooks(ids, fwd_hooks=hooks)
    z = cache["blocks.0.attn.hook_z"].reshape(3, M, 4, tiny.K)[:, :, 1]
    w_out = bridge.blocks[0].attn.o.original_component.weight
    head = z @ w_out.reshape(tiny.D, 4, tiny.K)[:, 1].T
    unembed = bridge.unembed.original_component.weight
  assert float((logits - without).abs().max()) > 0.1
  torch.testing.assert_close(
    logits - without, head @ unembed.T, atol=1e-5, rtol=1e-4
  )


def test_a_tied_head_is_stored_once_and_a_context_can_be_cut(tmp_path):
  params, config = lively.model(CONFIGS["layer_internal"])
  assert config.tied
  lens.write(tmp_path, params, config, dtype="bfloat16")
  from safetensors import safe_open

  with safe_open(tmp_path / "model.safetensors", "np") as file:
    assert "unembed.weight" not in file.keys()  # noqa: SIM118
  tokens_BL = tiny.tokens(3, 20)
  want_BLV = lively.logits(params, config, tokens_BL)
  found = lens.check(tmp_path, tokens_BL, want_BLV)
  assert 1e-4 < found["mean_abs_delta_logit"] < 0.05
  assert found["attribution_error"] < 3e-5


def test_the_loader_is_short_and_the_page_plain(tmp_path):
  lens.write(tmp_path, *lively.model(CONFIGS["rms_all"]), dtype="float32")
  text = (tmp_path / lens.LOADER).read_text()
  assert len(text.splitlines()) <= 40
  page = json.loads((tmp_path / lens.PAGE).read_text())
  assert page["cfg"]["normalization_type"] is None
  assert page["cfg"]["final_rms"] is False
  assert pathlib.Path(tmp_path / "model.safetensors").is_file()


def test_mistakes_are_told(tmp_path):
  config = CONFIGS["rms_all"]
  with pytest.raises(UserError, match="fold the model first"):
    lens.write(tmp_path, tiny.params(config), config, dtype="float32")
  plain = config.replace(internal_norm="norm", final_norm="norm")
  with pytest.raises(UserError, match="internal_norm=norm.*boot_transformers"):
    lens.write(tmp_path, tiny.params(plain), plain, dtype="float32")
  params, config = lively.model(config)
  config = config.replace(rope_scaling=RopeScaling("linear", 0.5))
  with pytest.raises(UserError, match=r"rope_scaling.factor=0.5: .*remote"):
    lens.write(tmp_path, params, config, dtype="float32")
  assert not list(tmp_path.iterdir())
