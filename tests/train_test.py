"""train.py: what a user can get wrong is one line and exit code 2."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys

import pytest

from tests import runs

QUICK = "--config={repository}/configs/quickstart.py"
TINY = "--config={configs}/tiny.py"
FULL = "--config={repository}/configs/tinystories.py"
# name: (arguments, what the line says). {folder} is a fresh one.
CASES = {
  "no config": ([], "--config is missing; try --config configs/quickstart.py"),
  "missing config file": (
    ["--config=configs/nope.py"],
    "config file configs/nope.py does not exist; see configs/",
  ),
  "config file with a mistake": (
    ["--config={configs}/broken.py"],
    "broken.py: ModuleNotFoundError: No module named 'not_there'",
  ),
  "unknown size": (
    [FULL + ":7m"],
    "names size '7m'; use one of 1m, 3m, 9m, 30m",
  ),
  "unknown variant": (
    [FULL + ":1m,foo"],
    "variant='foo' is not one of baseline, internal, internal_aux, final, all",
  ),
  "unknown field": (
    [QUICK, "--config.model.embed_dims=3"],
    "model.embed_dims is not a config field; did you mean model.embed_dim?",
  ),
  "field that resembles none": (
    [QUICK, "--config.model.dmodel=3"],
    "model.dmodel is not a config field; the fields are biases, embed_dim, ",
  ),
  "unknown group": (
    [QUICK, "--config.modle.embed_dim=3"],
    "modle is not a config field; did you mean model?",
  ),
  "unknown field in a file": (
    ["--config={configs}/misspelt.py"],
    "stepps is not a config field; did you mean steps?",
  ),
  "group of fields": (
    [QUICK, "--config.model=3"],
    "model is a group of fields; set one of them, for example --config.model.",
  ),
  "field of a value": (
    [QUICK, "--config.steps.all=3"],
    "steps.all is not a config field; steps is a single value",
  ),
  "text for a whole number": (
    [QUICK, "--config.steps=many"],
    "steps='many' must be a whole number",
  ),
  "fraction for a whole number": (
    [QUICK, "--config.steps=1.5"],
    "steps='1.5' must be a whole number",
  ),
  "text for a number": (
    [QUICK, "--config.optimizer.learning_rate=fast"],
    "optimizer.learning_rate='fast' must be a number",
  ),
  "text for true or false": (
    [QUICK, "--config.model.tied=perhaps"],
    "model.tied='perhaps' must be true or false",
  ),
  "text for seeds": ([QUICK, "--config.seeds=abc"], "seeds='abc' is of type"),
  "None where a value must be": (
    [QUICK, "--config.optimizer.warmup=None"],
    "optimizer.warmup=None is of type NoneType; it must be",
  ),
  "wrong type in a file": (
    ["--config={configs}/untyped.py"],
    "steps='ten' is of type str; it must be",
  ),
  "stray argument": (
    [QUICK, "stray"],
    "stray argument 'stray'; options start with --",
  ),
  "unknown option": ([QUICK, "--wrokdir=x"], "wrokdir"),
  "width and heads": (
    [TINY, "--config.model.embed_dim=9"],
    "model.embed_dim=9 is not divisible by model.num_heads=2; use a multiple "
    "of 2, for example 8 or 10",
  ),
  "taper end before start": (
    [TINY, "--config.taper.end=0.3"],
    "taper.end=0.3 is not after taper.start=0.4; the gate falls",
  ),
  "no warm-up to calibrate on": (
    [TINY, "--config.taper.start=0"],
    "taper.start=0.0 of steps=10 is step 0; calibration needs at least one "
    "step before the taper",
  ),
  "final taper that may not untie": (
    [TINY, "--config.fold.untie=False"],
    "fold.untie=False with variant=all_aux and model.tied=True: the final norm "
    "folds into the head, which must then be untied",
  ),
  "context longer than the text": (
    [TINY, "--config.context_len=20000"],
    "data.train=corpus: context_len=20000 needs a text of at least 20001 "
    "tokens, but it has ",
  ),
  "prompt longer than the context": (
    [TINY, "--config.eval.prompt=Once upon a time there was a girl"],
    "of 33 tokens leaves no room in context_len=24; shorten it",
  ),
  "empty file": (
    [TINY, "--config.data.train={files}/empty.txt"],
    "empty.txt holds no documents; give a file with text in it",
  ),
  "binary file": (
    [TINY, "--config.data.train={files}/binary.txt"],
    "binary.txt is not UTF-8 text: byte 0x00 at offset 4; give a text file",
  ),
  "missing file": (
    [TINY, "--config.data.valid={files}/missing.txt"],
    "missing.txt does not exist; give the path of a .txt, .jsonl or .parquet",
  ),
  "file of another kind": (
    [TINY, "--config.data.valid={files}/page.html"],
    "page.html is not a .txt, .jsonl or .parquet file; convert it",
  ),
  "vocabulary for bytes": (
    [TINY, "--config.data.vocab_size=300"],
    "data.vocab_size=300 has no effect with data.tokenizer=bytes",
  ),
  "missing tokenizer": (
    [TINY, "--config.data.tokenizer={files}/none.json"],
    "none.json does not exist; use sentencepiece, bytes, or the path",
  ),
  "workdir under a file": (
    [TINY, "--workdir={files}/page.html/run"],
    "page.html/run cannot be written (Not a directory); choose a writable",
  ),
  "workdir of something else": (
    [TINY, "--workdir={files}"],
    "and no run of taperjax; choose an empty or a new folder",
  ),
  "stop after the end": (
    [TINY, "--stop_after=10"],
    "stop_after=10 must be from 1 to steps - 1 = 9",
  ),
  "other config than the saved one": (
    [TINY, "--workdir={used}", "--config.steps=20", "--config.norm=layer"],
    "(model.norm: saved 'rms', now 'layer'; norm: saved 'rms', now 'layer'; "
    "steps: saved 10, now 20); restore them, choose another --workdir",
  ),
  "other tokenizer than the saved one": (
    [
      TINY,
      "--workdir={used}",
      "--config.data.tokenizer=sentencepiece",
      "--config.data.vocab_size=300",
    ],
    "(data.tokenizer: saved 'bytes', now 'sentencepiece'; data.vocab_size: "
    "saved None, now 300; model.vocab_size: saved 257, now 300)",
  ),
  "NaN": (
    [
      "--config={configs}/unlimited.py", "--config.log_every=1",
      "--config.optimizer.learning_rate=1e18",
    ],
    "is not finite, training stops; there is no checkpoint yet in",
  ),
}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
  return runs.shared_root(tmp_path_factory)


@pytest.fixture(scope="module")
def found(root, tmp_path_factory):
  """name: (exit code, standard output, standard error, workdir)."""
  folder = tmp_path_factory.mktemp("cases")
  configs, files = folder / "configs", folder / "files"
  configs.mkdir()
  files.mkdir()
  (configs / "tiny.py").write_text(runs.CONFIG_FILE)
  (configs / "broken.py").write_text("import not_there\n")
  unlimited = "from taperjax import config\nconfig._MOST.clear()\n"
  (configs / "unlimited.py").write_text(runs.CONFIG_FILE + unlimited)
  for name, change in (("misspelt", "stepps=3"), ("untyped", "steps='ten'")):
    text = runs.CONFIG_FILE.replace("variant=variant", change)
    (configs / f"{name}.py").write_text(text)
  (files / "empty.txt").write_text("")
  (files / "binary.txt").write_bytes(b"text\0\xff\x00")
  (files / "page.html").write_text("<p>text</p>")
  used = folder / "used"
  shutil.copytree(runs.tapered(root), used)
  all_arguments, workdirs = [], []
  for number, (arguments, _) in enumerate(CASES.values()):
    workdirs.append(folder / f"run{number}")
    arguments = [
      a.format(
        repository=runs.REPOSITORY, configs=configs, files=files, used=used
      )
      for a in arguments
    ]
    if not any(a.startswith("--workdir") for a in arguments):
      arguments.append(f"--workdir={workdirs[-1]}")
    all_arguments.append(arguments)
  (folder / "cases.json").write_text(json.dumps(all_arguments))
  done = runs.process("cases", folder)
  assert done.returncode == 0, done.stderr
  results = json.loads((folder / "found.json").read_text())
  return {
    name: (*result, workdir)
    for name, result, workdir in zip(CASES, results, workdirs, strict=True)
  }


@pytest.mark.parametrize("name", CASES)
def test_mistake_is_one_line_with_exit_code_2(found, name):
  """Field, value, rule, remedy; no traceback; nothing the next run trusts."""
  code, out, err, workdir = found[name]
  *before, line = err.splitlines()
  assert code == 2, err
  assert out == ""
  assert line.startswith("train.py: error: ")
  assert CASES[name][1] in line
  assert "Traceback" not in err
  if name != "NaN":
    assert before == []  # nothing was begun
    assert not (workdir / "config.json").exists()
    assert not (workdir / "checkpoints" / "5").exists()


def test_same_mistake_with_debug_shows_the_traceback(tmp_path):
  """--debug is for us; and a config is found from another folder too."""
  done = subprocess.run(
    [
      sys.executable,
      runs.REPOSITORY / "train.py",
      f"--config={runs.REPOSITORY}/configs/quickstart.py",
      "--config.batch_size=0",
      "--debug",
    ],
    cwd=tmp_path,
    env={**os.environ, "PYTHONPATH": str(runs.REPOSITORY)},
    capture_output=True,
    text=True,
    timeout=runs.LIMIT,
  )
  assert done.returncode == 1
  assert "Traceback" in done.stderr
  assert "UserError: batch_size=0 must be above 0" in done.stderr
  assert list(tmp_path.iterdir()) == []


def test_help_needs_no_config_and_imports_nothing_heavy(tmp_path):
  """Help must come at once, and show the options of this program."""
  code = (
    "import atexit, runpy, sys\n"
    "atexit.register(lambda: print('loaded', [m for m in ('jax', 'tensorflow',"
    " 'torch') if m in sys.modules]))\n"
    "sys.argv = ['train.py', '--help']\n"
    "runpy.run_path('train.py', run_name='__main__')\n"
  )
  done = subprocess.run(
    [sys.executable, "-c", code],
    cwd=runs.REPOSITORY,
    capture_output=True,
    text=True,
    timeout=runs.LIMIT,
  )
  assert "--config" in done.stdout
  assert "--workdir" in done.stdout
  assert "loaded []" in done.stdout


def test_package_and_command_import_nothing_heavy():
  """`import taperjax` takes no time; what it gives is imported when used."""
  code = (
    "import sys, taperjax, taperjax.cli\n"
    "print([m for m in ('jax', 'numpy', 'tensorflow', 'torch') "
    "if m in sys.modules])\n"
    "assert callable(taperjax.load)\n"
    "import taperjax.loop, taperjax.api\n"
    "print([m for m in ('tensorflow', 'torch') if m in sys.modules])\n"
  )
  done = subprocess.run(
    [sys.executable, "-c", code],
    cwd=runs.REPOSITORY,
    capture_output=True,
    text=True,
    timeout=runs.LIMIT,
  )
  assert done.stdout.split("\n")[:2] == ["[]", "[]"], done.stderr
