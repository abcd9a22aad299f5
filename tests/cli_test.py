"""The `taperjax` command: what scripts read, what people see, what is refused.

Commands run in this process, with runs that other tests share.
"""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

import taperjax
from taperjax import api, checkpoint, cli, decode
from taperjax.data import text
from taperjax.errors import UserError
from tests import runs

DOCUMENTS = ["Once a cat sat.\nThe end.", "A dog! \u00e9", "x" * 40]


@pytest.fixture(scope="module")
def root(tmp_path_factory):
  return runs.shared_root(tmp_path_factory)


@pytest.fixture(scope="module")
def tapered(root):
  return runs.tapered(root)


@pytest.fixture(scope="module")
def baseline(root):
  return runs.baseline(root)


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
  """The same documents in the three formats."""
  folder = tmp_path_factory.mktemp("texts")
  (folder / "a.txt").write_text(f"\n{text.SEPARATOR}\n".join(DOCUMENTS))
  lines = [json.dumps({"text": document}) for document in DOCUMENTS]
  (folder / "a.jsonl").write_text("\n".join(lines))
  table = pyarrow.table({"text": DOCUMENTS})
  pyarrow.parquet.write_table(table, folder / "a.parquet")
  return [folder / f"a.{kind}" for kind in ("txt", "jsonl", "parquet")]


def test_eval_scores_the_validation_text_of_the_run(run, tapered):
  """The same seven windows unless told, so that the two losses agree."""
  found = run("eval", tapered, "--json")
  [seven] = found["results"]
  assert seven["data"] == "validation"
  assert (found["step"], found["gate"]) == (runs.STEPS, 0.0)
  every = run("eval", tapered, "--json", "--max-windows", 999)["results"][0]
  summary = json.loads((tapered / "summary.json").read_text())
  assert seven["loss"] == pytest.approx(summary["valid_loss"], rel=1e-6)
  assert seven["tokens"] == summary["valid_tokens"] < every["tokens"]
  assert seven["bits_per_byte"] == pytest.approx(
    summary["bits_per_byte"], rel=1e-6
  )
  folded = run("eval", tapered / "folded", "--json")
  assert folded["results"][0]["loss"] == pytest.approx(
    summary["valid_loss_folded"], rel=1e-6
  )
  assert folded["gate"] is None


def test_eval_shows_tails_beside_the_mean(run, tapered, texts):
  """What the README promises to scripts, and that nothing else is there."""
  found = run("eval", tapered, "--json", "--data", texts[0])
  assert list(found) == ["step", "gate", "reference", "train_spike", "results"]
  assert found["reference"] is None
  records = [
    r for r in runs.records(tapered) if r["kind"] == "train"
  ]
  losses = [r["loss"] for r in records]
  rises = [loss - min(losses[: i + 1]) for i, loss in enumerate(losses)]
  spike = found["train_spike"]
  assert list(spike) == ["rise", "step", "loss", "lowest_before"]
  assert spike["rise"] == pytest.approx(max(rises))
  [result] = found["results"]
  assert list(result) == [
    "data", "loss", "bits_per_byte", "tokens", "mean_scale", "logit_norm",
    "median", "p99_9", "entropy", "calibration_error", "jsd", "residuals",
    "worst",
  ]
  assert result["jsd"] is None
  assert list(result["residuals"]) == ["largest_by_layer", "float16_margin"]
  assert len(result["residuals"]["largest_by_layer"]) == 2
  ids = b"".join(document.encode() + b"\0" for document in DOCUMENTS)
  assert len(result["worst"]) == 10
  for token in result["worst"]:
    assert list(token) == [
      "nll", "window", "position", "id", "token", "before"
    ]
    place = token["window"] * 24 + token["position"]
    assert token["id"] % 256 == ids[place]  # end-of-text is 256
    seen = ids[place - token["position"] : place].replace(b"\0", b"")
    assert token["before"] == seen.decode()
  half = tapered / "checkpoints" / "5"
  for reference, low, high in ((tapered, 0, 1e-6), (half, 1e-4, 0.7)):
    compared = run(
      "eval", tapered, "--json", "--data", texts[0], "--reference", reference
    )
    assert compared["reference"] == str(reference)
    [other] = compared["results"]
    assert low <= other.pop("jsd") <= high
    for name in ("loss", "median", "p99_9", "entropy"):
      assert other[name] == pytest.approx(result[name], rel=1e-5)


