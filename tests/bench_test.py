"""`taperjax bench`: the statistics, the counts, and one tiny run.

No test compares times: the machine of a test run is nobody's in particular.
"""

import contextlib
import dataclasses
import functools
import json
import re
import sys
import types

import jax
import numpy as np
import pytest
from ml_collections import config_dict

from taperjax import api, cli, config as config_lib, gate, model, packing
from taperjax.bench import (
  decode as bench,
  peers,
  roofline,
  sheet,
  start,
  stats,
  torch_step,
  train,
)
from taperjax.errors import UserError
from taperjax.interop import verify
from tests import folding_test, runs, tiny

N = 2


@functools.cache
def forms(norm="rms"):
  config = folding_test.make_config(
    num_layers=N, norm=norm, final_norm="taper",
  )
  params = folding_test.random_params(config)
  c = np.asarray(folding_test.random_c())[: 2 * N + 1]
  return bench.make_forms(params, config, c, bench.FORMS)


@pytest.mark.parametrize(
  ("count", "ranks"),
  # Tables of the sign test: 95.9 % at 20, 97.8 % at 9, 96.9 % at 6.
  [(5, None), (6, (0, 5)), (9, (1, 7)), (20, (5, 14)), (50, (17, 32))],
)
def test_the_interval_of_a_median_has_the_ranks_of_the_sign_test(count, ranks):
  assert stats.median_ranks(count) == ranks


def test_a_paired_ratio_does_not_see_what_both_members_share():
  """The load doubles every third time; the ratio of each pair is known."""
  load = np.array([1.0, 1.0, 2.0] * 7)[:20]
  true = np.linspace(1.19, 1.21, 20)
  found = stats.paired_ratio(load * true, load)
  assert found["ratio"] == pytest.approx(1.2)
  assert (found["low"], found["high"]) == pytest.approx((true[5], true[14]))
  assert found["half_width"] == pytest.approx((true[14] - true[5]) / 2.4)
  assert found["resolved"]
  assert stats.ratio_text(found) == "1.200 [1.195, 1.205]"


def test_a_wide_or_a_missing_interval_is_not_resolved():
  wide = stats.paired_ratio(np.linspace(0.8, 1.2, 20), np.ones(20))
  assert wide["half_width"] > stats.HALF_WIDTH and not wide["resolved"]
  assert stats.ratio_text(wide).startswith("not resolved: 1.000 [0.9")
  few = stats.paired_ratio([1.0] * 5, [1.0] * 5)
  assert few["low"] is None and not few["resolved"]
  assert stats.ratio_text(few) == "not resolved (too few pairs)"


def test_the_interval_holds_the_true_median_in_95_of_100_samples():
  """Skewed noise, as of a machine that is disturbed now and then."""
  rng = np.random.default_rng(0)
  held, samples = 0, 1000
  for _ in range(samples):
    ratios = 1.1 * np.exp(rng.exponential(size=20) - np.log(2))
    found = stats.paired_ratio(ratios, np.ones(20))
    held += found["low"] <= 1.1 <= found["high"]
  assert 0.94 < held / samples < 0.98  # exactly 0.959


def reductions(name, norm):
  params, config, gate, c = forms(norm)[name]
  packed = packing.pack(params, config)
  return roofline.reductions(packed, config, 3, gate, c)


def test_folding_takes_a_reduction_from_each_norm_of_the_program():
  """2 N + 1 of them with RMSNorm; what is left are the two of a softmax."""
  found = {name: reductions(name, "rms") for name in bench.FORMS}
  assert found["baseline"] - found["folded"] == 2 * N + 1
  assert found["unfused"] == found["folded"] == 2 * N


def test_reductions_are_counted_in_either_order_of_the_cache(monkeypatch):
  found = reductions("unfused", "rms")
  monkeypatch.setattr(packing, "WIDE", 1)
  assert reductions("unfused", "rms") == found


