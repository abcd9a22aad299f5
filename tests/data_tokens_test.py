"""Token files: what is written, and that nothing stale is ever reused."""

import hashlib
import json
import multiprocessing
import os
import re

import numpy as np
import pytest

from taperjax import data
from taperjax.data import text, tokenizer as tokenizer_lib, tokens as tokens_lib
from taperjax.errors import UserError

BYTES = tokenizer_lib.ByteTokenizer()


class Setting:
  """A source, a folder and a log; `prepare` is the call under test."""

  def __init__(self, folder):
    self.source = folder / "source.txt"
    self.source.write_text("ab\n<|endoftext|>\ncdé\n<|endoftext|>\n")
    self.folder = folder / "data"
    self.lines = []

  def prepare(self, tokenizer=BYTES, **kwargs):
    return tokens_lib.prepare(
      self.source,
      tokenizer,
      self.folder,
      name="x",
      log=self.lines.append,
      **kwargs,
    )


@pytest.fixture
def setting(tmp_path):
  return Setting(tmp_path)


def test_documents_follow_each_other_with_an_end_after_each(setting):
  found = setting.prepare()
  ids = [97, 98, 256, 99, 100, 0xC3, 0xA9, 256]
  assert found.tokens[:].tolist() == ids
  assert found.tokens.dtype == np.uint16
  assert not found.tokens[:].flags.writeable
  raw = np.array(ids, "<u2").tobytes()
  assert found.path.read_bytes() == raw
  stat = setting.source.stat()
  assert found.meta == {
    "format": 1,
    "source": str(setting.source),
    "source_size": stat.st_size,
    "source_mtimes_ns": [stat.st_mtime_ns],
    "source_sha256": hashlib.sha256(setting.source.read_bytes()).hexdigest(),
    "tokenizer_fingerprint": BYTES.fingerprint,
    "vocab_size": 257,
    "dtype": "uint16",
    "num_tokens": 8,
    "num_documents": 2,
    "num_bytes": 6,
    "tokens_sha256": hashlib.sha256(raw).hexdigest(),
  }
  assert sorted(os.listdir(setting.folder)) == ["x.bin", "x.json"]


def test_large_vocabularies_take_four_bytes(setting, monkeypatch):
  """An id of 65,536 or more must not wrap around."""
  monkeypatch.setattr(tokenizer_lib.ByteTokenizer, "vocab_size", 65_537)
  monkeypatch.setattr(tokenizer_lib.ByteTokenizer, "eos_id", 65_536)
  found = setting.prepare()
  assert found.tokens.dtype == np.uint32
  assert found.tokens[-1:] == 65_536


def test_streaming_in_parts_gives_the_same_file(setting, monkeypatch):
  documents = [f"document {i} " * (i % 5 + 1) for i in range(50)]
  setting.source.write_text("<|endoftext|>".join(documents))
  whole = setting.prepare()
  whole.path.unlink()
  monkeypatch.setattr(tokens_lib, "BATCH_CHARS", 40)
  assert setting.prepare().meta == whole.meta


def test_nothing_changed_is_reused_without_reading_the_source(
  setting, monkeypatch
):
  """Hashing gigabytes at each start would cost seconds."""
  first = setting.prepare()
  stat = first.path.stat()

  def no_documents(path):
    raise AssertionError("the source was read")

  hashed = []
  sha256_of_files = text.files.sha256_of_files
  monkeypatch.setattr(text, "iter_documents", no_documents)
  monkeypatch.setattr(
    text.files,
    "sha256_of_files",
    lambda paths: hashed.extend(paths) or sha256_of_files(paths),
  )
  again = setting.prepare()
  assert hashed == [first.path]
  assert again.path.stat().st_mtime_ns == stat.st_mtime_ns
  assert setting.lines == []
  # Only touched: hashed once, reused, and the new time is noted.
  os.utime(setting.source, ns=(1, 1))
  setting.prepare()
  assert hashed == [first.path, first.path, setting.source]
  setting.prepare()
  assert hashed[3:] == [first.path]
  assert setting.lines == []


def change_source(setting):
  stat = setting.source.stat()
  content = setting.source.read_text().replace("ab", "xy")  # the same size
  setting.source.write_text(content)
  os.utime(setting.source, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))


def truncate(setting):
  with (setting.folder / "x.bin").open("r+b") as file:
    file.truncate(4)


