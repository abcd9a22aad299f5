"""Exports: verified in the target's reader, whole or not there."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest

from taperjax import cli, saved
from taperjax.data import tokenizer as tokenizer_lib
from taperjax.errors import UserError
from taperjax.interop import exporting, verify
from tests import runs, tiny

SHAPES = {
  "rms": {"num_kv_heads": 1},
  "layer": {
    "norm": "layer",
    "positions": "learned",
    "mlp": "gelu_tanh",
    "biases": ("q", "k", "v", "o", "up", "down"),
  },
}
MODES = {
  "baseline": ("norm", "norm"),
  "internal": ("taper", "norm"),
  "final": ("norm", "taper"),
  "all": ("taper", "taper"),
}


def make(norm="rms", mode="all", seed=0, **changes):
  """A small model at gate 0 that reads bytes; 96 positions."""
  internal, final = MODES[mode]
  config = tiny.model_config(
    **{
      **SHAPES[norm],
      "internal_norm": internal,
      "final_norm": final,
      "vocab_size": 257,
      "context_len": 96,
      **changes,
    }
  )
  return saved.Model(
    params=tiny.params(config, seed),
    config=config,
    c=tiny.c(config),
    gate=0.0 if config.tapered_sites else 1.0,
    tokenizer=tokenizer_lib.ByteTokenizer(),
    step=10,
    meta={"commit": "abc"},
  )


def rows(count=8, length=48):
  text = (" one day a small dog went to the red tree and sat." * 20).encode()
  return np.frombuffer(text[: count * length], np.uint8).reshape(
    count, length
  ).astype(np.int32)


def export(model, to, out, **options):
  return exporting.export(
    model, to, out, tokens_BL=rows(), text="a story", **options
  )


def readers(to):
  """Skips where the reader of a format is not there."""
  packages = {
    "hf": ("transformers",),
    "stablehlo": ("flatbuffers",),
    "gguf": ("gguf",),
    "transformer-lens": ("transformer_lens",),
    "safetensors": (),
  }
  for package in packages[to]:
    pytest.importorskip(package)


CASES = [
  *[("hf", norm, mode) for norm in SHAPES for mode in MODES if mode != "final"],
  *[("stablehlo", "rms", mode) for mode in ("baseline", "final", "all")],
  *[("safetensors", "layer", mode) for mode in MODES],
  *[("gguf", "rms", mode) for mode in ("baseline", "internal", "all")],
  *[("transformer-lens", "rms", mode) for mode in ("internal", "all")],
]


@pytest.mark.parametrize("to, norm, mode", CASES)
def test_an_export_gives_our_logits_in_its_own_reader(to, norm, mode, tmp_path):
  """Within the bounds of the issue, float32 and bfloat16, 384 positions."""
  readers(to)
  biases = {"biases": ("q", "k", "v")} if to == "hf" and norm == "rms" else {}
  report = export(make(norm, mode, **biases), to, tmp_path / "out")
  assert json.loads((tmp_path / "out" / exporting.REPORT).read_text()) == report
  assert report["positions"] == 384
  bound = 1e-3 if (to, norm, mode) == ("hf", "layer", "internal") else 1e-4
  exact, kept = report["float32"], report["stored"]
  assert exact["max_abs_delta_logit"] <= bound * max(1.0, exact["logit_std"])
  assert 0.2 < exact["logit_std"] < 20
  assert exact["top1"] > 0.99
  assert kept["dtype"] == "bfloat16"
  # Rounding must show, or the float32 file was compared twice.
  assert kept["max_abs_delta_logit"] > 10 * exact["max_abs_delta_logit"]
  assert len(report["residuals"]["largest_by_layer"]) == tiny.N
  assert report["residuals"]["float16_margin"] > 0
  if to == "hf":
    assert report["greedy"]["same_ids"]
    assert report["tokenizer"]["same_ids"]
  assert sorted(p.name for p in tmp_path.iterdir()) == ["out"]
  page = (tmp_path / "out" / "README.md").read_text()
  assert f"{exact['max_abs_delta_logit']:.2g}" in page
  # What it says of the norms is true: folded, held fixed, or as trained.
  stock = to == "gguf" or to == "hf"
  folded = mode == "internal" or mode != "baseline" and not stock
  assert ("are folded" in page) == folded
  assert ("eps is 2^40" in page) == (stock and mode == "all")
  assert ("Method: gated" in page) == (mode != "baseline")


@pytest.mark.parametrize("norm", SHAPES)
def test_remote_code_gives_our_logits(norm, tmp_path):
  pytest.importorskip("transformers")
  for mode in ("internal", "final", "all"):
    report = export(
      make(norm, mode), "hf", tmp_path / mode, remote_code=True
    )
    assert report["greedy"]["same_ids"]
    assert report["form"] == "folded"


def test_an_export_above_its_bound_fails_and_leaves_nothing(
  tmp_path, monkeypatch
):
  monkeypatch.setattr(verify, "BOUND", 0.0)
  with pytest.raises(UserError, match="max_abs_delta_logit=.* above its bound"):
    export(make(), "stablehlo", tmp_path / "out")
  assert not list(tmp_path.iterdir())


def test_a_failed_export_leaves_the_earlier_one(tmp_path, monkeypatch):
  first = export(make(), "safetensors", tmp_path / "out", dtype="float32")
  monkeypatch.setattr(verify, "BOUND", -1.0)
  with pytest.raises(UserError, match="above its bound"):
    export(make(seed=1), "safetensors", tmp_path / "out")
  kept = json.loads((tmp_path / "out" / exporting.REPORT).read_text())
  assert kept == first
  assert sorted(p.name for p in tmp_path.iterdir()) == ["out"]


def test_an_export_takes_nothing_away_that_is_not_its_own(tmp_path):
  out = tmp_path / "out"
  first = export(make(), "safetensors", out, dtype="float32")
  assert {*first["files"], exporting.REPORT} == {p.name for p in out.iterdir()}
  (out / "mine.txt").write_text("mine")
  with pytest.raises(UserError, match="'mine.txt', which that export did not"):
    export(make(), "safetensors", out, dtype="float32")
  assert (out / "mine.txt").read_text() == "mine"


def test_an_export_never_lies_among_the_files_of_a_run(tmp_path):
  """There it would be taken for a later step, and hide the model."""
  (tmp_path / "run").mkdir()
  (tmp_path / "run" / "import.json").write_text("{}")
  (tmp_path / "bare" / "3").mkdir(parents=True)
  (tmp_path / "bare" / "3" / "_CHECKPOINT_METADATA").touch()
  for inside in ("run/checkpoints/7", "run/tokenizer", "bare/7", "bare/3/x"):
    with pytest.raises(UserError, match="lies among the files of the model in"):
      export(make(), "safetensors", tmp_path / inside)
  assert not (tmp_path / "run" / "checkpoints").exists()
  export(make(), "safetensors", tmp_path / "run" / "export" / "7")


def test_an_interrupted_export_leaves_the_earlier_one_alone(
  tmp_path, monkeypatch
):
  """Ctrl-C, also between the two renames; and no parent folder stays."""
  def interrupt(*_):
    raise KeyboardInterrupt

  with monkeypatch.context() as patch:
    patch.setattr(exporting, "_residuals", interrupt)
    with pytest.raises(KeyboardInterrupt):
      export(make(), "safetensors", tmp_path / "run" / "export" / "a")
  assert not list(tmp_path.iterdir())
  first = export(make(), "safetensors", tmp_path / "out")
  rename = pathlib.Path.rename

  def once(path, target):
    if target == tmp_path / "out" and ".part-old-" not in path.name:
      raise KeyboardInterrupt
    return rename(path, target)

  with monkeypatch.context() as patch:
    patch.setattr(pathlib.Path, "rename", once)
    with pytest.raises(KeyboardInterrupt):
      export(make(seed=1), "safetensors", tmp_path / "out")
  kept = json.loads((tmp_path / "out" / exporting.REPORT).read_text())
  assert kept == first
  assert sorted(p.name for p in tmp_path.iterdir()) == ["out"]


@pytest.mark.parametrize("error", [RuntimeError, OSError, ImportError])
def test_a_failing_reader_is_told_in_one_line(error, tmp_path, monkeypatch):
  """Whatever another program raises; nothing is left behind."""
  def fail(*_):
    raise error("size\nmismatch")

  monkeypatch.setattr(verify, "safetensors_logits", fail)
  with pytest.raises(UserError) as told:
    export(make(), "safetensors", tmp_path / "out")
  assert f"read back ({error.__name__}: size mismatch)" in str(told.value)
  assert not list(tmp_path.iterdir())


def test_a_stored_dtype_that_breaks_the_model_fails(tmp_path, monkeypatch):
  monkeypatch.setattr(verify, "STORED_KL_BOUND", 0.0)
  with pytest.raises(UserError, match=r"kl=.* in bfloat16, .* above its bound"):
    export(make(), "safetensors", tmp_path / "out")
  assert not list(tmp_path.iterdir())


def test_a_missing_reader_is_said_and_no_figure_is_made_up(
  tmp_path, monkeypatch
):
  monkeypatch.setitem(sys.modules, "flatbuffers", None)
  monkeypatch.setattr(exporting.stablehlo, "write", lambda *a, **k: None)
  report = export(make(), "stablehlo", tmp_path / "out")
  assert report["float32"] == {
    "reader": None, "reason": "flatbuffers is not installed"
  }
  assert "not compared" in (tmp_path / "out" / "README.md").read_text()


@pytest.mark.parametrize(
  "change, options, message",
  [
    ({"gate": 0.4}, {}, "gate=0.4 at step 10: an export holds the model at"),
    ({}, {"to": "hf", "dtype": "float16"}, "dtype=float16: the gains c gamma"),
  ],
)
def test_refusals_are_one_line_and_leave_nothing(
  change, options, message, tmp_path
):
  with pytest.raises(UserError, match=message):
    export(
      make().replace(**change), out=tmp_path / "out",
      **{"to": "safetensors", **options},
    )
  assert not list(tmp_path.iterdir())


def test_stock_formats_refuse_a_final_taper_alone_and_a_folded_model(tmp_path):
  from taperjax import folding

  with pytest.raises(UserError, match="one eps for all norms"):
    export(make(mode="final"), "hf", tmp_path / "out")
  model = make()
  params, config = folding.fold(model.params, model.c, model.config)
  folded = model.replace(params=params, config=config)
  with pytest.raises(UserError, match="export the unfolded checkpoint"):
    export(folded, "hf", tmp_path / "out")
  assert export(folded, "safetensors", tmp_path / "out")["form"] == "folded"


def test_a_folder_that_is_no_export_is_left_alone(tmp_path):
  (tmp_path / "out").mkdir()
  (tmp_path / "out" / "thesis.txt").write_text("mine")
  with pytest.raises(UserError, match="'thesis.txt' and no verification.json"):
    export(make(), "safetensors", tmp_path / "out")
  assert (tmp_path / "out" / "thesis.txt").read_text() == "mine"


def test_too_short_a_text_is_refused(tmp_path):
  with pytest.raises(UserError, match="gives 288 positions, but"):
    exporting.export(
      make(), "safetensors", tmp_path / "out", tokens_BL=rows(6), text="a.txt"
    )


def test_transformers_loads_an_export_without_taperjax(tmp_path):
  """In a new process that cannot import it, tokenizer included."""
  pytest.importorskip("transformers")
  export(make(), "hf", tmp_path / "out")
  code = (
    "import sys\n"
    "sys.modules['taperjax'] = None\n"
    "from transformers import AutoModelForCausalLM, AutoTokenizer\n"
    "folder = sys.argv[1]\n"
    "model = AutoModelForCausalLM.from_pretrained(folder, dtype='auto')\n"
    "tokenizer = AutoTokenizer.from_pretrained(folder)\n"
    "ids = tokenizer('Once upon', return_tensors='pt')\n"
    "print(type(model).__name__, model.dtype, ids['input_ids'].tolist())\n"
    "print(model.generate(**ids, max_new_tokens=5).shape)\n"
  )
  done = subprocess.run(
    [sys.executable, "-c", code, str(tmp_path / "out")],
    capture_output=True, text=True,
    env={**os.environ, "HF_HUB_OFFLINE": "1"},
  )
  assert done.returncode == 0, done.stderr
  assert "LlamaForCausalLM torch.bfloat16 [[79, 110, 99" in done.stdout


def test_an_untouched_import_is_held_against_its_source(tmp_path):
  """The NumPy pass knows the file's own layout, so no mistake can hide."""
  from taperjax import interop

  data = os.environ.get("TAPERJAX_TEST_DATA")
  if not data:
    pytest.skip("TAPERJAX_TEST_DATA is not set: no stories260K")
  model = interop.read(pathlib.Path(data) / "stories260K")
  text = (pathlib.Path(data) / "tinystories" / "valid.txt").read_text()
  ids = np.asarray(model.tokenizer.encode(text[:4000])[:600], np.int32)
  report = exporting.export(
    model, "safetensors", tmp_path / "out",
    tokens_BL=ids.reshape(5, 120), text="stories",
  )
  assert report["source"]["reader"] == "a forward pass in NumPy"
  assert report["source"]["max_abs_delta_logit"] < 1e-4 * max(
    1, report["source"]["logit_std"]
  )
  # Rows of q of one layer in another order: what a wrong permutation does.
  broken = {**model.params, "block_2": {**model.params["block_2"]}}
  attn = {**broken["block_2"]["attn"]}
  attn["q"] = {"kernel": np.asarray(attn["q"]["kernel"])[:, :, ::-1]}
  broken["block_2"]["attn"] = attn
  with pytest.raises(UserError, match="between the imported model and its"):
    exporting.export(
      model.replace(params=broken), "safetensors", tmp_path / "other",
      tokens_BL=ids.reshape(5, 120), text="stories",
    )