def test_eval_fits_a_terminal(run, tapered, texts):
  """Tables of at most 80 columns; no blank and no line break is lost."""
  out = run(
    "eval", tapered, "--data", texts[0], texts[1], "--reference", tapered
  )
  tables = [
    line for line in out.splitlines() if "\u2500" <= line[:1] <= "\u257f"
  ]
  assert len(tables) > 2 * 20
  assert max(map(len, tables)) <= 80
  for text_ in (
    "loss of a token, 99.9th percentile", "calibration error, 15 bins",
    "margin to float16 overflow", "id 256", "\\nThe end.",
  ):
    assert out.count(text_) >= 2, text_


def test_eval_of_a_diverged_model_is_no_crash(
  run, tapered, texts, monkeypatch
):
  """Its figures are null, and "inf" or "nan" to people."""
  model = taperjax.load(tapered)
  table = {"embedding": model.params["embed"]["embedding"] * np.float32("nan")}
  lost = model.replace(params={**model.params, "embed": table})
  monkeypatch.setattr(api, "load", lambda *_: lost)
  [found] = run("eval", tapered, "--json", "--data", texts[0])["results"]
  for name in ("loss", "median", "p99_9", "entropy", "calibration_error"):
    assert found[name] is None
  assert found["residuals"] == {
    "largest_by_layer": [None, None], "float16_margin": None
  }
  assert "inf nats per token" in run("eval", tapered, "--data", texts[0])


def test_eval_takes_the_windows_of_the_run(run, root):
  """A run may start from a model of a longer context than its own windows."""
  workdir = runs.finished(
    root,
    "short",
    **runs.started(runs.baseline(root), variant="baseline", context_len=12),
  )
  assert taperjax.load(workdir).config.context_len == 24
  summary = json.loads((workdir / "summary.json").read_text())
  [found] = run("eval", workdir, "--json")["results"]
  assert found["tokens"] == summary["valid_tokens"] == 7 * 12
  assert found["loss"] == pytest.approx(summary["valid_loss"], rel=1e-6)


def test_fold_compares_on_the_windows_of_the_run(
  run, tapered, tmp_path, monkeypatch
):
  """The same: here of a run that is told to have had shorter ones."""
  model = taperjax.load(tapered)
  config = {**model.meta["config"], "context_len": 12}
  short = model.replace(meta={**model.meta, "config": config})
  monkeypatch.setattr(api, "load", lambda *_: short)
  report = run("fold", tapered, "--json", "--out", tmp_path / "folded")
  assert report["compared_tokens"] == config["eval"]["batch_size"] * 12


def test_eval_reads_each_format_alike(run, tapered, texts):
  """.txt, .jsonl and .parquet hold one stream; per file one result."""
  found = run("eval", tapered, "--json", "--data", *texts)
  assert [r["data"] for r in found["results"]] == list(map(str, texts))
  first, *others = found["results"]
  size = sum(len(document.encode()) + 1 for document in DOCUMENTS)
  assert first["tokens"] == size - 1
  for other in others:
    for name in ("loss", "bits_per_byte", "tokens"):
      assert other[name] == first[name]
  out = run("eval", tapered, "--data", texts[0])
  assert f"{first['loss']:.4f} nats per token" in out
  assert "gate 0" in out


def test_eval_per_document_cuts_each_at_the_context(run, tapered, texts):
  """Each begins anew behind end-of-text and none sees another one."""
  found = run(
    "eval", tapered, "--json", "--per-document", "--data", texts[0]
  )["results"][0]
  model = taperjax.load(tapered)
  losses = []
  for document in DOCUMENTS:
    ids = np.array([256, *document.encode()[:23]])
    scored = taperjax.evaluate(model, ids, batch_size=1)
    losses += [scored["loss"]] * scored["tokens"]
  assert found["tokens"] == len(losses) == 23 + 9 + 23
  assert found["loss"] == pytest.approx(np.mean(losses), rel=1e-5)


