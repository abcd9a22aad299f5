"""Tokenizers: every text comes back, and no text spells a special id."""

import io
import json

import numpy as np
import pytest
import tokenizers

from taperjax.data import corpus, tokenizer as tokenizer_lib
from taperjax.errors import UserError

TEXTS = [
  "Once upon a time.\nThere was  a cat,\n\n\ta “fine” one.\n",
  "  leading and trailing blanks  ",
  "\r\n tabs\t\tand returns\r",
  "naïve café, Ærøskøbing, 你好, עברית",
  "emoji 😀👩‍🚀, NUL \x00 and other \x07 controls",
  "U+2581 ▁ ▁▁x▁, no-break\u00a0blank, wide\u3000blank, \ufffd",
  "",
  " ",
  "\n",
]
SPELLED = ["<|endoftext|>", "<s>", "</s>", "<unk>", "<0x41>", "a<|endoftext|>b"]


def train_hf(byte_level: bool) -> bytes:
  """A tokenizer.json with 300 ids, byte-level or SentencePiece-like."""
  model = tokenizers.Tokenizer(tokenizers.models.BPE(byte_fallback=True))
  special = ["<|endoftext|>"]
  if byte_level:
    pre, dec = tokenizers.pre_tokenizers, tokenizers.decoders
    model.pre_tokenizer = pre.ByteLevel(add_prefix_space=False)
    model.decoder = dec.ByteLevel()
    alphabet = pre.ByteLevel.alphabet()
  else:
    dec = tokenizers.decoders
    model.normalizer = tokenizers.normalizers.Replace(" ", "▁")
    model.decoder = dec.Sequence(
      [dec.Replace("▁", " "), dec.ByteFallback(), dec.Fuse()]
    )
    special = ["<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    alphabet = []
  trainer = tokenizers.trainers.BpeTrainer(
    vocab_size=300,
    special_tokens=special,
    initial_alphabet=alphabet,
    show_progress=False,
  )
  model.train_from_iterator(corpus.generate_stories(20, seed=0), trainer)
  return model.to_str().encode()


@pytest.fixture(scope="module")
def made():
  """One tokenizer of each kind, by name."""
  stories = corpus.generate_stories(100, seed=0)
  return {
    "bytes": tokenizer_lib.ByteTokenizer(),
    "sentencepiece": tokenizer_lib.train_sentencepiece(stories, 400),
    "huggingface": tokenizer_lib.HFTokenizer(train_hf(byte_level=True)),
  }


KINDS = pytest.mark.parametrize(
  "kind", ["bytes", "sentencepiece", "huggingface"]
)


@KINDS
def test_every_text_comes_back(made, kind):
  """Bits per byte and generated text both rest on exact decoding."""
  for text in TEXTS + SPELLED:
    assert made[kind].decode(made[kind].encode(text)) == text


@KINDS
def test_batch_is_the_same_as_one_by_one(made, kind):
  ids = made[kind].encode_batch(TEXTS)
  assert ids == [made[kind].encode(text) for text in TEXTS]
  assert made[kind].encode_batch([]) == []


@KINDS
def test_text_never_turns_into_special_ids(made, kind):
  """A story that spells `</s>` must not end the document."""
  tok = made[kind]
  special = set(np.flatnonzero(tok.id_bytes() == 0))
  assert tok.eos_id in special
  for text in SPELLED:
    assert not special.intersection(tok.encode(text))


@KINDS
def test_special_ids_are_dropped_by_decoding(made, kind):
  tok = made[kind]
  ids = np.array([tok.eos_id, *tok.encode("a b"), tok.eos_id])
  assert tok.decode(ids) == "a b"


@KINDS
def test_id_bytes_add_up_to_the_bytes_of_the_text(made, kind):
  """The denominator of bits per byte."""
  tok = made[kind]
  lengths = tok.id_bytes()
  assert lengths.shape == (tok.vocab_size,)
  for text in TEXTS + SPELLED:
    assert lengths[tok.encode(text)].sum() == len(text.encode())


def test_id_bytes_of_a_sentencepiece_like_json_add_up():
  tok = tokenizer_lib.HFTokenizer(train_hf(byte_level=False))
  text = "Tom saw a cat.\nHe ran home."
  assert tok.id_bytes()[tok.encode(text)].sum() == len(text)
  assert tok.bos_id == 0
  assert tok.eos_id == 1


def test_sizes_and_ends(made):
  assert {kind: tok.vocab_size for kind, tok in made.items()} == {
    "bytes": 257,
    "sentencepiece": 400,  # special pieces and bytes included
    "huggingface": 300,
  }
  assert {kind: tok.eos_id for kind, tok in made.items()} == {
    "bytes": 256,
    "sentencepiece": 1,
    "huggingface": 0,
  }
  assert all(tok.bos_id is None for tok in made.values())


def test_training_is_deterministic_and_silent(made, capfd):
  """A resumed run may have to train its tokenizer again, bit for bit."""
  stories = corpus.generate_stories(100, seed=0)
  again = tokenizer_lib.train_sentencepiece(stories, 400)
  assert again.fingerprint == made["sentencepiece"].fingerprint
  other = tokenizer_lib.train_sentencepiece(["the cat sat"] * 9, 275)
  assert other.fingerprint != again.fingerprint
  assert capfd.readouterr() == ("", "")


def test_long_sentences_are_not_dropped():
  """SentencePiece's default leaves out lines of more than 4,192 bytes."""
  text = "walrus " * 2000
  tok = tokenizer_lib.train_sentencepiece([text], 280)
  assert len(tok.encode("walrus walrus")) <= 4


def test_runs_of_blanks_have_pieces():
  """Indented text would otherwise cost one token for each blank."""
  text = "\n".join(f"        x{i} = {i}" for i in range(50))
  tok = tokenizer_lib.train_sentencepiece([text], 300)
  assert len(tok.encode("        ")) <= 2


def test_only_the_first_characters_train(monkeypatch):
  """Memory stays bounded on texts of gigabytes."""
  monkeypatch.setattr(tokenizer_lib, "TRAIN_CHARS", 20)
  first = ["the cat sat ", "the cat sat "]
  few = tokenizer_lib.train_sentencepiece([*first, "XYZ" * 99], 268)
  assert (
    few.fingerprint
    == (
      tokenizer_lib.train_sentencepiece(["the cat sat ", "the cat "], 268)
    ).fingerprint
  )


@pytest.mark.parametrize(
  "documents, vocab_size, match",
  [
    (["the cat sat on the mat"], 5000, r"data\.vocab_size=5000 .* at most \d+"),
    (["the cat sat on the mat"], 100, r"data\.vocab_size=100 .* at least 26\d"),
    ([], 300, "cannot be trained .* give a text with words"),
  ],
)
def test_vocab_size_that_does_not_fit_is_told(documents, vocab_size, match):
  with pytest.raises(UserError, match=match) as info:
    tokenizer_lib.train_sentencepiece(documents, vocab_size)
  assert "\n" not in str(info.value)


def test_the_proposed_vocab_size_works():
  with pytest.raises(UserError) as info:
    tokenizer_lib.train_sentencepiece(["the cat sat on the mat"], 5000)
  largest = int(str(info.value).split("at most ")[1].split(",")[0])
  tok = tokenizer_lib.train_sentencepiece(["the cat sat on the mat"], largest)
  assert tok.vocab_size == largest


@KINDS
def test_saved_tokenizer_loads_the_same(made, kind, tmp_path):
  tok = made[kind]
  tok.save(tmp_path / "tok")
  again = tokenizer_lib.load_tokenizer(tmp_path / "tok")
  assert (again.kind, again.fingerprint) == (kind, tok.fingerprint)
  assert again.encode(TEXTS[0]) == tok.encode(TEXTS[0])
  if kind != "bytes":
    bare = tokenizer_lib.load_tokenizer(tmp_path / "tok" / tok.model_name)
    assert bare.fingerprint == tok.fingerprint


def test_folder_with_only_a_tokenizer_json_loads(tmp_path):
  (tmp_path / "tokenizer.json").write_bytes(train_hf(byte_level=True))
  assert tokenizer_lib.load_tokenizer(tmp_path).kind == "huggingface"


def prefixed(decoder: list, **told) -> tokenizer_lib.HFTokenizer:
  """A tokenizer that puts a blank before a text, and its decoder."""
  model = json.loads(train_hf(byte_level=False))
  model["normalizer"] = {
    "type": "Sequence",
    "normalizers": [
      {"type": "Prepend", "prepend": "▁"},
      {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
    ],
  }
  model["decoder"] = {"type": "Sequence", "decoders": decoder}
  return tokenizer_lib.HFTokenizer(json.dumps(model).encode(), told=told)


@pytest.mark.parametrize(
  "decoder",
  [
    [
      {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
      {"type": "ByteFallback"},
      {"type": "Fuse"},
      {"type": "Strip", "content": " ", "start": 1, "stop": 0},
    ],
    [
      {"type": "ByteFallback"},
      {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first"},
      {"type": "Fuse"},
    ],
  ],
)
def test_continuation_keeps_its_first_blank(decoder):
  """Decoding takes away the blank that encoding puts before a text."""
  tok = prefixed(decoder)
  ids = tok.encode("Tom saw\n a cat")
  assert tok.decode(ids) == "Tom saw\n a cat"
  cut = next(i for i in range(1, len(ids)) if tok.decode(ids[:i]) == "Tom")
  assert tok.decode(ids[cut:], continues=True) == " saw\n a cat"
  assert tok.decode(ids[cut:]) == "saw\n a cat"
  end = [tok.eos_id]
  assert tok.decode(end + ids[cut:] + end, continues=True) == " saw\n a cat"


@KINDS
def test_continuation_of_other_tokenizers_is_their_text(made, kind):
  for text in TEXTS:
    assert made[kind].decode(made[kind].encode(text), continues=True) == text


def test_sentencepiece_with_a_dummy_prefix_continues_too():
  import sentencepiece

  model = io.BytesIO()
  sentencepiece.SentencePieceTrainer.train(
    sentence_iterator=iter(corpus.generate_stories(50, seed=0)),
    model_writer=model,
    vocab_size=320,
    model_type="bpe",
    byte_fallback=True,
    minloglevel=3,
  )
  tok = tokenizer_lib.SentencePieceTokenizer(model.getvalue())
  ids = tok.encode("was happy")
  assert tok.decode(ids) == "was happy"
  assert tok.decode(ids, continues=True) == " was happy"


def test_told_ends_survive_saving_and_count_as_another_tokenizer(tmp_path):
  definition = train_hf(byte_level=True)
  named = tokenizer_lib.HFTokenizer(definition)
  told = {"bos_id": 7, "eos_id": 5, "adds_bos": True}
  tok = tokenizer_lib.HFTokenizer(definition, told=told)
  tok.save(tmp_path)
  again = tokenizer_lib.load_tokenizer(tmp_path)
  assert (again.bos_id, again.eos_id, again.adds_bos) == (7, 5, True)
  assert again.fingerprint == tok.fingerprint != named.fingerprint
  assert again.encode_prompt("a") == [7, *again.encode("a")]
  assert (named.bos_id, named.adds_bos) == (None, False)
  assert named.encode_prompt("") == [named.eos_id]
  path = tmp_path / "tokenizer_info.json"
  path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_id": 6}))
  with pytest.raises(UserError, match="do not belong together"):
    tokenizer_lib.load_tokenizer(tmp_path)


@pytest.mark.parametrize(
  "told, match",
  [
    ({"eos_id": 300}, "eos_id=300 is not an id .* from 0 to 299"),
    ({"bos_id": -1}, "bos_id=-1 is not an id"),
    ({"adds_bos": True}, "adds a beginning of text .* tell bos_id"),
    ({"eos_id": None}, "no end-of-text token"),
  ],
)
def test_told_ends_must_exist(told, match):
  with pytest.raises(UserError, match=match):
    tokenizer_lib.HFTokenizer(train_hf(byte_level=True), told=told)


def test_wordpiece_is_refused_since_it_loses_blanks():
  model = json.loads(train_hf(byte_level=True))
  model["decoder"] = {"type": "WordPiece", "prefix": "##", "cleanup": True}
  with pytest.raises(UserError, match="decoder that does not keep the text"):
    tokenizer_lib.HFTokenizer(json.dumps(model).encode())


def test_tokenizer_without_an_end_of_text_is_refused():
  model = train_hf(byte_level=True).replace(b"<|endoftext|>", b"<|other|>")
  with pytest.raises(UserError, match="no end-of-text token; add one of"):
    tokenizer_lib.HFTokenizer(model)


@pytest.mark.parametrize(
  "name, content, match",
  [
    ("a.json", b"{}", "is not a tokenizer.json"),
    ("a.json", b"", "is not a tokenizer.json"),
    ("a.model", b"junk", "is not a SentencePiece model"),
    ("a.txt", b"", "neither a tokenizer.json nor a .model"),
  ],
)
def test_bad_tokenizer_file_is_told(tmp_path, name, content, match):
  (tmp_path / name).write_bytes(content)
  with pytest.raises(UserError, match=match) as info:
    tokenizer_lib.load_tokenizer(tmp_path / name)
  assert "\n" not in str(info.value)


def hostile(**changes) -> bytes:
  """A byte-level tokenizer.json with other parts."""
  return json.dumps(json.loads(train_hf(byte_level=True)) | changes).encode()


@pytest.mark.parametrize(
  "changes, match",
  [
    (
      {"model": {"type": "BPE", "vocab": {}, "merges": []},
       "added_tokens": []},
      "has 0 tokens with ids below 0",
    ),
    (
      {"model": {"type": "WordLevel", "unk_token": "x",
                 "vocab": {"a": 0, "</s>": 2**32 - 1}}},
      "tokens with ids below 4,294,967,296; give one without such gaps",
    ),
    (
      {"model": {"type": "WordLevel", "unk_token": "x", "vocab": {"</s>": 0}}},
      r"is not a tokenizer.json \(WordLevel error: Missing .UNK. token",
    ),
  ],
)
def test_a_tokenizer_that_the_library_takes_may_still_be_none(
  tmp_path, changes, match
):
  """It would fail at the first text, or take tables of 16 GB."""
  (tmp_path / "tokenizer.json").write_bytes(hostile(**changes))
  with pytest.raises(UserError, match=match):
    tokenizer_lib.load_tokenizer(tmp_path / "tokenizer.json")


def test_a_name_in_a_saved_folder_does_not_lead_out_of_it(made, tmp_path):
  """It might name a device, or a file that is nobody's business."""
  made["bytes"].save(tmp_path / "a")
  (tmp_path / "a" / "bytes.model").rename(tmp_path / "b")
  info = tmp_path / "a" / tokenizer_lib.INFO
  told = json.loads(info.read_text())
  info.write_text(json.dumps(told | {"model": "../b"}))
  with pytest.raises(UserError, match="is damaged"):
    tokenizer_lib.load_tokenizer(tmp_path / "a")
  info.write_text("[" * 100_000)
  with pytest.raises(UserError, match="is damaged"):
    tokenizer_lib.load_tokenizer(tmp_path / "a")


@pytest.mark.parametrize("missing", ["tokenizer_info.json", "tokenizer.model"])
def test_incomplete_folder_is_told(made, tmp_path, missing):
  made["sentencepiece"].save(tmp_path)
  (tmp_path / missing).unlink()
  with pytest.raises(UserError, match="holds no tokenizer|is damaged"):
    tokenizer_lib.load_tokenizer(tmp_path)


def test_changed_folder_is_told(made, tmp_path):
  """A model of another training under the old name would give other ids."""
  made["sentencepiece"].save(tmp_path)
  other = tokenizer_lib.train_sentencepiece(["the cat sat"] * 9, 275)
  (tmp_path / "tokenizer.model").write_bytes(other.definition)
  with pytest.raises(UserError, match="do not belong together; delete"):
    tokenizer_lib.load_tokenizer(tmp_path)
  (tmp_path / "tokenizer_info.json").write_text('{"kind": ')
  with pytest.raises(UserError, match="is damaged"):
    tokenizer_lib.load_tokenizer(tmp_path)


def test_real_text_comes_back_and_is_counted(test_data):
  """Real stories hold wrongly decoded quotation marks, among other things."""
  path = test_data / "tinystories" / "valid.txt"
  documents = path.read_text(encoding="utf-8").split("<|endoftext|>")[:300]
  tok = tokenizer_lib.train_sentencepiece(documents, 2000)
  ids = tok.encode_batch(documents)
  assert [tok.decode(row) for row in ids] == documents
  lengths = tok.id_bytes()
  assert [lengths[row].sum() for row in ids] == [
    len(document.encode()) for document in documents
  ]
