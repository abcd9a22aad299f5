"""Exports: verified in the target's reader, whole or not there."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import pathlib
import signal
import subprocess
import sys

import jax
import numpy as np
import pytest

from taperjax import cli, saved
from taperjax.data import files, tokenizer as tokenizer_lib
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


def reference(model, tokens_BL=None):
  tokens_BL = rows() if tokens_BL is None else tokens_BL
  return exporting.Reference(model, tokens_BL, "a story")


def export(model, to, out, **options):
  return exporting.export(reference(model), to, out, **options)


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


@pytest.fixture(scope="module", autouse=True)
def _programs_made_quickly():
  """Each runs for a moment only; see `runs.train`."""
  before = jax.config.read("jax_disable_most_optimizations")
  jax.config.update("jax_disable_most_optimizations", True)
  yield
  jax.config.update("jax_disable_most_optimizations", before)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
  """made(to, norm, mode, remote_code) -> (folder, report), made once."""
  base = tmp_path_factory.mktemp("exports")

  @functools.cache
  def once(to, norm, mode, remote_code=False):
    readers(to)
    biases = {"biases": ("q", "k", "v")} if to == "hf" and norm == "rms" else {}
    label = f"{to}-{remote_code}-{norm}-{mode}"
    model = make(norm, mode, **biases)
    report = export(model, to, base / label / "out", remote_code=remote_code)
    return base / label / "out", report

  return once


CASES = [
  *[("hf", norm, mode) for norm in SHAPES for mode in MODES if mode != "final"],
  *[("stablehlo", "rms", mode) for mode in ("baseline", "final", "all")],
  *[("safetensors", "layer", mode) for mode in MODES],
  *[("gguf", "rms", mode) for mode in ("baseline", "internal", "all")],
  *[("transformer-lens", "rms", mode) for mode in ("internal", "all")],
]


@pytest.mark.parametrize("to, norm, mode", CASES)
def test_an_export_gives_our_logits_in_its_own_reader(to, norm, mode, made):
  """Within the bounds of the issue, float32 and bfloat16, 384 positions."""
  out, report = made(to, norm, mode)
  assert json.loads((out / exporting.REPORT).read_text()) == report
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
  assert sorted(p.name for p in out.parent.iterdir()) == ["out"]
  page = (out / "README.md").read_text()
  assert f"{exact['max_abs_delta_logit']:.2g}" in page
  # What it says of the norms is true: folded, held fixed, or as trained.
  stock = to == "gguf" or to == "hf"
  folded = mode == "internal" or mode != "baseline" and not stock
  assert ("are folded" in page) == folded
  assert ("eps is 2^40" in page) == (stock and mode == "all")
  assert ("Method: gated" in page) == (mode != "baseline")


@pytest.mark.parametrize("norm", SHAPES)
def test_remote_code_gives_our_logits(norm, made):
  for mode in ("internal", "final", "all"):
    _, report = made("hf", norm, mode, True)
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


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_that_an_import_swallows_is_not_lost(
  number, root, tmp_path, monkeypatch, ctrl_c
):
  """Python drops what a handler raises while importlib clears its locks."""
  read = verify.safetensors_logits

  def swallow(*arguments):
    with contextlib.suppress(KeyboardInterrupt, SystemExit):
      signal.raise_signal(number)
      raise AssertionError("not stopped")
    return read(*arguments)

  monkeypatch.setattr(verify, "safetensors_logits", swallow)
  run = runs.baseline(root)
  code, *_ = command(
    "export", run, "--to", "safetensors", "--out", tmp_path / "out"
  )
  assert code == 128 + number
  assert not list(tmp_path.iterdir())


def test_what_a_killed_export_left_goes_the_next_time(tmp_path):
  """But not what another process is writing, nor what is not ours."""
  with subprocess.Popen([sys.executable, "-c", ""]) as dead:
    dead.wait()
  here, other = files.machine(), "abcdef"
  killed = f"{here}-{dead.pid}-0123abcd"
  names = [
    f"out.part-{killed}", f"out.part-{killed}-float32", f"out.part-old-{killed}"
  ]
  kept = [
    f"out.part-{here}-{os.getpid()}-0123abcd", f"a-out.part-{killed}",
    f"out.part-{other}-{dead.pid}-0123abcd", "out.part-2",
    f"out.part-{here}-{dead.pid}-notes",
  ]
  for name in names + kept:
    (tmp_path / name).mkdir()
    (tmp_path / name / "file").write_text(name)
  with (
    pytest.raises(KeyboardInterrupt),
    files.whole_folder(tmp_path / "out", "the export"),
  ):
    raise KeyboardInterrupt
  # That one was killed between the two renames: the earlier folder is back.
  assert (tmp_path / "out" / "file").read_text() == names[2]
  with files.whole_folder(tmp_path / "out", "the export") as part:
    part.mkdir()
    (part / "new").touch()
  assert [p.name for p in (tmp_path / "out").iterdir()] == ["new"]
  assert sorted(p.name for p in tmp_path.iterdir()) == sorted([*kept, "out"])


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
  short = reference(make(), rows(6))
  with pytest.raises(UserError, match="gives 288 positions, but"):
    exporting.export(short, "safetensors", tmp_path / "out")


def test_exports_load_where_taperjax_cannot_be_imported(made, tmp_path):
  """A new process, with the code of each page; tokenizer included."""
  stock, _ = made("hf", "rms", "all")
  own, _ = made("hf", "rms", "all", True)
  lens, _ = made("transformer-lens", "rms", "all")
  code = """