def test_the_centring_of_a_tapered_layer_norm_goes_with_folding_alone():
  found = {name: reductions(name, "layer") for name in bench.FORMS}
  assert found["folded"] == 2 * N
  assert found["unfused"] - found["folded"] == 2 * N + 1
  assert found["baseline"] > found["unfused"]


HLO = """HloModule m
%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %z = f32[] add(%x, %y)
}

%inner (p: f32[8]) -> f32[] {
  %p = f32[8]{0} parameter(0)
  %zero = f32[] constant(0)
  ROOT %r = f32[] reduce(%p, %zero), dimensions={0}, to_apply=%add
}

%body.1 (t: (f32[8], s32[])) -> (f32[8], s32[]) {
  %t = (f32[8]{0}, s32[]) parameter(0)
  %a = f32[8]{0} get-tuple-element(%t), index=0
  %f = f32[] fusion(%a), kind=kLoop, calls=%inner
  %d = f32[8]{0} dot(%a, %a), lhs_contracting_dims={0}
  ROOT %out = (f32[8]{0}, s32[]) tuple(%d, %f)
}

ENTRY %main (q: f32[8]) -> f32[] {
  %q = f32[8]{0} parameter(0)
  %w = (f32[8]{0}, s32[]) while(%q), condition=%cond, body=%body.1
  ROOT %e = f32[] fusion(%q), kind=kLoop, calls=%inner
}
"""


def test_kernels_and_reductions_are_those_of_the_loop():
  counts = {"kernels": 2, "compiled_reductions": 1}
  assert roofline.compiled_counts(HLO) == counts
  none = {"kernels": 0, "compiled_reductions": 0}
  assert roofline.compiled_counts("") == none


def test_bytes_of_a_step_are_the_weights_and_the_filled_cache():
  """By hand: 2 layers, G = 2, K = 4, and an embedding row of D = 8."""
  params, config, _, _ = forms()["folded"]
  packed = packing.pack(params, config)
  table = params["embed"]["embedding"]
  heads = config.num_kv_heads * config.head_dim
  weights = sum(
    4 * leaf.size for name, part in params.items() if name != "embed"
    for leaf in _leaves(part)
  )
  found = roofline.step_bytes(packed, config, batch=3, prompt=5, new=3)
  # Filled before the three steps: 5, 6, 7; and one slot is written.
  cache = 3 * 2 * N * heads * 4 * (6 + 1)
  assert found == weights + 3 * 4 * table.shape[1] + cache


def _leaves(tree):
  if not isinstance(tree, dict):
    return [tree]
  return [leaf for part in tree.values() for leaf in _leaves(part)]


def test_bandwidth_is_a_rate():
  assert roofline.read_bandwidth(2, repeats=1, size=2**20) > 0
  assert roofline.cores() >= 1


def test_random_weights_give_the_forms_like_logits():
  """At 9m; fresh weights with c of another size give millions, then NaN."""
  params, config, c = bench.random_model("9m")
  tokens_BL = np.random.default_rng(1).integers(0, config.vocab_size, (2, 60))
  want, *found = (
    np.asarray(model.Transformer(config).apply(
      {"params": params}, tokens_BL, gate=gate, c=c
    )[0])
    for params, config, gate, c in bench.make_forms(
      params, config, c, bench.FORMS
    ).values()
  )
  for logits_BLV in found:
    error = np.max(np.abs(logits_BLV - want)) / np.max(np.abs(want))
    assert error < 0.2


@pytest.fixture
def small(monkeypatch):
  """A shape and a saved model of two layers, and a short read test."""
  params, config, _, c = forms()["unfused"]
  config = config.replace(context_len=24)
  monkeypatch.setitem(bench.SHAPES, "1m", config)
  model = api.Model(params, config, c, gate=0.0)
  monkeypatch.setattr(api, "load", lambda *_: model)
  monkeypatch.setattr(roofline, "read_bandwidth", lambda cores: 1e9)