def source_report(folder, norm="rms", change=None, read=None, **options):
  """What an export tells of an imported Hugging Face folder of a tiny model.

  `change` makes other tensors of them, `options` of its config.json.
  """
  from taperjax import interop
  from taperjax.interop import gpt2, hf_files, llama

  model = make(norm, "baseline")
  layout = llama if norm == "rms" else gpt2
  tensors, hf_config = layout.to_hf(model.params, model.config)
  tensors = change(tensors) if change else tensors
  hf_files.write_folder(folder, tensors, hf_config | options, "float32")
  found = interop.read(folder, **(read or {}))
  want_BLV = verify.our_logits(found.params, found.c, found.config, rows())
  return exporting._compare_source(found, want_BLV, rows())


@pytest.mark.parametrize(
  "norm, options",
  [("rms", {}), ("layer", {}), ("layer", {"layer_norm_epsilon": 2.0**40})],
)
def test_imported_folders_are_held_against_transformers(
  norm, options, tmp_path
):
  """The last one is a model without norms, which we read as a tapered one."""
  pytest.importorskip("transformers")
  change = None
  if options:
    change = lambda tensors: {
      name: x * np.float32(2**20) if ".ln_" in name and "weight" in name else x
      for name, x in tensors.items()
    }
  found = source_report(tmp_path, norm, change, **options)
  assert found["reader"].startswith("transformers")
  assert 0 < found["max_abs_delta_logit"] < 1e-4 * max(1, found["logit_std"])