def test_eval_at_another_gate(run, tapered, texts):
  """--gate overrules the saved one; 1 is the model with all its norms."""
  losses = {
    gate: run("eval", tapered, "--json", "--gate", gate, "--data", texts[0])
    for gate in (0, 0.5, 1)
  }
  assert [found["gate"] for found in losses.values()] == [0, 0.5, 1]
  values = [found["results"][0]["loss"] for found in losses.values()]
  assert len(set(values)) == 3


def test_eval_tells_the_loss_with_int8_weights(run, tapered, texts):
  """Beside the plain one, at the same gate."""
  arguments = ("eval", tapered, "--gate", 1, "--data", texts[0], "--int8")
  [found] = run(*arguments, "--json")["results"]
  model = taperjax.load(tapered)
  [(_, batches)] = cli._eval_texts(
    cli._parser().parse_args([*map(str, arguments)]), model
  )
  want = api.evaluate_batches(api.as_int8(model), batches(), gate=1)
  assert found["loss_int8"] == pytest.approx(want["loss"], rel=1e-6)
  assert 1e-7 < abs(found["loss_int8"] - found["loss"]) < 0.05
  assert f"  {found['loss_int8']:.4f} in int8 (" in run(*arguments)


def test_fold_writes_a_folder_and_folds_again_over_it(
  run, fails, tapered, tmp_path
):
  """The same numbers as at the end of training; foreign folders are safe."""
  out = tmp_path / "folded"
  found = run("fold", tapered, "--out", out, "--json")
  assert found["out"] == str(out)
  report = json.loads((out / "fold.json").read_text())
  assert report == {k: v for k, v in found.items() if k != "out"}
  want = json.loads((tapered / "folded" / "fold.json").read_text())
  # The run was compiled without optimizations (runs.train): other rounding.
  assert report.pop("errors") == pytest.approx(want.pop("errors"), abs=1e-6)
  assert report == want
  want = runs.state(tapered / "folded")[1]
  got = runs.state(out)[1]
  assert got.keys() == want.keys()
  for name, array in want.items():
    np.testing.assert_array_equal(got[name], array)
  names = [entry["name"] for entry in report["folded"]]
  assert len(names) == 2 * (3 + 2) + 1
  assert "head/kernel" in names
  text_out = run("fold", tapered, "--out", out)  # over its own output
  assert f"wrote {out}" in text_out
  assert "head/kernel: W' = c diag(taper_scale) embedding^T" in text_out
  assert [p.name for p in tmp_path.iterdir()] == ["folded"]
  other = tmp_path / "photos"
  other.mkdir()
  (other / "cat.jpg").write_text("")
  (other / "fold.json").write_text("{}")
  message = "photos holds 'cat.jpg', so it is no folded model; choose another"
  assert message in fails("fold", tapered, "--out", other)
  assert {p.name for p in other.iterdir()} == {"cat.jpg", "fold.json"}


def test_fold_follows_a_link_and_keeps_it(run, fails, tapered, tmp_path):
  """Replacing the link would leave the old model where it points."""
  (tmp_path / "real").mkdir()
  (tmp_path / "link").symlink_to("real")
  run("fold", tapered, "--out", tmp_path / "link")
  assert (tmp_path / "link").is_symlink()
  assert (tmp_path / "real" / "fold.json").is_file()
  assert {p.name for p in tmp_path.iterdir()} == {"link", "real"}
  (tmp_path / "a").symlink_to("b")
  (tmp_path / "b").symlink_to("a")
  assert "choose" in fails("fold", tapered, "--out", tmp_path / "a")


def test_a_closed_pipe_is_no_error(tapered):
  """`taperjax info RUN | head -1` is what people type."""
  done = subprocess.run(
    f"{sys.executable} -c 'from taperjax.cli import main; main()' info "
    f"{tapered} | head -1",
    shell=True,
    capture_output=True,
    text=True,
    timeout=runs.LIMIT,
  )
  assert done.stdout.startswith("config.size")
  assert done.stderr == ""


def test_fold_refuses_what_has_no_taper_at_gate_0(
  fails, tapered, baseline, tmp_path
):
  """Baseline, half-tapered and folded models: each is told what to do."""
  out = tmp_path / "out"
  assert "nothing is tapered, so nothing can be folded" in fails(
    "fold", baseline, "--out", out
  )
  line = fails("fold", tapered, "--step", 5, "--out", out)
  assert "at step 5, but folding needs gate 0; finish the run" in line
  assert "(it is 0 from step 8)" in line
  assert "folded already; use it as it is" in fails(
    "fold", tapered / "folded", "--out", out
  )
  assert not out.exists()