import sys
for name in ("taperjax", "jax", "flax"):
  sys.modules[name] = None
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

stock, own, lens = sys.argv[1:]
for folder in (stock, own):
  options = {"trust_remote_code": folder == own}
  model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", **options)
  tokenizer = AutoTokenizer.from_pretrained(folder, **options)
  ids = tokenizer("Once upon", return_tensors="pt")
  new = model.generate(**ids, max_new_tokens=5)
  print(type(model).__name__, model.dtype, ids["input_ids"].tolist(), new.shape)
sys.path.append(lens)
from load_taperjax import load
print(type(load(lens)).__name__, load(lens)(ids["input_ids"]).shape)
"""
  done = subprocess.run(
    [sys.executable, "-c", code, stock, own, lens],
    capture_output=True, text=True,
    env={
      **os.environ, "HF_HUB_OFFLINE": "1", "HF_MODULES_CACHE": str(tmp_path)
    },
  )
  assert done.returncode == 0, done.stderr
  ids = str(list(b"Once upon"))
  size = f"torch.Size([1, {len(b'Once upon') + 5}])"
  assert done.stdout.splitlines() == [
    f"Qwen2ForCausalLM torch.bfloat16 [{ids}] {size}",
    f"TaperjaxForCausalLM torch.bfloat16 [{ids}] {size}",
    "TransformerBridge torch.Size([1, 9, 257])",
  ]


def test_an_untouched_import_is_held_against_its_source(tmp_path):
  """The NumPy pass knows the file's own layout, so no mistake can hide."""
  from taperjax import interop

  data = os.environ.get("TAPERJAX_TEST_DATA")
  if not data:
    pytest.skip("TAPERJAX_TEST_DATA is not set: no stories260K")
  model = interop.read(pathlib.Path(data) / "stories260K")
  text = (pathlib.Path(data) / "tinystories" / "valid.txt").read_text()
  ids = np.asarray(model.tokenizer.encode(text[:4000])[:600], np.int32)
  ids_BL = ids.reshape(5, 120)
  report = exporting.export(
    reference(model, ids_BL), "safetensors", tmp_path / "out"
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
  broken = reference(model.replace(params=broken), ids_BL)
  with pytest.raises(UserError, match="between the imported model and its"):
    exporting.export(broken, "safetensors", tmp_path / "other")


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
  return reference(found).source


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
  found = reference(model.replace(step=0, meta={"source": source})).source
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


def test_a_matrix_has_every_format():
  assert {to for _, to, _ in exporting.COLUMNS} == set(cli._EXPORTS)
  assert ("hf --remote-code", "hf", True) in exporting.COLUMNS


def test_the_command_exports_a_run_and_makes_the_matrix(
  root, tmp_path, monkeypatch
):
  pytest.importorskip("transformers")
  columns = [c for c in exporting.COLUMNS if c[0] in ("hf", "safetensors")]
  columns.append(("transformer-lens", "transformer-lens", False))
  monkeypatch.setattr(exporting, "COLUMNS", columns)
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
  passes, ours = [], verify.our_logits  # kept, so that no id comes twice
  monkeypatch.setattr(
    verify, "our_logits", lambda *a: passes.append(a[0]) or ours(*a)
  )
  code, out, err = command(
    "export", run / "checkpoints" / "..", runs.baseline(root), "--matrix",
    "--out", tmp_path / "all",
  )
  assert code == 0, err
  assert "| tapered | hf | huge_eps | transformers" in out
  assert "| baseline | hf | plain | transformers" in out
  found = json.loads((tmp_path / "all" / "matrix.json").read_text())
  assert [(row["model"], row["format"]) for row in found] == [
    (model, label) for model in ("tapered", "baseline")
    for label, *_ in columns
  ]
  assert (tmp_path / "all" / "tapered" / "hf" / exporting.REPORT).exists()
  # No model runs for every format again.
  assert len({id(params) for params in passes}) == len(passes) >= 2


def test_a_matrix_that_stops_keeps_what_it_has(root, tmp_path, monkeypatch):
  """And the next one does not write over it."""
  columns = ("safetensors", "safetensors", False), ("hf", "hf", False)
  monkeypatch.setattr(exporting, "COLUMNS", columns)
  written = exporting._write

  def once(folder, form, model, to, *options):
    if to == "hf":
      raise KeyboardInterrupt
    written(folder, form, model, to, *options)

  monkeypatch.setattr(exporting, "_write", once)
  arguments = "export", runs.baseline(root), "--matrix", "--out", tmp_path / "m"
  assert command(*arguments)[0] == 130
  [row] = json.loads((tmp_path / "m" / "matrix.json").read_text())
  assert (row["model"], row["format"]) == ("baseline", "safetensors")
  assert sorted(p.name for p in (tmp_path / "m").iterdir()) == [
    "baseline", "matrix.json"
  ]
  assert [p.name for p in (tmp_path / "m" / "baseline").iterdir()] == [
    "safetensors"
  ]
  code, _, err = command(*arguments)
  assert code == 2 and "holds 'baseline' already, and a matrix has a" in err


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
