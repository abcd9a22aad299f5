"""jax.export artifacts: right ids without taperjax, and no norm in the graph.

A tiny model of context 128; 3 rows make well over 300 positions.
"""

import builtins
import json
import pathlib
import re
import subprocess
import sys

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from taperjax import attention, decode
from taperjax.errors import UserError
from taperjax.interop import stablehlo
from tests import lively, tiny

M = 128
CONFIGS = {
  "all": tiny.model_config(num_kv_heads=1, context_len=M),
  "internal": tiny.gpt2_config(final_norm="norm", context_len=M),
}
PROMPTS = [[5, 7, 9, 30, 2], [1, 2], [11, 0, 3, 4, 8, 8, 17]]
# Runs a script where no import can reach the package.
ALONE = """
import runpy, sys
class Refuse:
  def find_spec(self, name, *_):
    if name.split(".")[0] in ("taperjax", "flax", "safetensors", "torch"):
      raise ImportError(f"the runner wants {name}")
sys.meta_path.insert(0, Refuse())
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def run(folder, count, prompts):
  texts = [",".join(map(str, prompt)) for prompt in prompts]
  out = subprocess.run(
    [sys.executable, "-W", "error", "-c", ALONE, str(folder / "runner.py"),
     str(folder), str(count), *texts],
    capture_output=True, text=True, cwd=folder,
  )
  if out.returncode:
    return out.stderr
  return [[int(i) for i in line.split(",")] for line in out.stdout.split()]


@pytest.mark.parametrize(
  ("name", "weights"),
  [("all", "arguments"), ("internal", "arguments"), ("all", "constants")],
)
def test_the_runner_alone_gives_our_greedy_ids(name, weights, tmp_path):
  params, config = lively.model(CONFIGS[name], 3)
  info = stablehlo.write(
    tmp_path, params, config, dtype="float32", weights=weights
  )
  assert info["files"] == sorted(p.name for p in tmp_path.iterdir())
  assert ("model.safetensors" in info["files"]) == (weights == "arguments")
  count = M - max(map(len, PROMPTS))
  want = decode.generate(params, config, PROMPTS, max_new=count)
  assert min(len(set(row)) for row in want) > 2, "the text varies"
  assert run(tmp_path, count, PROMPTS) == want
  if weights == "arguments" and name == "all":
    assert run(tmp_path, count, PROMPTS[1:2]) == want[1:2]
    assert "exceed 128 positions" in run(tmp_path, count + 1, PROMPTS)


def test_the_runner_is_short():
  files = pathlib.Path(stablehlo.__file__).parent / "files"
  lines = (files / "stablehlo_runner.py").read_text().splitlines()
  assert len(lines) <= 40


@pytest.mark.parametrize("name", CONFIGS)
def test_every_logit_is_that_of_the_model(name):
  """Prefill of unequal rows, then decoding by given tokens to the end."""
  params, config = lively.model(CONFIGS[name])
  artifacts, tensors = stablehlo.export(params, config, dtype="float32")
  tokens_BL = tiny.tokens(3, M)
  want_BLV = lively.logits(params, config, tokens_BL)
  assert 0.5 < float(jnp.std(want_BLV)) < 2
  length_B, checked = np.array([5, 2, 7], np.int32), 0
  prefill, step = (
    jax.jit(artifacts[n].call) for n in ("prefill", "decode")
  )
  rows = np.arange(3)
  logits_BV, cache = prefill(tensors, tokens_BL[:, :7], length_B)
  for position_B in (length_B + i for i in range(M - 6)):
    want_BV = want_BLV[rows, position_B - 1]
    np.testing.assert_allclose(logits_BV, want_BV, atol=1e-5, rtol=1e-5)
    checked += 3
    if max(position_B) < M:
      token_B = tokens_BL[rows, position_B]
      logits_BV, cache = step(tensors, token_B, position_B, cache)
  assert checked >= 300


def graph(config, dtype, name):
  params, config = lively.model(config)
  artifacts, _ = stablehlo.export(params, config, dtype=dtype)
  return artifacts[name].mlir_module()


def sums_of_the_stream(text):
  """Reductions over an axis that is not the cache's."""
  found = re.findall(
    r"stablehlo\.reduce\(.*dimensions = \[(\d+)\] : "
    r"\(tensor<([^>]*)xb?f\d+>",
    text,
  )
  assert found, "the attention reduces over the cache"
  return [
    shape for axis, shape in found if shape.split("x")[int(axis)] != str(M)
  ]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("step", ["prefill", "decode"])