def test_a_tiny_bench_through_the_command_line(run, small, tmp_path):
  """Every figure that is promised is there, in the JSON and on disk."""
  out = tmp_path / "bench"
  found = run(
    "bench", "decode", "--shape", "1m", "--batch", "1,3", "--prompt", 8,
    "--new", 16, "--dtype", "float32", "--repeats", 6, "--json", "--out", out,
  )
  assert found == json.loads((out / "bench.json").read_text())
  assert sorted(p.name for p in out.iterdir()) == [
    "bench.json", "bench.png", "bench.svg"
  ]
  assert [row["batch"] for row in found["rows"]] == [1, 3]
  for row in found["rows"]:
    assert list(row["forms"]) == list(bench.FORMS)
    for form in row["forms"].values():
      time = form["ms_per_token"]
      assert 0 < time["q1"] <= time["median"] <= time["q3"]
      speed = row["batch"] * 1e3 / time["median"]
      assert form["tokens_per_s"] == pytest.approx(speed)
      share = form["bytes_per_step"] / found["read_bytes_per_s"]
      assert form["roofline"] == pytest.approx(share * 1e3 / time["median"])
      assert form["kernels"] > 10
    counts = [form["reductions"] for form in row["forms"].values()]
    assert counts[0] > counts[1] >= counts[2] > 0
    assert list(row["ratios"]) == [
      "baseline/unfused", "baseline/folded", "unfused/folded"
    ]
    for ratio in row["ratios"].values():
      assert ratio["low"] <= ratio["ratio"] <= ratio["high"]
  text = run(
    "bench", "decode", "a/run", "--batch", "1", "--prompt", "8,4", "--new", 16,
    "--dtype", "float32", "--forms", "folded", "--repeats", 1, "--out", out,
  )
  rows = json.loads((out / "bench.json").read_text())["rows"]
  assert [row["prompt"] for row in rows] == [4, 8]
  assert "GB/s" in text and re.search(r"\n\| +1 \| +8 \| float32", text)
  assert max(map(len, text.splitlines()[:-1])) <= 80  # the last names a folder


def test_int8_weights_are_timed_and_their_bytes_counted(run, small):
  """One byte for each weight of a matrix, and a scale for each output."""
  rows = run(
    "bench", "decode", "--shape", "1m", "--batch", "1", "--prompt", "4,8",
    "--new", 16, "--dtype", "float32,int8", "--forms", "folded", "--repeats",
    1, "--json",
  )["rows"]
  assert [row["dtype"] for row in rows] == ["float32"] * 2 + ["int8"] * 2
  moved = [row["forms"]["folded"]["bytes_per_step"] for row in rows]
  params, config, *_ = forms()["folded"]
  matrices = sum(
    x.size for path, x in jax.tree_util.tree_leaves_with_path(params)
    if path[-1].key == "kernel"
  )
  outputs = N * (4 * 4 + 8 + 2 * 20 + 8) + config.vocab_size
  for plain, eight in zip(moved[:2], moved[2:], strict=True):
    assert plain - eight == 3 * matrices - 4 * outputs


def test_a_tiny_bench_of_peers_through_the_command_line(
  run, small, tmp_path, monkeypatch
):
  """The same weights give the same ids, whoever decodes."""
  @contextlib.contextmanager
  def absent(*_):
    raise verify.Missing("torch is not installed")
    yield

  monkeypatch.setitem(peers._PEERS, "transformers-static", absent)
  out = tmp_path / "bench"
  names = ("jax", "transformers", "transformers-static")
  arguments = (
    "bench", "peers", "--shape", "1m", "--batch", "1,3", "--prompt", 8, "--new",
    12, "--peers", ",".join(names), "--repeats", 6, "--out", out,
  )
  found = run(*arguments, "--json")
  assert found == json.loads((out / "bench.json").read_text())
  assert [row["batch"] for row in found["rows"]] == [1, 3]
  for row in found["rows"]:
    assert list(row["programs"]) == ["baseline", "folded", *names[:2]]
    for program in row["programs"].values():
      assert program["ms"]["q1"] <= program["ms"]["median"]
      calls = 1e3 / program["ms"]["median"]
      speed = row["batch"] * row["new"] * calls
      assert program["tokens_per_s"] == pytest.approx(speed)
    for name in ("jax", "transformers"):
      assert row["programs"][name]["same_ids"] == 1
      ratio = row["ratios"][f"{name}/folded"]
      assert ratio["low"] <= ratio["ratio"] <= ratio["high"]
    assert row["missing"] == {"transformers-static": "torch is not installed"}
  text = run(*arguments)
  assert "- transformers-static: torch is not installed" in text
  assert max(map(len, text.splitlines()[:-4])) <= 80