@pytest.mark.parametrize(
  "norm, change, read, reason",
  [
    (
      "rms", None, {"gain_offset": 1.0},
      "transformers does not add gain_offset=1",
    ),
    (
      "layer", lambda t: {f"_orig_mod.{name}": x for name, x in t.items()}, {},
      "transformers does not know these names or shapes",
    ),
    (
      "layer",
      lambda t: {
        name: np.ascontiguousarray(x.T) if ".c_" in name else x
        for name, x in t.items()
      },
      {},
      "transformers does not know these names or shapes",
    ),
  ],
)
def test_sources_that_transformers_reads_otherwise_are_not_compared(
  norm, change, read, reason, tmp_path
):
  """We understand them on purpose, so this is no error of the import."""
  pytest.importorskip("transformers")
  found = source_report(tmp_path, norm, change, read)
  assert found == {"reader": None, "reason": reason}


def test_a_lost_source_is_said_without_its_path():
  """The reason stands in the exported page, which others read."""
  model = make("rms", "baseline")
  source = {"path": "/home/me/model", "format": "gguf"}
  found = exporting._compare_source(
    model.replace(step=0, meta={"source": source}), None, None
  )
  assert found["reason"] == "the source is no longer where it was"


def test_compare_is_right_on_a_case_done_by_hand():
  want = np.log(np.float32([[[0.5, 0.25, 0.25], [0.1, 0.1, 0.8]]]))
  got = np.log(np.float32([[[0.25, 0.5, 0.25], [0.1, 0.1, 0.8]]]))
  found = verify.compare(want, got)
  assert found["max_abs_delta_logit"] == pytest.approx(np.log(2), rel=1e-6)
  assert found["mean_abs_delta_logit"] == pytest.approx(np.log(2) / 3, rel=1e-6)
  assert found["kl"] == pytest.approx(0.25 * np.log(2) / 2, rel=1e-5)
  assert found["top1"] == 0.5
  assert np.isnan(verify.compare(want, got * np.nan)["max_abs_delta_logit"])