def flip_bit(setting):
  path = setting.folder / "x.bin"
  raw = bytearray(path.read_bytes())
  raw[3] ^= 1
  path.write_bytes(raw)


def damage_json(setting):
  path = setting.folder / "x.json"
  path.write_text(path.read_text()[:50])


def old_format(setting):
  path = setting.folder / "x.json"
  path.write_text(json.dumps(json.loads(path.read_text()) | {"format": 0}))


def objects(setting):
  """numpy would take ids for addresses."""
  path = setting.folder / "x.json"
  told = json.loads(path.read_text()) | {"dtype": "O", "num_tokens": 0}
  (setting.folder / "x.bin").write_bytes(b"\1" * 8)
  told |= {"num_tokens": 1, "tokens_sha256": hashlib.sha256(b"\1" * 8)
           .hexdigest()}
  path.write_text(json.dumps(told))


def nested(setting):
  (setting.folder / "x.json").write_text("[" * 100_000)


def no_hash(setting):
  path = setting.folder / "x.json"
  told = json.loads(path.read_text()) | {"source_sha256": ["x"]}
  path.write_text(json.dumps(told))


@pytest.mark.parametrize(
  "change, line",
  [
    (objects, "its ids are said to be 'O'"),
    (nested, "x.json is damaged"),
    (no_hash, "x.json is damaged"),
    (change_source, "the source .*source.txt changed"),
    (truncate, "the file has 4 bytes, another size than recorded"),
    (flip_bit, r"the file was changed since it was written \(sha256\)"),
    (damage_json, "x.json is damaged"),
    (old_format, "its format is 0, not 1"),
    (lambda s: (s.folder / "x.json").unlink(), "x.json is missing"),
    (lambda s: (s.folder / "x.bin").unlink(), "x.bin is missing"),
  ],
)
def test_what_changed_is_named_and_built_anew(setting, change, line):
  """Never silently reused: the next run would train on other text."""
  setting.prepare()
  change(setting)
  found = setting.prepare()
  assert len(setting.lines) == 1
  assert re.search(f"x.bin are made anew: {line}", setting.lines[0])
  expected = [
    i
    for document in text.iter_documents(setting.source)
    for i in (*document.encode(), 256)
  ]
  assert found.tokens[:].tolist() == expected
  setting.prepare()
  assert len(setting.lines) == 1


def test_changed_tokenizer_is_named(setting):
  setting.prepare()
  tok = tokenizer_lib.train_sentencepiece(["ab cd é"] * 3, 270)
  found = setting.prepare(tok)
  assert "made anew: the tokenizer changed." in setting.lines[0]
  assert found.tokens[-1:] == tok.eos_id


@pytest.mark.parametrize("key", ["source", "tokenizer", "tokens"])
def test_resumed_run_with_other_data_stops(setting, key):
  """Resuming on other text would make a run that nobody can repeat."""
  found = setting.prepare()
  names = {
    "source": ("source_sha256", "another text"),
    "tokenizer": ("tokenizer_fingerprint", "another tokenizer"),
    "tokens": ("tokens_sha256", "other tokens"),
  }
  field, what = names[key]
  expect = {**found.hashes, field: "0" * 64}
  with pytest.raises(UserError, match=f"source.txt gives {what} than the run"):
    setting.prepare(expect=expect)
  assert setting.prepare(expect=found.hashes).hashes == found.hashes


def test_changed_text_stops_a_resumed_run_before_anything_is_replaced(setting):
  found = setting.prepare()
  before = found.path.read_bytes()
  change_source(setting)
  with pytest.raises(UserError, match="put the old data back, or start a new"):
    setting.prepare(expect=found.hashes)
  assert found.path.read_bytes() == before
  assert setting.lines == []


def test_a_stream_reads_as_the_array_does(tmp_path):
  """Slices of every kind that evaluation and training take."""
  ids = np.random.default_rng(0).integers(0, 2**16, 50).astype("<u2")
  ids.tofile(tmp_path / "a.bin")
  stream = tokens_lib.Stream(tmp_path / "a.bin", ids.dtype)
  assert len(stream) == 50
  for part in (
    slice(None), slice(7), slice(7, 19), slice(-5, None), slice(45, 99),
    slice(9, 3),
  ):
    np.testing.assert_array_equal(stream[part], ids[part], strict=True)
  np.testing.assert_array_equal(np.asarray(stream), ids, strict=True)