def llama_cpp_row(batch=1, **changes):
  """A row of peers with llama.cpp alone, of a tiny model of 320 tokens."""
  sizes = {"vocab_size": 320, "context_len": 40, "tied": False}
  config = tiny.model_config(**sizes, **changes)
  forms = bench.make_forms(
    tiny.params(config), config, tiny.c(config), ["baseline"]
  )
  [row] = peers.run(
    forms, ["llama.cpp"], batches=[batch], prompt=9, new=20, repeats=1
  )
  return row


def test_llama_cpp_is_missed_in_one_line(monkeypatch):
  """Where it is not installed, and for a model that its file cannot hold."""
  monkeypatch.setitem(sys.modules, "llama_cpp", None)
  row = llama_cpp_row()
  assert row["missing"] == {"llama.cpp": "llama_cpp is not installed"}
  assert list(row["programs"]) == ["baseline"] and not row["ratios"]
  pytest.importorskip("gguf")
  there = types.SimpleNamespace(llama_backend_init=lambda: None)
  monkeypatch.setitem(sys.modules, "llama_cpp", there)
  row = llama_cpp_row(norm="layer")
  [(name, text)] = row["missing"].items()
  assert name == "llama.cpp" and text.startswith("norm='layer': GGUF of the ll")


@pytest.mark.parametrize("batch", [1, 3])
def test_llama_cpp_decodes_our_ids_row_by_row(batch, capfd):
  """Rows must not see each other, and the prompts are read anew each call."""
  pytest.importorskip("llama_cpp")
  capfd.readouterr()
  row = llama_cpp_row(batch, scan_layers=batch == 1)
  assert capfd.readouterr() == ("", "")  # --json has the output for itself
  assert row["missing"] == {}
  program = row["programs"]["llama.cpp"]
  assert program["version"].startswith("llama-cpp-python ")
  assert program["same_ids"] == 1
  assert row["ratios"]["llama.cpp/baseline"]["ratio"] > 0


def test_peers_are_compared_with_live_norms(fails):
  message = "--forms=folded lacks baseline"
  assert message in fails(
    "bench", "peers", "--shape", "1m", "--forms", "folded"
  )
  assert "--peers=x must be of jax, tra" in fails(
    "bench", "peers", "--shape", "1m", "--peers", "x"
  )


TRAIN = """
from tests import runs

def get_config(variant="all_aux"):
  from ml_collections import config_dict
  return config_dict.ConfigDict(runs.fields(variant=variant))
"""


def test_a_tiny_bench_of_training_through_the_command_line(run, tmp_path):
  """All phases run in their middle, with finite numbers."""
  (tmp_path / "tiny.py").write_text(TRAIN)
  out = tmp_path / "bench"
  found = run(
    "bench", "train", tmp_path / "tiny.py", "--repeats", 6, "--json", "--out",
    out, "--config.batch_size=3",
  )
  assert found == json.loads((out / "bench.json").read_text())
  assert (found["batch"], found["repeats"]) == (3, 6)
  assert list(found["forms"]) == ["baseline", "norm", "taper", "scale"]
  for form in found["forms"].values():
    time = form["ms_per_step"]
    assert 0 < time["q1"] <= time["median"] <= time["q3"]
    tokens = 3 * found["context_len"]
    assert form["tokens_per_s"] == pytest.approx(tokens * 1e3 / time["median"])
    assert form["compile_s"] > 0 and form["temporary_bytes"] > 0
  assert list(found["ratios"]) == [
    "norm/baseline", "taper/baseline", "scale/baseline"
  ]
  text = run(
    "bench", "train", tmp_path / "tiny.py", "--repeats", 1, "--forms", "scale",
  )
  assert "scale" in text and "norm" not in text
  assert max(map(len, text.splitlines())) <= 80