@pytest.fixture(scope="module")
def root(tmp_path_factory):
  return runs.shared_root(tmp_path_factory)


def command(*arguments):
  """(exit code, output, errors) of the command line."""
  def run():
    try:
      cli.main([str(a) for a in arguments])
    except SystemExit as error:
      return error.code
    return 0

  return runs.quiet(run)


def test_the_command_exports_a_run_and_makes_the_matrix(root, tmp_path):
  pytest.importorskip("transformers")
  run = runs.tapered(root)
  code, out, err = command(
    "export", run, "--to", "safetensors", "--out", tmp_path / "bare", "--json"
  )
  assert code == 0, err
  report = json.loads(out)
  assert report["positions"] >= 300
  assert report["text"] == "the run's validation text"
  told = tmp_path / "story.txt"
  told.write_text("Once upon a time, there was a dog. " * 40)
  code, out, err = command(
    "export", run, "--to", "safetensors", "--data", told, "--json",
    "--out", tmp_path / "bare",
  )
  assert code == 0, err
  for path in (tmp_path / "bare").iterdir():  # nothing of this machine
    assert str(tmp_path).encode() not in path.read_bytes()
    assert str(run).encode() not in path.read_bytes()
  code, out, err = command(
    "export", run / "checkpoints" / "..", runs.baseline(root), "--matrix",
    "--out", tmp_path / "all",
  )
  assert code == 0, err
  assert "| tapered | hf | huge_eps | transformers" in out
  assert "| baseline | hf | plain | transformers" in out
  found = json.loads((tmp_path / "all" / "matrix.json").read_text())
  assert len(found) == 2 * len(exporting.COLUMNS)
  assert (tmp_path / "all" / "tapered" / "stablehlo" / "runner.py").exists()


