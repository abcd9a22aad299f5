"""The bare folded tree on disk."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from taperjax import folding
from taperjax.errors import UserError
from taperjax.interop import bare
from tests import lively, tiny

CONFIGS = {
  "rms": tiny.model_config(num_kv_heads=1),
  "rms_scan": tiny.model_config(final_norm="norm", scan_layers=True),
  "layer": tiny.gpt2_config(),
  "baseline": tiny.model_config(internal_norm="norm", final_norm="norm"),
}


def folded(config):
  params = tiny.params(config)
  if config.tapered_sites:
    return folding.fold(params, tiny.c(config), config)
  return params, config


@pytest.mark.parametrize("name", CONFIGS)
def test_what_is_written_is_read_bit_for_bit(name, tmp_path):
  params, config = folded(CONFIGS[name])
  info = bare.write(tmp_path, params, config, dtype="float32")
  read, read_config = bare.read(tmp_path)
  flat, config = bare.flatten(params, config)
  assert read_config == config
  assert info["tensors"] == len(flat)
  read_flat, _ = bare.flatten(read, config)
  assert read_flat.keys() == flat.keys()
  for path, leaf in flat.items():
    np.testing.assert_array_equal(read_flat[path], leaf, err_msg=path)
  assert sorted(info["files"]) == sorted(p.name for p in tmp_path.iterdir())


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_narrow_file_holds_the_weights_rounded_once(dtype, tmp_path):
  params, config = folded(CONFIGS["layer"])
  bare.write(tmp_path, params, config, dtype=dtype)
  read, _ = bare.read(tmp_path)
  jax.tree.map(
    lambda old, new: np.testing.assert_array_equal(
      np.asarray(jnp.asarray(old).astype(dtype), np.float32), new
    ),
    params, read,
  )


def test_a_transposed_tensor_is_stored_as_it_reads(tmp_path):
  """safetensors writes the memory, whatever the strides say."""
  params, config = folded(CONFIGS["rms"])
  kernel = np.asarray(params["head"]["kernel"])
  params["head"]["kernel"] = np.ascontiguousarray(kernel.T).T
  bare.write(tmp_path, params, config, dtype="float32")
  read, _ = bare.read(tmp_path)
  np.testing.assert_array_equal(read["head"]["kernel"], kernel)


def test_the_page_tells_names_shapes_and_the_forward_pass(tmp_path):
  params, config = folded(CONFIGS["layer"])
  bare.write(tmp_path, params, config, dtype="float32")
  page = json.loads((tmp_path / "model.json").read_text())
  assert page["layout"] == "(in, out)"
  assert page["tensors"]["block_0/attn/q/kernel"] == [tiny.D, tiny.H, tiny.K]
  assert page["tensors"]["head/bias"] == [tiny.V]
  text = "\n".join(page["forward"])
  assert "W_head + b_head" in text and "position_embed" in text
  assert "gelu_tanh(x W_up + b_up)" in text and "frequency" not in text


@pytest.mark.parametrize("name", ["rms", "layer"])
def test_the_read_model_gives_the_same_logits(name, tmp_path):
  params, config = folded(CONFIGS[name])
  bare.write(tmp_path, params, config, dtype="float32")
  tokens_BL = tiny.tokens(25, tiny.M)
  np.testing.assert_array_equal(
    lively.logits(*bare.read(tmp_path), tokens_BL),
    lively.logits(params, config, tokens_BL),
  )


def test_an_overflow_names_the_tensor(tmp_path):
  params, config = folded(CONFIGS["rms"])
  up = params["block_1"]["mlp"]["up"]
  up["kernel"] = up["kernel"].at[0, 0].set(-1e5)
  with pytest.raises(UserError, match=r"float16.*block_1/mlp/up/kernel.*65504"):
    bare.write(tmp_path, params, config, dtype="float16")
  assert not list(tmp_path.iterdir())
  bare.write(tmp_path, params, config, dtype="bfloat16")


def test_who_may_read_the_page_may_read_the_weights(tmp_path):
  """safetensors alone would keep them to the owner."""
  bare.write(tmp_path, *folded(CONFIGS["rms"]), dtype="float32")
  assert len({path.stat().st_mode for path in tmp_path.iterdir()}) == 1


def test_mistakes_are_told(tmp_path):
  config = CONFIGS["rms"]
  with pytest.raises(UserError, match="fold the model first"):
    bare.write(tmp_path, tiny.params(config), config, dtype="float32")
  with pytest.raises(UserError, match="dtype='int8' is not one of"):
    bare.write(tmp_path, *folded(config), dtype="int8")
  bare.write(tmp_path, *folded(config), dtype="float32")
  page = json.loads((tmp_path / "model.json").read_text())
  page["tensors"].pop("head/kernel")
  (tmp_path / "model.json").write_text(json.dumps(page))
  with pytest.raises(UserError, match="does not hold the tensors"):
    bare.read(tmp_path)