GPT2 = {
  "norm": "layer",
  "model__positions": "learned",
  "model__mlp": "gelu_tanh",
  "model__biases": ("q", "k", "v", "o", "up", "down"),
}


@pytest.mark.parametrize("changes", [{}, GPT2], ids=["llama", "gpt2"])
def test_torch_takes_the_same_steps(changes):
  """Weights, batch, loss, clipping, decay and rates are those of baseline."""
  pytest.importorskip("transformers")
  config = baseline_config(
    optimizer__clip_norm=0.1, optimizer__weight_decay=0.5, batch_size=4,
    **changes,
  )
  ours = train.Timer(config, "baseline")
  params = jax.device_get(ours.state.params)

  def losses(timer, steps):
    for _ in range(steps):
      timer.seconds()
      yield timer.loss

  want = [*losses(ours, 6)]
  assert want[0] == ours.first_loss
  assert want[0] - want[-1] > 0.01  # it learns
  for parts in (1, 2):  # of the batch
    changed = dataclasses.replace(config, micro_batches=parts)
    opened = torch_step.open_timer("torch", changed, params, ours.tokens_BL1)
    with opened as timer:
      got = [timer.first_loss, *losses(timer, 5)]
      assert timer.network.config._attn_implementation == "sdpa"
    np.testing.assert_allclose(got, want, atol=1e-5)


def baseline_config(**changes):
  fields = config_dict.ConfigDict(runs.fields(**changes))
  return train.make_forms(fields, ["baseline"], read)["baseline"]


def test_a_tiny_bench_of_torch_steps_through_the_command_line(
  run, tmp_path, monkeypatch
):
  """Both programs with the figures of ours; compiled only by name here."""
  torch = pytest.importorskip("torch")
  pytest.importorskip("transformers")
  compiled = []

  def compile(function, *, dynamic):
    compiled.append(function)
    return function

  monkeypatch.setattr(torch, "compile", compile)
  (tmp_path / "tiny.py").write_text(TRAIN)
  out = tmp_path / "bench"
  text = run(
    "bench", "train", tmp_path / "tiny.py", "--forms", "baseline", "--peers",
    "torch,torch-compile", "--repeats", 6, "--out", out,
  )
  assert "torch-compile: transformers" in text
  assert max(map(len, text.splitlines()[:-3])) <= 80
  found = json.loads((out / "bench.json").read_text())
  assert len(compiled) == 1 and found["missing"] == {}
  assert list(found["peers"]) == ["torch", "torch-compile"]
  base = found["forms"]["baseline"]
  for row in [base, *found["peers"].values()]:
    time = row["ms_per_step"]
    assert 0 < time["q1"] <= time["median"] <= time["q3"]
    tokens = found["batch"] * found["context_len"]
    steps = 1e3 / time["median"]
    assert row["tokens_per_s"] == pytest.approx(tokens * steps)
    flops = found["model_flops"] * steps
    assert row["model_flops_per_s"] == pytest.approx(flops)
    assert row["first_loss"] == pytest.approx(base["first_loss"], abs=1e-4)
  for row in found["peers"].values():
    assert row["first_step_s"] > 0 and "torch 2" in row["version"]
  assert list(found["ratios"]) == ["torch/baseline", "torch-compile/baseline"]


class NoTimer:
  """In place of `train.Timer`, where nothing shall be compiled."""

  compile_s = first_loss = 1.0
  tokens_BL1 = np.zeros((3, 25), np.int32)

  def __init__(self, config, form):
    params = tiny.params(config.model)
    self.state = types.SimpleNamespace(params=params)

  def seconds(self):
    return 1.0

  def temporary_bytes(self):
    return 1


