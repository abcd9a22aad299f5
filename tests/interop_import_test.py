"""`taperjax import`: a real llama2.c model, Hugging Face folders, refusals."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import signal

import numpy as np
import pytest

from taperjax import api, checkpoint, cli, decode, interop, saved
from taperjax.data import text
from taperjax.errors import UserError
from taperjax.interop import gpt2, hf_files, llama, llama2c
from tests import tiny

TINY_GREEDY = decode.Sampling(0.0, 0, 1.0)


# stories260K, a real model.


@pytest.fixture(scope="module")
def stories(test_data):
  return test_data / "stories260K"


@pytest.fixture(scope="module")
def reference(stories):
  return json.loads((stories / "reference.json").read_text())


@pytest.fixture(scope="module")
def workdir(stories, tmp_path_factory):
  """What the command makes of it."""
  path = tmp_path_factory.mktemp("import") / "stories"
  cli.main(["import", str(stories), str(path)])
  return path


@pytest.fixture(scope="module")
def model(workdir):
  return saved.load(workdir)


@pytest.fixture(scope="module")
def hundred(test_data, tmp_path_factory):
  """The first 100 stories of the validation text, and the first 20 folded."""
  folder = tmp_path_factory.mktemp("texts")
  documents = text.iter_documents(test_data / "tinystories" / "valid.txt")
  documents = list(itertools.islice(documents, 100))
  parts = {
    "100": documents, "20": [d.replace("\n\n", "\n") for d in documents[:20]]
  }
  for name, part in parts.items():
    lines = [json.dumps({"text": document}) for document in part]
    (folder / f"{name}.jsonl").write_text("\n".join(lines))
  return folder


def test_workdir_tells_where_the_model_is_from(workdir, model):
  """The published sums; nothing is left of the way there."""
  assert sorted(os.listdir(workdir)) == [
    ".taperjax", "checkpoints", "import.json", "tokenizer"
  ]
  told = json.loads((workdir / "import.json").read_text())
  assert told["format"] == "llama2.c version 0"
  assert told["dtype"] == "float32" and told["notes"] == []
  assert told["params"] == 260_032
  assert told["files"]["stories260K.bin"].startswith("b0a507e7ad0f6266")
  assert told["files"]["tok512.bin"].startswith("037cb335abb25d1f")
  assert told["shapes"]["block_4/attn/k/kernel"] == [64, 4, 8]
  meta = model.meta
  assert (meta["step"], meta["gate"], meta["scale_target"]) == (0, 1.0, 0.0)
  assert meta["data_hashes"] == {"tokenizer": model.tokenizer.fingerprint}
  assert meta["source"]["files"] == told["files"]
  assert {"seed", "commit", "versions", "model"} <= meta.keys()
  assert model.gate == 1.0 and model.c.shape == (11,) and not model.c.any()
  assert not model.tapered


def test_stories_have_the_ids_of_the_reference(model, reference):
  for words, ids in reference["encode"].items():
    assert model.tokenizer.encode_prompt(words) == ids


def test_stories_have_the_logits_of_the_reference(model, reference):
  ids = reference["encode"]["Once upon a time"]
  logits_LV = np.asarray(api.apply(model, np.array([ids])))[0]
  np.testing.assert_allclose(
    logits_LV[-1, :8],
    reference["logits_last_position_Once_upon_a_time_first8"],
    rtol=0,
    atol=5e-5,
  )
  most_L = reference["argmax_each_position_Once_upon_a_time"]
  np.testing.assert_array_equal(logits_LV.argmax(-1), most_L)


def test_stories_have_the_greedy_text_of_the_reference(
  run, workdir, model, reference
):
  """Word for word what the author publishes."""
  ids = reference["greedy_from_bos_token_ids"]
  [got] = api.generate_ids(
    model, [[1]], max_new=len(ids) - 1, sampling=TINY_GREEDY
  )
  assert [1, *got] == ids
  greedy = ("--temperature", 0, "--max-new", len(ids) - 1)
  out = run("generate", workdir, *greedy, "--json")
  assert out["tokens"] == ids[1:]
  assert out["text"] == reference["greedy_text"].removeprefix(" ")
  # A prompt begins with BOS too, and the seam keeps its blank.
  out = run("generate", workdir, "--prompt", "Once upon a", *greedy)
  assert out.startswith(out_text := reference["greedy_text"].strip()[:300])
  assert len(out_text) == 300


def test_stories_have_the_losses_of_the_reference(model, reference, hundred):
  """Each of the first 20 stories, blank lines folded as the reference did."""
  rows = [
    model.tokenizer.encode_prompt(d)[:512]
    for d in text.iter_documents(hundred / "20.jsonl")
  ]
  want = reference["valid_first20_stories"]
  assert sum(len(row) - 1 for row in rows) == want["tokens"]
  padded = np.zeros((20, 512), np.int32)
  for target, row in zip(padded, rows, strict=True):
    target[: len(row)] = row
  logits_BLV = np.asarray(api.apply(model, padded[:, :-1]), np.float64)
  top_BL1 = logits_BLV.max(-1, keepdims=True)
  log_z_BL = np.log(np.exp(logits_BLV - top_BL1).sum(-1)) + top_BL1[..., 0]
  score_BL = np.take_along_axis(logits_BLV, padded[:, 1:, None], -1)[..., 0]
  losses = [
    (log_z_BL - score_BL)[i, : len(row) - 1].mean()
    for i, row in enumerate(rows)
  ]
  np.testing.assert_allclose(
    losses, want["per_story_mean_nats"], rtol=0, atol=2e-5
  )


def test_eval_gives_the_known_loss_of_100_stories(run, workdir, hundred):
  arguments = ("--per-document", "--batch-size", 25, "--json")
  out = run("eval", workdir, "--data", hundred / "100.jsonl", *arguments)
  [found] = out["results"]
  assert found["tokens"] == 36_336
  assert found["loss"] == pytest.approx(1.3009, abs=1e-3)
  assert out["gate"] is None


def test_unordered_rotary_pairs_would_be_seen(
  run, stories, hundred, tmp_path, monkeypatch
):
  """The most likely token alone hides this mistake; the loss does not."""
  monkeypatch.setattr(llama, "halves", lambda w, heads: w)
  run("import", stories / "stories260K.bin", tmp_path / "w")
  arguments = ("--data", hundred / "20.jsonl", "--per-document", "--json")
  [found] = run("eval", tmp_path / "w", *arguments)["results"]
  assert found["loss"] > 4


def test_other_commands_know_an_import(run, fails, workdir):
  out = run("info", workdir, "--json")
  assert out["source"]["format"] == "llama2.c version 0"
  assert out["model"]["num_kv_heads"] == 4 and "config" not in out
  assert "source.path" in run("info", workdir)
  line = fails("eval", workdir)
  assert "imported model, which has no validation text; give --data" in line
  assert "nothing is tapered" in fails("fold", workdir)
  assert "gate=0.5 has no effect" in fails("generate", workdir, "--gate", 0.5)
  assert not (workdir / "folded").exists()


def test_summary_and_json_of_the_import(run, stories, tmp_path):
  source = stories / "stories260K.bin"
  out = run("import", source, tmp_path / "a", "--context-len", 64)
  assert "imported llama2.c version 0 (float32), 260,032 parameters" in out
  assert "context 64" in out
  assert saved.load(tmp_path / "a").config.context_len == 64
  options = ("--tokenizer", stories / "tok512.bin", "--json")
  out = run("import", source, tmp_path / "b", *options)
  assert out["workdir"] == str(tmp_path / "b")
  assert out["model"]["context_len"] == 512


def test_stories_in_the_hugging_face_layout_are_the_same(
  model, tmp_path, hundred
):
  """Both readers and the writer agree on a real model, in half precision too.

  The bound for bfloat16 is loose: it is the file that is rounded.
  """
  tensors, hf_config = llama.to_hf(model.params, model.config)
  ids = np.array([model.tokenizer.encode_prompt("Once upon a time " * 30)])
  want = np.asarray(api.apply(model, ids))
  for dtype, bound in (("float32", 0.0), ("bfloat16", 1.0)):
    hf_files.write_folder(tmp_path, tensors, hf_config, dtype)
    got = np.asarray(api.apply(llama.read(tmp_path), ids))
    assert np.abs(got - want).max() <= bound


# llama2.c files by hand: an untied head, and what is refused.


def write_llama2c(path, config, params):
  """The inverse of the reader, written out again."""
  layers = [params[f"block_{n}"] for n in range(config.num_layers)]

  def rows(name, heads=None):
    part = "attn" if name in "qkvo" else "mlp"
    for layer in layers:
      kernel = np.asarray(layer[part][name]["kernel"])
      if name == "o":
        kernel = kernel.reshape(-1, config.embed_dim)
      w = kernel.reshape(kernel.shape[0], -1).T
      if heads:  # halves to neighbouring pairs
        w = w.reshape(heads, 2, -1, w.shape[-1]).swapaxes(1, 2)
      yield w

  def gains(name):
    return [layer[name]["scale"] for layer in layers]

  table = np.zeros(config.context_len * config.head_dim, np.float32)
  parts = [
    params["embed"]["embedding"],
    *gains("attn_norm"),
    *rows("q", config.num_heads),
    *rows("k", config.num_kv_heads),
    *rows("v"),
    *rows("o"),
    *gains("mlp_norm"),
    *rows("gate"),
    *rows("down"),
    *rows("up"),
    params["final_norm"]["scale"],
    table,
  ]
  vocab = config.vocab_size
  if not config.tied:
    parts.append(np.asarray(params["head"]["kernel"]).T)
    vocab = -vocab
  header = [
    config.embed_dim, config.mlp_dim, config.num_layers, config.num_heads,
    config.num_kv_heads, vocab, config.context_len,
  ]
  body = [np.asarray(p, "<f4").tobytes() for p in parts]
  path.write_bytes(np.asarray(header, "<i4").tobytes() + b"".join(body))


@pytest.fixture
def bare(tmp_path):
  """A llama2.c file without a tokenizer: (path, configuration, parameters)."""
  config = tiny.model_config(
    internal_norm="norm", final_norm="norm", tied=False, rope_theta=1e4,
    embed_dim=16, num_heads=4, num_kv_heads=2,
  )
  params = tiny.params(config)
  path = tmp_path / "model.bin"
  write_llama2c(path, config, params)
  return path, config, params


def test_untied_llama2c_head_lies_behind_the_tables(bare):
  path, config, params = bare
  model = llama2c.read(path)
  assert model.config == config
  assert model.tokenizer is None
  a, b = llama.to_hf(params, config)[0], llama.to_hf(
    model.params, model.config
  )[0]
  assert a.keys() == b.keys() and hf_files.HEAD in a
  for name in a:
    np.testing.assert_array_equal(a[name], b[name], err_msg=name)


def test_import_without_a_tokenizer_goes_on_and_says_so(run, fails, bare):
  path, *_ = bare
  out = run("import", path, path.parent / "w")
  assert "note: no tokenizer was found" in out
  assert "tokenizer" not in os.listdir(path.parent / "w")
  assert run("info", path.parent / "w", "--json")["source"]
  line = fails("generate", path.parent / "w", "--prompt", "a")
  assert "imported without a tokenizer; import it again with" in line


def test_llama2c_files_that_do_not_fit_are_refused(bare, tmp_path):
  path, *_ = bare
  whole = path.read_bytes()
  size = len(whole)

  def header(**changes):
    values = np.frombuffer(whole[:28], "<i4").copy()
    for at, value in changes.items():
      values[int(at[1:])] = value
    return values.tobytes() + whole[28:]

  version = int.from_bytes(b"24ka", "little")
  nan = whole[:40] + np.float32(np.nan).tobytes() + whole[44:]
  for data, message in (
    (whole[:-1], f"has {size - 1:,} bytes, against {size:,} by its header"),
    (whole + b"\0", f"has {size + 1:,} bytes"),
    (whole[:20], "too short"),
    (b"", "too short"),
    (header(_0=version, _1=1), "version 1; only version 0"),
    (header(_5=31), "bytes, against .*vocab_size=31"),
    (header(_5=0), "no llama2.c checkpoint of version 0"),
    (header(_2=-1), "no llama2.c checkpoint.*n_layers=-1"),
    (header(_3=3), "no llama2.c checkpoint.*n_heads=3"),
    (header(_4=3), "no llama2.c checkpoint.*n_kv_heads=3"),
    (header(_1=2**30), "has .* bytes, against"),
    (b"PK\x03\x04" + whole[4:], "pickle of torch, which is never opened"),
    (b"\x80\x02}q" + whole[4:], "pickle of torch"),
    (nan, "'embed' holds numbers that are not finite"),
  ):
    path.write_bytes(data)
    with pytest.raises(UserError, match=message):
      llama2c.read(path)
  path.write_bytes(whole)
  with pytest.raises(UserError, match="context_len=14 must be from 1 to 13"):
    llama2c.read(path, context_len=14)
  with pytest.raises(UserError, match="none.bin cannot be read"):
    llama2c.read(tmp_path / "none.bin")
  for name in ("tok1.bin", "tokenizer.bin"):
    (tmp_path / name).write_bytes(b"x")
  with pytest.raises(UserError, match="several tokenizers, tok1.bin, tok.*bin"):
    llama2c.read(path)


# Folders of Hugging Face, and what is no model.


def byte_tokenizer(path):
  """A byte-level tokenizer.json: 256 bytes and the end of text."""
  import tokenizers
  from tokenizers import decoders, models, pre_tokenizers

  alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
  vocab = {c: i for i, c in enumerate(alphabet)}
  made = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
  made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
  made.decoder = decoders.ByteLevel()
  made.add_special_tokens(["<|endoftext|>"])
  made.save(str(path))


def our_folder(folder, vocab_size):
  config = tiny.model_config(
    internal_norm="norm", final_norm="norm", vocab_size=vocab_size,
    context_len=32,
  )
  params = tiny.params(config)
  hf_files.write_folder(folder, *llama.to_hf(params, config), "float32")
  return config


def test_hugging_face_folder_is_imported_with_its_tokenizer(run, tmp_path):
  """More rows than tokens are common: the padding stands for no text."""
  config = our_folder(tmp_path / "m", 260)
  byte_tokenizer(tmp_path / "m" / "tokenizer.json")
  out = run("import", tmp_path / "m", tmp_path / "w", "--json")
  assert out["format"] == "huggingface llama"
  assert set(out["files"]) == {
    "config.json", "model.safetensors", "tokenizer.json"
  }
  assert "257 ids, the embedding 260 rows" in out["notes"][0]
  model = saved.load(tmp_path / "w")
  assert model.config == config and model.tokenizer.vocab_size == 257
  (tmp_path / "a.txt").write_text("Once upon a time.")
  arguments = ("--data", tmp_path / "a.txt", "--json")
  out = run("eval", tmp_path / "w", *arguments)
  assert out["results"][0]["tokens"] == 17
  arguments = ("--prompt", "On", "--max-new", 3, "--seed", 1, "--json")
  assert len(run("generate", tmp_path / "w", *arguments)["tokens"]) <= 3


def test_tokenizer_with_more_ids_than_rows_is_refused(run, fails, tmp_path):
  our_folder(tmp_path / "m", 256)
  byte_tokenizer(tmp_path / "tokenizer.json")
  arguments = ("import", tmp_path / "m", tmp_path / "w")
  line = fails(*arguments, "--tokenizer", tmp_path / "tokenizer.json")
  assert "tokenizer has 257 ids, but the model in" in line and "256" in line
  assert not (tmp_path / "w").exists()  # nothing is made before it is read
  assert "note: no tokenizer was found" in run(*arguments)


def test_another_tokenizer_beside_an_import_is_noticed(run, tmp_path):
  our_folder(tmp_path / "m", 300)
  byte_tokenizer(tmp_path / "m" / "tokenizer.json")
  run("import", tmp_path / "m", tmp_path / "w")
  path = tmp_path / "w" / "tokenizer"
  shutil.rmtree(path)
  path.mkdir()
  changed = (tmp_path / "m" / "tokenizer.json").read_text() + " "
  (path / "tokenizer.json").write_text(changed)
  with pytest.raises(UserError, match="is not the one that the model in"):
    saved.load(tmp_path / "w")


def test_a_signal_that_a_reader_swallows_stops_the_import(
  tmp_path, monkeypatch, ctrl_c
):
  our_folder(tmp_path / "m", 31)
  read = interop.read

  def swallow(*arguments, **options):
    with contextlib.suppress(KeyboardInterrupt):
      signal.raise_signal(signal.SIGINT)
    return read(*arguments, **options)

  monkeypatch.setattr(interop, "read", swallow)
  with pytest.raises(SystemExit) as stop:
    cli.main(["import", str(tmp_path / "m"), str(tmp_path / "w")])
  assert stop.value.code == 130
  assert not (tmp_path / "w").exists()


def test_used_folders_are_refused(run, fails, tmp_path):
  """Nothing of a run, of an import or of somebody else is replaced."""
  our_folder(tmp_path / "m", 31)
  run("import", tmp_path / "m", tmp_path / "w")
  before = (tmp_path / "w" / "import.json").read_bytes()
  line = fails("import", tmp_path / "m", tmp_path / "w")
  assert "holds 'checkpoints' already; choose an empty or a new" in line
  (tmp_path / "other").mkdir()
  (tmp_path / "other" / "letter").write_text("")
  line = fails("import", tmp_path / "m", tmp_path / "other")
  assert "holds 'letter' and no run of taperjax" in line
  (tmp_path / "file").write_text("")
  assert "cannot be written" in fails(
    "import", tmp_path / "m", tmp_path / "file"
  )
  assert (tmp_path / "w" / "import.json").read_bytes() == before


def test_killed_import_leaves_no_model_and_can_be_repeated(
  run, fails, tmp_path, monkeypatch
):
  """The checkpoints get their place last."""
  our_folder(tmp_path / "m", 257)
  byte_tokenizer(tmp_path / "m" / "tokenizer.json")
  workdir = tmp_path / "w"

  def full_disk(*_):
    raise OSError(28, "disk full")

  with monkeypatch.context() as patch:
    patch.setattr(saved, "write_json", full_disk)
    line = fails("import", tmp_path / "m", workdir)
  assert "cannot be written to" in line and "disk full" in line
  assert os.listdir(workdir) == [".taperjax"]
  (workdir / "import.json").write_text("{}")  # killed while it renamed
  (workdir / "tokenizer").mkdir()
  (workdir / "import.part-1").mkdir()
  run("import", tmp_path / "m", workdir)
  assert sorted(os.listdir(workdir)) == [
    ".taperjax", "checkpoints", "import.json", "tokenizer"
  ]
  assert saved.load(workdir).tokenizer is not None


def test_an_import_is_not_copied_on_its_way(run, tmp_path, monkeypatch):
  """A model as large as the memory allows has no room for a second one."""
  to_host, same = checkpoint._to_host, []

  def host(name, leaf, copy=True):
    found = to_host(name, leaf, copy)
    same.append(np.shares_memory(found, leaf))
    return found

  monkeypatch.setattr(checkpoint, "_to_host", host)
  our_folder(tmp_path / "m", 257)
  run("import", tmp_path / "m", tmp_path / "w")
  assert len(same) > 10 and all(same)


def test_gain_offset_is_for_llama_layouts_alone(run, fails, bare, tmp_path):
  path, *_ = bare
  line = fails("import", path, tmp_path / "w", "--gain-offset", 1)
  assert "gain_offset=1.0 has no effect" in line
  our_folder(tmp_path / "m", 31)
  run("import", tmp_path / "m", tmp_path / "w", "--gain-offset", 1)
  gain = saved.load(tmp_path / "w").params["final_norm"]["scale"]
  assert gain.min() > 1.3
  assert saved.load(tmp_path / "w").meta["source"]["gain_offset"] == 1.0


def test_what_is_no_model_is_told_in_one_line(bare, tmp_path):
  path, *_ = bare
  empty = tmp_path / "empty"
  empty.mkdir()
  run_folder = tmp_path / "run"
  run_folder.mkdir()
  (run_folder / "config.json").write_text('{"variant": "all"}')
  both = tmp_path / "both"
  both.mkdir()
  for name in ("a.bin", "b.bin"):
    shutil.copy(path, both / name)
  (tmp_path / "a.txt").write_text("text")
  (tmp_path / "a.safetensors").write_text("text")
  (tmp_path / "a.gguf").write_text("text")
  pipe = tmp_path / "pipe"
  pipe.mkdir()
  os.mkfifo(pipe / "config.json")  # reading it would never end
  for source, message in (
    (tmp_path / "none", "does not exist"),
    (empty, "holds no model that is understood"),
    (pipe, "config.json is neither a file nor a folder"),
    (run_folder, "has no model_type.*a run of taperjax needs no import"),
    (both, "several models, a.bin, b.bin; give one"),
    (tmp_path / "a.txt", "is neither a GGUF file nor a llama2.c .bin"),
    (tmp_path / "a.gguf", "is neither a GGUF file"),
    (tmp_path / "a.safetensors", "give the folder with config.json"),
  ):
    with pytest.raises(UserError, match=message):
      interop.read(source)


def test_stray_arguments_are_refused(fails, bare, tmp_path):
  path, *_ = bare
  assert "context_len=0 must be from 1" in fails(
    "import", path, tmp_path / "w", "--context-len", 0
  )
  assert "--step" in fails("import", path, tmp_path / "w", "--step", 1)
  assert not (tmp_path / "w").exists()


def test_a_repository_is_fetched_into_the_workdir_alone(
  run, tmp_path, monkeypatch
):
  """By name where no such folder is there; a server is played by a function."""
  hub = pytest.importorskip("huggingface_hub")
  config = tiny.model_config(internal_norm="norm", final_norm="norm")

  def download(name, local_dir, allow_patterns, ignore_patterns):
    assert name == "owner/a-model"
    assert "*.safetensors" in allow_patterns
    tensors, hf_config = llama.to_hf(tiny.params(config), config)
    hf_files.write_folder(local_dir, tensors, hf_config, "float32")

  monkeypatch.setattr(hub, "snapshot_download", download)
  monkeypatch.chdir(tmp_path)
  report = run("import", "owner/a-model", tmp_path / "w", "--json")
  assert report["format"] == "huggingface llama"
  assert (tmp_path / "w" / "download" / "config.json").exists()
  assert [p.name for p in tmp_path.iterdir()] == ["w"]


def test_a_repository_that_cannot_be_fetched_is_one_line(
  fails, tmp_path, monkeypatch
):
  hub = pytest.importorskip("huggingface_hub")

  def download(*arguments, **options):
    raise hub.errors.LocalEntryNotFoundError("no network")

  monkeypatch.setattr(hub, "snapshot_download", download)
  line = fails("import", "owner/a-model", tmp_path / "w")
  assert "owner/a-model is no folder here, and cannot be fetched" in line


def test_a_stock_file_without_norms_comes_in_at_gate_0_and_folds(
  run, tmp_path
):
  """Gains scaled, eps 1e12, as LN-free GPT-2 models are published."""
  config = tiny.gpt2_config(internal_norm="norm", final_norm="norm")
  tensors, hf_config = gpt2.to_hf(tiny.params(config), config)
  for name in tensors:
    if "ln_" in name and name.endswith("weight"):
      tensors[name] = tensors[name] * np.float32(1e6)
  hf_config["layer_norm_epsilon"] = 1e12
  hf_files.write_folder(tmp_path / "hf", tensors, hf_config, "float32")
  run("import", tmp_path / "hf", tmp_path / "w")
  model = saved.load(tmp_path / "w")
  assert model.gate == 0.0
  assert model.config.internal_norm == model.config.final_norm == "taper"
  folded = api.fold(model)
  tokens_BL = tiny.tokens()
  want, got = api.apply(model, tokens_BL), api.apply(folded, tokens_BL)
  np.testing.assert_allclose(want, got, atol=1e-5)
  # It is the fixed map and no norm: without eps the scale would not matter.
  gains = model.params["block_0"]["attn_norm"]["taper_scale"]
  name = "transformer.h.0.ln_1.weight"
  np.testing.assert_allclose(gains, tensors[name] / 1e6, rtol=1e-6)