MODELS = ["tapered", "half", "folded", "baseline"]


@pytest.mark.parametrize("name", MODELS)
def test_generate_gives_prompt_text_and_ids(run, root, name):
  """Greedy on every kind of model, and the same as the Python interface."""
  workdir = runs.baseline(root) if name == "baseline" else runs.tapered(root)
  path = workdir / "folded" if name == "folded" else workdir
  options = ["--step", 5] if name == "half" else []
  greedy = ["--temperature", 0, "--max-new", 6]
  found = run("generate", path, *options, "--prompt", "Once", *greedy, "--json")
  model = taperjax.load(path, 5 if name == "half" else None)
  assert 0 < model.gate < 1 or name != "half"
  [want] = taperjax.generate(model, ["Once"], max_new=6)
  assert found["prompt"] == "Once"
  assert found["text"] == want
  assert len(found["tokens"]) <= 6
  assert model.tokenizer.decode(found["tokens"]) == want
  streamed = run("generate", path, *options, "--prompt", "Once", *greedy)
  assert streamed == f"Once{want}\n"


def test_streamed_text_waits_for_whole_characters(tapered, monkeypatch):
  """A character may span blocks; half of one must not be printed."""
  whole = "\u00e9\u20ac!".encode()
  blocks = [[byte] for byte in whole] + [[0xC3]]  # and one that never ends
  printed = []
  monkeypatch.setattr(api, "stream_ids", lambda *_, **__: iter(blocks))
  monkeypatch.setattr(
    "builtins.print", lambda *args, **_: printed.extend(args)
  )
  cli.main(["generate", str(tapered), "--prompt", "A"])
  pieces = [text for text in printed if text]
  assert pieces == ["A", "\u00e9", "\u20ac", "!", "\ufffd"]


def test_generate_takes_several_prompts_and_seeds(run, tapered):
  """Each row as if it were alone; a seed repeats, another one differs."""
  greedy = ["--temperature", 0, "--max-new", 6]
  both = run(
    "generate", tapered, "--prompt", "Once", "--prompt", "A dog", *greedy,
    "--json",
  )["results"]
  for row, prompt in zip(both, ("Once", "A dog"), strict=True):
    alone = run("generate", tapered, "--prompt", prompt, *greedy, "--json")
    assert row == alone
  prompts = ["--prompt", "Once", "--prompt", "A dog"]
  out = run("generate", tapered, *prompts, *greedy)
  assert out == "\n\n".join(r["prompt"] + r["text"] for r in both) + "\n"
  hot = ["--temperature", 5, "--max-new", 12, "--json"]
  zero, again, one = (
    run("generate", tapered, *hot, "--seed", seed)["tokens"]
    for seed in (0, 0, 1)
  )
  assert zero == again != one


def test_generate_with_int8_weights(run, tapered, monkeypatch):
  """Whole and streamed; what is asked for reaches the decoder."""
  asked = []
  prepare = decode._prepare
  monkeypatch.setattr(
    decode, "_prepare",
    lambda *args: asked.append(args[-1]) or prepare(*args),
  )
  options = ("--prompt", "Once", "--temperature", 0, "--max-new", 6, "--int8")
  found = run("generate", tapered, *options, "--json")
  model = taperjax.load(tapered)
  [want] = taperjax.generate(model, ["Once"], max_new=6, weights="int8")
  assert found["text"] == want
  assert run("generate", tapered, *options) == f"Once{want}\n"
  assert asked == ["int8"] * 3
  run("generate", tapered, *options[:-1], "--json")
  assert asked.pop() == "float"


def test_generate_goes_past_the_context_only_when_told(run, fails, tapered):
  """Silent sliding would change what the model sees."""
  for options in ([], ["--json"]):  # streamed, or not
    line = fails(
      "generate", tapered, "--prompt", "Once", "--max-new", 30, *options
    )
    assert "exceed context_len=24; lower max_new, shorten the" in line
    assert "--window" in line
  found = run(
    "generate", tapered, "--prompt", "Once", "--max-new", 30, "--temperature",
    0, "--window", "--json",
  )
  assert len(found["tokens"]) > 20 or 256 not in found["tokens"]