@pytest.mark.parametrize(
  ("changes", "why"),
  [
    ({"model__remat": True}, "model.remat=True: torch has the plain step of "
     "one device; leave it at False"),
    ({"mesh__data": 3}, "mesh.data=3: torch has the plain step of one device; "
     "leave it at 1"),
    ({"model__biases": ("up",)}, "biases=['up']: a Llama layout holds those of "
     "q, k, v; or of q, k, v, o; of gate, up, down; or of both; choose another "
     "format"),
    ({}, "torch is not installed"),
  ],
)
def test_steps_that_torch_cannot_take_are_told_in_one_line(
  changes, why, monkeypatch
):
  """Without the package, or where a plain step is not the same work."""
  monkeypatch.setattr(train, "Timer", NoTimer)
  monkeypatch.setitem(sys.modules, "torch", None)
  forms = {"baseline": baseline_config(**changes)}
  found = train.run(forms, ["torch"], repeats=2)
  assert found["missing"] == {"torch": why}
  assert found["peers"] == {} == found["ratios"]


def test_torch_is_compared_with_the_baseline(fails, tmp_path):
  (tmp_path / "tiny.py").write_text(TRAIN)
  command = ("bench", "train", tmp_path / "tiny.py")
  assert "--forms=norm lacks baseline" in fails(
    *command, "--forms", "norm", "--peers", "torch"
  )
  assert "--peers=x must be of torch, torch-compile, each once" in fails(
    *command, "--peers", "x"
  )


def test_a_tiny_bench_of_the_start_through_the_command_line(run, tmp_path):
  """Every figure that is promised, each above 0."""
  (tmp_path / "tiny.py").write_text(TRAIN)
  script = runs.REPOSITORY / "train.py"
  out = tmp_path / "bench"
  arguments = ("--script", script, "--config.batch_size=3", "--repeats", 2)
  found = run(
    "bench", "start", tmp_path / "tiny.py", *arguments, "--json", "--out", out
  )
  assert found == json.loads((out / "bench.json").read_text())
  assert found["help_s"] > 0
  assert found["first_step_warm_s"] > 0 and found["first_step_cold_s"] > 0
  assert found["tokenize_bytes_per_s"] > 0 and found["train_bytes"] > 1000
  assert found["stall"] == pytest.approx(found["batch_ms"] / found["step_ms"])


def test_a_run_that_never_starts_is_told_in_one_line(fails, tmp_path):
  (tmp_path / "tiny.py").write_text(TRAIN)
  assert "--script=/nowhere/train.py is not there; run this" in fails(
    "bench", "start", tmp_path / "tiny.py", "--script", "/nowhere/train.py"
  )
  script = tmp_path / "train.py"
  script.write_text("print('no'); raise SystemExit(3)")
  with pytest.raises(UserError, match="ended before its first step: no$"):
    start._first_step_seconds([sys.executable, str(script)])


def test_all_measurements_go_into_one_file(tmp_path, monkeypatch, capsys):
  """What was printed, as Markdown; a section that fails says why."""
  monkeypatch.setattr(sheet, "_PROGRAM", (
    "import sys; print('| a | b |', '|---|---|', sep=chr(10)); "
    "print('wrote /somewhere'); print('no room', file=sys.stderr); "
    "sys.exit(2 * ('start' in sys.argv))"
  ))
  sections = sheet.commands(("1m",), "a b.py", ["--config.steps=3"], 5)
  codes = sheet.run(sections, tmp_path)
  assert list(codes) == [
    "decode-1m", "length-1m", "peers-1m", "train", "torch", "start"
  ]
  assert [code for code in codes.values() if code] == [codes["start"]] == [2]
  text = (tmp_path / "benchmarks.md").read_text()
  assert text.count("\n## ") == text.count("|---|---|") == 6
  assert "taperjax bench train 'a b.py' --repeats=5 --config.steps=3" in text
  assert text.count("Exit code") == 1 and "Exit code 2: no room" in text
  assert "somewhere" not in text and str(tmp_path) not in text
  assert "6/6 start" in capsys.readouterr().err