def test_a_matrix_of_refusals_is_written_too(root, tmp_path):
  (tmp_path / "a.txt").write_text("Once upon a time.")
  code, out, err = command(
    "export", runs.baseline(root), "--matrix", "--data", tmp_path / "a.txt",
    "--out", tmp_path / "all",
  )
  assert code == 0, err
  assert "refused (1)" in out and "but a comparison needs 300" in out
  assert [p.name for p in (tmp_path / "all").iterdir()] == ["matrix.json"]


@pytest.mark.parametrize(
  "arguments, message",
  [
    ([], "give either --to FORMAT"),
    (["--to", "hf", "--matrix"], "give either --to FORMAT"),
    (["--to", "gguf", "--remote-code"], "--remote-code is of --to hf alone"),
    (["--to", "hf", "--weights", "constants"], "--weights=constants is of"),
    (["other", "--to", "hf"], "several models need --matrix"),
    (["a/nowhere", "--matrix"], "do not end in different names, which their"),
    (["--to", "onnx"], "invalid choice: 'onnx'"),
  ],
)
def test_mistakes_in_export_are_one_line(arguments, message):
  code, out, err = command("export", "nowhere", *arguments)
  assert code == 2
  assert message in err
  assert err.count("\n") == 1
  assert not out


def test_generate_that_parts_from_ours_fails_unless_it_is_a_tie(
  tmp_path, monkeypatch
):
  """Rounding may choose between two equal logits, never between others."""
  pytest.importorskip("transformers")
  greedy = verify.hf_greedy

  def other(*arguments):
    first, *rest = greedy(*arguments)
    return [[*first[:3], (first[3] + 1) % 257, *first[4:]], *rest]

  monkeypatch.setattr(verify, "hf_greedy", other)
  with pytest.raises(exporting.Failed, match="continues a prompt otherwise"):
    export(make(), "hf", tmp_path / "out", dtype="float32")
  assert not list(tmp_path.iterdir())
  monkeypatch.setattr(exporting, "_gap", lambda *a: (1e-6, 2e-4))
  report = export(make(), "hf", tmp_path / "out", dtype="float32")
  assert report["greedy"]["same_ids"] is False
  assert report["greedy"]["largest_tie"] == 1e-6


def test_the_matrix_tells_a_failure_from_a_refusal(
  root, tmp_path, monkeypatch
):
  monkeypatch.setattr(
    exporting, "COLUMNS",
    (("safetensors", "safetensors", False),
     ("transformer-lens", "transformer-lens", False)),
  )
  monkeypatch.setattr(verify, "BOUND", -1.0)
  run = runs.baseline(root)
  code, out, err = command("export", run, "--matrix", "--out", tmp_path)
  assert code == 2
  assert "| baseline | safetensors | failed (1) |" in out
  assert "| baseline | transformer-lens | refused (2) |" in out
  assert "1 of 2 exports failed their checks" in err