def test_info_tells_of_runs_steps_and_folded_models(run, tapered, baseline):
  """Configuration, step, gate, counts, and every name with its shape."""
  found = run("info", tapered, "--json")
  assert (found["step"], found["gate"]) == (runs.STEPS, 0.0)
  assert found["config"] == json.loads((tapered / "config.json").read_text())
  assert found["variant"] == "all_aux"
  summary = json.loads((tapered / "summary.json").read_text())
  assert found["params"] == summary["params"]
  assert found["c"] == summary["c"]
  assert found["shapes"]["embed/embedding"] == [257, 8]
  sizes = [int(np.prod(shape)) for shape in found["shapes"].values()]
  assert sum(sizes) == found["params"] + found["params_taper"]
  half = run("info", tapered / "checkpoints" / "5", "--json")
  assert half == run("info", tapered, "--step", 5, "--json")
  assert half["step"] == 5
  assert 0 < half["gate"] < 1
  folded = run("info", tapered / "folded", "--json")
  assert folded["params"] == summary["params_folded"]
  assert folded["model"]["final_norm"] == "none"
  assert run("info", baseline, "--json")["gate"] == 1.0
  out = run("info", tapered)
  lines = [line.split(maxsplit=1) for line in out.splitlines()]
  assert ["params", f"{found['params']:,}"] in lines
  assert ["shapes.embed/embedding", "[257, 8]"] in lines
  assert ["config.taper.start", "0.4"] in lines


def test_info_counts_a_config_without_any_file(
  run, fails, tmp_path, monkeypatch
):
  """The paper's largest model in no time: shapes only, from any folder."""
  monkeypatch.chdir(tmp_path)
  config = f"{runs.REPOSITORY}/configs/tinystories.py"
  found = run("info", f"{config}:30m,baseline", "--json")
  assert found["params"] == 30_327_296
  assert found["params_taper"] == 0
  assert found["variant"] == "baseline"
  assert found["config"]["batch_size"] == 16
  quick = run("info", f"{runs.REPOSITORY}/configs/quickstart.py", "--json")
  assert quick["variant"] == "all_aux"
  assert quick["params_taper"] > 0
  assert list(tmp_path.iterdir()) == []
  assert "names size '7m'; use one of 1m" in fails("info", f"{config}:7m")
  assert "variant='foo' is not one of" in fails("info", f"{config}:1m,foo")


@pytest.mark.parametrize(
  "arguments, message",
  [
    (["eval", "{none}"], "none does not exist; give the workdir of a run"),
    (["generate", "{run}", "--prompt", "\ud800"], "is not valid UTF-8; mend"),
    (["eval", "n" * 300], "nnn cannot be used (File name too long); choose"),
    (["eval", "{empty}"], "holds no checkpoint; train first, or give"),
    (["eval", "{run}", "--step", "7"], "no checkpoint at step 7"),
    (["eval", "{run}/checkpoints/5", "--step", "10"], "is one step, not"),
    (["eval", "{run}", "--gate", "2"], "gate=2 is not between 0 and 1"),
    (["eval", "{run}", "--data", "{none}.txt"], "none.txt does not exist"),
    (["eval", "{run}", "--reference", "{none}"], "none does not exist; give"),
    (["eval", "{run}", "--per-document"], "--per-document needs texts; add"),
    (
      ["eval", "{run}", "--per-document", "--data", "x", "--max-windows", "3"],
      "--max-windows has no effect with --per-document",
    ),
    (["eval", "{run}", "--batch-size", "0"], "--batch-size=0 must be 1 or"),
    (["generate", "{run}", "--max-new", "0"], "--max-new=0 must be 1 or more"),
    (
      ["generate", "{run}", "--temperature", "0", "--top-k", "5"],
      "top_k=5 has no effect with temperature=0",
    ),
    (["generate", "{run}", "--top-p", "0"], "top_p=0.0 must be above 0"),
    (["info", "{none}.py"], "none.py does not exist; see configs/"),
    (["info", "{config}", "--step", "3"], "--step=3 has no effect with a"),
    (["eval"], "the following arguments are required: model; see taperjax"),
    (["evaluate", "{run}"], "invalid choice: 'evaluate'"),
    (["eval", "{run}", "--gate", "half"], "invalid float value: 'half'"),
    (["eval", ""], "model='' is empty; name a file or a folder"),
    (["import", "", "{none}"], "source='' is empty; name a file or a folder"),
    (["import", "{none}", ""], "workdir='' is empty; name a file or a folder"),
    (["eval", "{run}", "--data", "x", ""], "data='' is empty; name a file or"),
  ],
)
def test_mistake_is_one_line(fails, tapered, tmp_path, arguments, message):
  """Also with --json: nothing on standard output then."""
  names = {
    "run": tapered,
    "none": tmp_path / "none",
    "empty": tmp_path,
    "config": runs.REPOSITORY / "configs" / "quickstart.py",
  }
  arguments = [argument.format(**names) for argument in arguments]
  line = fails(*arguments, "--json")
  assert message in line
  assert line.startswith("taperjax")