def test_a_file_that_is_cut_short_under_a_run_is_told(tmp_path):
  """A memory map would end the process without a word."""
  np.arange(50, dtype="<u2").tofile(tmp_path / "a.bin")
  stream = tokens_lib.Stream(tmp_path / "a.bin", np.dtype("<u2"))
  os.truncate(tmp_path / "a.bin", 60)
  assert stream[10:30].tolist() == list(range(10, 30))
  with pytest.raises(UserError, match=r"tokens=.*a\.bin ends early: .* start"):
    stream[25:40]


def test_fault_while_tokenizing_leaves_nothing(setting):
  """A half-written token file must not be there for the next run."""
  setting.source.write_bytes(b"good\n<|endoftext|>\n\xff")
  with pytest.raises(UserError, match="byte 0xff at offset 19"):
    setting.prepare()
  assert os.listdir(setting.folder) == []


def test_source_that_grows_while_it_is_read_is_told(setting):
  source = text.file_source(setting.source)

  def growing():
    yield from text.iter_documents(setting.source)
    with setting.source.open("a") as file:
      file.write("more")

  source = text.Source(source.name, source.files, growing)
  with pytest.raises(UserError, match="changed while it was read"):
    tokens_lib.prepare(source, BYTES, setting.folder, name="x")
  assert os.listdir(setting.folder) == []


def test_what_the_disk_gives_back_wrong_is_told(setting, monkeypatch):
  """The bytes are read again before anything is trained on them."""
  write_meta = tokens_lib._write_meta

  def write_and_flip(*args):
    write_meta(*args)
    flip_bit(setting)

  monkeypatch.setattr(tokens_lib, "_write_meta", write_and_flip)
  with pytest.raises(UserError, match="read back .the file was .*; check the"):
    setting.prepare()


@pytest.mark.parametrize(
  "normalizer, text, match",
  [
    ("Lowercase", "One Two", "'One Two' comes back as 'one two'; use one wi"),
    (
      "NFKC",
      "a long line before \ufb01re, and a long line behind it",
      "'ne before \ufb01re, and a long line' comes back as 'ne before fire,",
    ),
  ],
)
def test_a_tokenizer_that_changes_the_text_is_refused(
  setting, normalizer, text, match
):
  """Bits per byte would count the bytes of another text."""
  import tokenizers

  model = tokenizers.Tokenizer(tokenizers.models.BPE())
  model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(False)
  model.decoder = tokenizers.decoders.ByteLevel()
  trainer = tokenizers.trainers.BpeTrainer(
    special_tokens=["<|endoftext|>"], show_progress=False,
    initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
  )
  model.train_from_iterator(["one two"], trainer)
  setting.source.write_text(text)
  exact = tokenizer_lib.HFTokenizer(model.to_str().encode())
  assert exact.decode(setting.prepare(exact).tokens[:]) == text
  model.normalizer = getattr(tokenizers.normalizers, normalizer)()
  with pytest.raises(UserError, match=match) as error:
    setting.prepare(tokenizer_lib.HFTokenizer(model.to_str().encode()))
  assert str(error.value).startswith("data.tokenizer, of kind huggingface, ")
  assert exact.decode(setting.prepare(exact).tokens[:]) == text


def load(folder, **kwargs):
  lines = []
  settings = {
    "train": "corpus",
    "valid": "corpus",
    "tokenizer": "sentencepiece",
    "vocab_size": 400,
    "seed": 0,
    "corpus_stories": 100,
    "log": lines.append,
  }
  return data.load_data(folder=folder, **{**settings, **kwargs}), lines