def test_the_commands_of_the_sheet_are_understood():
  parser = cli._parser()
  sections = sheet.commands(tuple(bench.SHAPES), "c.py", [], 20)
  for arguments in sections.values():
    parser.parse_args(["bench", *arguments])


def read(fields):
  return config_lib.parse(fields).with_vocab(257)


def test_the_baseline_has_no_sites_and_the_fields_stay_as_they_were():
  """Its norms do not taper, so none of them can be named."""
  sites = ("attn_norm",)
  fields = config_dict.ConfigDict(runs.fields(taper__sites=sites))
  forms = train.make_forms(fields, train.FORMS, read)
  assert forms["taper"].taper.sites == sites
  assert forms["baseline"].taper.sites is None
  assert (fields.variant, fields.taper.sites) == ("all_aux", sites)


def test_steps_are_timed_in_their_phase():
  """The gate of a timed taper step lies between, and c is not zero."""
  fields = config_dict.ConfigDict(runs.fields(variant="all_aux"))
  forms = train.make_forms(fields, train.FORMS, read)
  assert forms["baseline"].variant == "baseline"
  for name, (low, high) in {
    "norm": (1, 1), "taper": (0.01, 0.99), "scale": (0, 0)
  }.items():
    timer = train.Timer(forms[name], name)
    for _ in range(3):  # time goes on, the step does not
      timer.seconds()
      assert gate.phase(int(timer.state.step), forms[name].taper_steps) == name
      assert low <= float(timer.state.gate) <= high
    leaves = jax.tree.leaves(timer.state.params)
    assert all(np.all(np.isfinite(leaf)) for leaf in leaves)


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"variant": "baseline"}, "variant=baseline has no taper, and so no phase"),
    ({"variant": "fakeln"}, "variant=fakeln has no taper, and so no phases to"),
    ({"seeds": (0, 1)}, "make one step of several models; give one seed"),
  ],
)
def test_runs_without_phases_are_not_timed(changes, message):
  fields = config_dict.ConfigDict(runs.fields(**changes))
  with pytest.raises(UserError, match=re.escape(message)):
    train.make_forms(fields, train.FORMS, read)


MISTAKES = [
  (("--batch", "0"), "--batch=0 must be whole numbers from 1; for example"),
  (("--dtype", "float16"), "--dtype=float16 must be of float32, bfloat16, i"),
  (("--forms", "folded,folded"), "--forms=folded,folded must be of baseline,"),
  (("--repeats", "0"), "--repeats=0 must be 1 or more"),
  (("--shape", "2m"), "--shape=2m must be one of 1m, 3m, 9m, 30m, gpt2, lla"),
  (("--prompt", "0,8"), "--prompt=0,8 must be whole numbers from 1; for examp"),
  ((), "give a model or --shape, one of the two"),
  (
    ("--shape", "1m", "--prompt", "300"),
    "--prompt=300 and --new=256 exceed context_len=512 of the model; lower",
  ),
]


@pytest.mark.parametrize(("arguments", "message"), MISTAKES)
def test_mistakes_are_one_line(fails, arguments, message):
  assert message in fails("bench", "decode", *arguments)


def test_forms_that_a_model_does_not_have_are_refused():
  params, config, _, _ = forms()["folded"]
  with pytest.raises(UserError, match="needs the norms, .* folded already"):
    bench.make_forms(params, config, None, ["baseline"])
  with pytest.raises(UserError, match="nothing is tapered"):
    plain = config.replace(internal_norm="norm", final_norm="norm")
    bench.make_forms(params, plain, np.ones(2 * N + 1), ["folded"])
  with pytest.raises(UserError, match="internal_norm=fake: .* bench a finis"):
    bench.make_forms(params, config.replace(internal_norm="fake"), None, [])