def test_an_array_without_room_is_one_line(fails, tapered, monkeypatch):
  """NumPy's error is a kind of MemoryError of its own."""
  monkeypatch.setattr(api, "load", lambda *_: np.zeros(2**50))
  assert "not enough memory" in fails("info", tapered)


def test_sigterm_lets_a_command_clean_up(tapered, monkeypatch):
  """As Ctrl-C does; the handler of the caller is back behind it."""
  left = []

  def killed(*_):
    try:
      signal.raise_signal(signal.SIGTERM)
      raise AssertionError("not stopped")
    finally:
      left.append("cleaned")

  before = signal.getsignal(signal.SIGTERM)
  monkeypatch.setattr(api, "load", killed)
  with pytest.raises(SystemExit) as stop:
    cli.main(["info", str(tapered)])
  assert stop.value.code == 143
  assert left == ["cleaned"]
  assert signal.getsignal(signal.SIGTERM) is before


def test_damaged_checkpoint_stops_every_command(fails, tapered, tmp_path):
  """No silent fallback here: the result would be of another model."""
  workdir = shutil.copytree(tapered, tmp_path / "run")
  runs.damage(workdir, 10)
  for command in ("eval", "fold", "generate", "info"):
    line = fails(command, workdir)
    assert "checkpoints/10 is damaged" in line
    assert "choose another step, there are [5]" in line


def test_tokenizer_of_another_model_is_refused(fails, tapered, tmp_path, root):
  """Ids beyond the vocabulary would be clamped, others mean other text."""
  workdir = shutil.copytree(tapered, tmp_path / "run")
  from taperjax.data import tokenizer

  documents = ["the cat and the dog sat on the mat " * 20]
  other = tokenizer.train_sentencepiece(documents, 280)
  shutil.rmtree(workdir / "tokenizer")
  other.save(workdir / "tokenizer")
  for command in ("eval", "generate"):
    line = fails(command, workdir)
    assert "with vocabulary 280 is not the one that the model" in line
    assert "(vocabulary 257); put that one back" in line


def test_debug_lets_the_traceback_through(tmp_path):
  """For us, when the line does not say enough."""
  with pytest.raises(UserError, match="does not exist"):
    cli.main(["eval", str(tmp_path / "none"), "--debug"])


def test_installed_command_prints_one_object_and_logs_elsewhere(tapered):
  """As a script calls it: a process, its exit code and its streams."""
  code = "from taperjax.cli import main; main()"
  done = subprocess.run(
    [sys.executable, "-c", code, "generate", tapered, "--prompt", "Once",
     "--max-new", "3", "--json"],
    cwd=runs.REPOSITORY,
    capture_output=True,
    text=True,
    timeout=runs.LIMIT,
  )
  assert done.returncode == 0, done.stderr
  [line] = done.stdout.splitlines()
  assert json.loads(line).keys() == {"prompt", "text", "tokens"}
  assert done.stderr == ""


def test_commands_only_read_the_run(run, tapered):
  """A run may lie on a read-only disk, or be training still."""
  before = sorted(p for p in tapered.rglob("*") if p.name != ".lock")
  run("eval", tapered, "--json")
  run("info", tapered, "--json")
  run("generate", tapered, "--max-new", 3, "--json")
  assert sorted(p for p in tapered.rglob("*") if p.name != ".lock") == before
  assert checkpoint.Checkpoints(
    tapered / "checkpoints", read_only=True
  ).steps() == [5, 10]