def test_corpus_run_needs_one_call_and_reuses_all(tmp_path):
  first, _ = load(tmp_path)
  times = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
  again, lines = load(tmp_path, expect=first.hashes)
  assert lines == []
  assert {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*")} == times
  assert again.hashes == first.hashes
  assert json.loads(json.dumps(first.hashes)) == first.hashes
  assert first.train.meta["num_documents"] == 100
  assert first.valid.meta["num_documents"] == 10
  assert first.train.meta["vocab_size"] == 400
  ids = first.train.tokens[:].tolist()
  story = first.tokenizer.decode(ids[: ids.index(first.tokenizer.eos_id)])
  assert len(story.split()) > 60


def test_runs_with_other_settings_share_a_folder(tmp_path):
  """Two tokenizers, sources or seeds must not overwrite each other."""
  path = tmp_path / "corpus.txt"
  path.write_text("some other text")
  made = [
    load(tmp_path / "data"),
    load(tmp_path / "data", tokenizer="bytes"),
    load(tmp_path / "data", vocab_size=420),
    load(tmp_path / "data", seed=1),
    load(tmp_path / "data", train=str(path), tokenizer="bytes"),
  ]
  assert len({d.train.path for d, _ in made}) == 5
  assert len({d.hashes["train"]["tokens_sha256"] for d, _ in made}) == 5
  again, lines = load(tmp_path / "data")
  assert lines == []
  assert again.hashes == made[0][0].hashes


def test_changed_source_trains_the_tokenizer_anew_with_a_line(tmp_path):
  path = tmp_path / "own.txt"
  path.write_text("the cat sat on the mat\n" * 9)
  own = {"train": str(path), "valid": str(path), "vocab_size": 280}
  first, lines = load(tmp_path / "data", **own)
  assert lines == []
  path.write_text("a dog ran to the big tree\n" * 9)
  with pytest.raises(UserError, match="own.txt gives another text than the"):
    load(tmp_path / "data", **own, expect=first.hashes)
  second, lines = load(tmp_path / "data", **own)
  assert "trained anew: the source" in lines[0]
  assert "made anew: the source" in lines[1]
  assert first.hashes["tokenizer"] != second.hashes["tokenizer"]


@pytest.mark.parametrize("damage", ["{", "[]", "null", "{}", '"a"', "\xff"])
def test_a_damaged_note_of_a_tokenizer_is_told(tmp_path, damage):
  """Training anew takes minutes on a large text: not without a word."""
  path = tmp_path / "own.txt"
  path.write_text("the cat sat on the mat\n" * 9)
  own = {"train": str(path), "valid": str(path), "vocab_size": 280}
  first, _ = load(tmp_path / "data", **own)
  (note,) = (tmp_path / "data").glob("*/trained_on.json")
  note.write_text(damage, "latin1")
  second, lines = load(tmp_path / "data", **own)
  assert lines == [
    f"Tokenizer {note.parent} is trained anew: trained_on.json is damaged."
  ]
  assert second.hashes == first.hashes
  assert load(tmp_path / "data", **own)[1] == []


def test_given_tokenizer_is_used_and_compared(tmp_path):
  tok = tokenizer_lib.train_sentencepiece(["the cat sat"] * 9, 275)
  tok.save(tmp_path / "tok")
  found, _ = load(tmp_path, tokenizer=str(tmp_path / "tok"))
  assert found.hashes["tokenizer"] == tok.fingerprint
  with pytest.raises(UserError, match="data.tokenizer=bytes differs from"):
    load(tmp_path, tokenizer="bytes", expect={"tokenizer": tok.fingerprint})
  with pytest.raises(UserError, match="data.tokenizer=no/such does not exist"):
    load(tmp_path, tokenizer="no/such")


def test_folder_that_cannot_be_made_is_told(tmp_path):
  (tmp_path / "file").write_text("")
  with pytest.raises(UserError, match="data.folder=.*file/data or a source"):
    load(tmp_path / "file" / "data")


def test_no_corpus_needs_no_number_of_stories(tmp_path):
  path = tmp_path / "own.txt"
  path.write_text("the cat sat")
  found, _ = load(
    tmp_path / "data", train=str(path), valid=str(path), tokenizer="bytes",
    corpus_stories=None,
  )
  assert len(found.train.tokens) == 12


def test_a_run_that_waits_for_another_says_so(tmp_path):
  """Else the second of two runs seems to hang."""
  fcntl = pytest.importorskip("fcntl")
  lines = []
  with (tmp_path / ".lock").open("ab") as file:
    fcntl.flock(file, fcntl.LOCK_EX)

    def log(line):  # the other run ends only now
      lines.append(line)
      fcntl.flock(file, fcntl.LOCK_UN)

    load(tmp_path, tokenizer="bytes", log=log)
  assert lines == [f"Waiting for another run that prepares {tmp_path}."]


def _hashes(folder):
  return load(folder)[0].hashes


def test_processes_may_prepare_one_folder_at_the_same_time(tmp_path):
  context = multiprocessing.get_context("spawn")  # jax threads dislike fork
  with context.Pool(2) as pool:
    one, two = pool.map(_hashes, [tmp_path, tmp_path], chunksize=1)
  assert one == two == load(tmp_path)[0].hashes
  assert not list(tmp_path.rglob("*.tmp"))