def test_a_folded_model_has_no_norm_in_its_graph(step, dtype):
  text = graph(CONFIGS["all"], dtype, step)
  assert "sqrt" not in text
  assert sums_of_the_stream(text) == []
  # The search finds them where they are.
  changes = {"internal_norm": "norm", "final_norm": "norm"}
  text = graph(CONFIGS["all"].replace(**changes), dtype, step)
  assert len(re.findall(r"stablehlo\.sqrt", text)) == 2 * tiny.N + 1
  assert len(sums_of_the_stream(text)) == 2 * tiny.N + 1


def test_artifacts_are_for_cpu_and_cuda_and_call_no_library(
  tmp_path, monkeypatch
):
  """Nor may they hold a branch that was chosen for this machine."""
  params, config = lively.model(CONFIGS["all"])

  def refuse(*_):
    raise AssertionError("causal_attention asks for the backend")

  monkeypatch.setattr(attention, "causal_attention", refuse)
  stablehlo.write(tmp_path, params, config, dtype="bfloat16")
  for name in ("prefill", "decode"):
    data = (tmp_path / f"{name}.jax_export").read_bytes()
    artifact = jax.export.deserialize(data)
    assert artifact.platforms == ("cpu", "cuda")
    calls = set(re.findall(r"custom_call @(\w+)", artifact.mlir_module()))
    assert calls <= {"shape_assertion"}
    assert b".py" not in data, "file names of this machine"


def test_a_prompt_beyond_the_context_is_refused():
  params, config = lively.model(CONFIGS["all"])
  artifacts, tensors = stablehlo.export(params, config, dtype="float32")
  with pytest.raises(ValueError, match="l <= 128"):
    artifacts["prefill"].call(
      tensors, tiny.tokens(1, M + 1), np.array([3], np.int32)
    )


def test_bfloat16_is_computed_in_bfloat16(tmp_path):
  params, config = lively.model(CONFIGS["internal"])
  stablehlo.write(tmp_path, params, config, dtype="bfloat16")
  page = json.loads((tmp_path / "model.json").read_text())
  assert (page["dtype"], page["weights"]) == ("bfloat16", "arguments")
  tensors = safetensors.numpy.load_file(tmp_path / "model.safetensors")
  assert {str(x.dtype) for x in tensors.values()} == {"bfloat16"}
  data = (tmp_path / "prefill.jax_export").read_bytes()
  tokens_BL = tiny.tokens(300, 9)
  logits_BV, cache = jax.jit(jax.export.deserialize(data).call)(
    tensors, tokens_BL, np.full(300, 9, np.int32)
  )
  assert cache[0][0].dtype == jnp.bfloat16 and logits_BV.dtype == jnp.float32
  want_BV = lively.logits(params, config, tokens_BL)[:, -1]
  assert 1e-4 < float(jnp.mean(jnp.abs(logits_BV - want_BV))) < 0.02
  assert [len(row) for row in run(tmp_path, 3, PROMPTS)] == [3, 3, 3]


def test_mistakes_are_told(tmp_path, monkeypatch):
  config = CONFIGS["all"]
  with pytest.raises(UserError, match="fold the model first"):
    stablehlo.write(tmp_path, tiny.params(config), config, dtype="float32")
  params, config = lively.model(config)
  with pytest.raises(UserError, match="weights='none' is not one of"):
    stablehlo.write(
      tmp_path, params, config, dtype="float32", weights="none"
    )
  with pytest.raises(UserError, match="dtype=float16: .*use bfloat16"):
    stablehlo.write(tmp_path, params, config, dtype="float16")
  monkeypatch.setattr(stablehlo, "MAX_CONSTANTS", 1000)
  with pytest.raises(UserError, match="use weights=arguments"):
    stablehlo.write(
      tmp_path, params, config, dtype="float32", weights="constants"
    )
  plain = builtins.__import__

  def no_flatbuffers(name, *args, **kwargs):
    if name == "flatbuffers":
      raise ImportError(name)
    return plain(name, *args, **kwargs)

  monkeypatch.setattr(builtins, "__import__", no_flatbuffers)
  with pytest.raises(UserError, match=r"pip install 'taperjax\[export\]'"):
    stablehlo.write(tmp_path, params, config, dtype="float32")
  assert not list(tmp_path.iterdir())
