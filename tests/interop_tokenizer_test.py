"""Tokenizers of other formats give the ids that their own programs give."""

import json
import struct

import numpy as np
import pytest
import tokenizers

from taperjax.data import corpus, tokenizer as tokenizer_lib
from taperjax.errors import UserError
from taperjax.interop import tokenizer_files
from tests import data_tokenizer_test

TEXTS = [
  *data_tokenizer_test.TEXTS,
  *data_tokenizer_test.SPELLED,
  "x<0x0A>y <|im_end|>\n\n  <s> ▁▁ </s>",
  "ab ▁ab  ab\u0301 \ue000\U0010ffff",
  "1234567 it's THEY'RE\r\n\r\n",
]


def random_texts(count: int = 200) -> list[str]:
  """Strings of all kinds of characters, and of ordinary words in between."""
  rng = np.random.default_rng(0)
  words = ["Lily", " the", " ", "  ", "\n", "▁", "</s>", "<|endoftext|>", "'s"]
  words += ["😀", "e\u0301", "é", "\u3000", "你", "\x00", "�", "aaaa", "99"]

  def character():
    code = int(rng.integers(1, 0x110000 if rng.random() < 0.3 else 0x500))
    return "?" if 0xD800 <= code < 0xE000 else chr(code)

  return [
    "".join(
      words[rng.integers(len(words))] if rng.random() < 0.7 else character()
      for _ in range(rng.integers(1, 30))
    )
    for _ in range(count)
  ]


def train_byte_level(pre, vocab_size: int = 400) -> bytes:
  """A byte-level tokenizer.json with two special tokens, ids 0 and 1."""
  model = tokenizers.Tokenizer(tokenizers.models.BPE())
  model.pre_tokenizer = pre
  model.decoder = tokenizers.decoders.ByteLevel()
  trainer = tokenizers.trainers.BpeTrainer(
    vocab_size=vocab_size,
    special_tokens=["<|endoftext|>", "<|im_start|>"],
    initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    show_progress=False,
  )
  model.train_from_iterator(corpus.generate_stories(50, seed=0), trainer)
  return model.to_str().encode()


def smollm_pre():
  pre = tokenizers.pre_tokenizers
  return pre.Sequence(
    [pre.Digits(individual_digits=True), pre.ByteLevel(add_prefix_space=False)]
  )


def write_llama2c(path, pieces=None) -> int:
  """A file with every letter and a few words; returns the vocabulary size."""
  if pieces is None:
    words = [" a", "aa", "ab", "aba", "é", "\n", "ba", " aa", "aaa"]
    pieces = [(w.encode(), -float(i)) for i, w in enumerate(words)]
    pieces += [(c.encode(), -99.0) for c in " abxyz"]
  start = [b"<unk>", b"\n<s>\n", b"\n</s>\n"]
  start += [f"<0x{b:02X}>".encode() for b in range(256)]
  pieces = [(piece, 0.0) for piece in start] + pieces
  data = struct.pack("<i", max(len(piece) for piece, _ in pieces))
  for piece, score in pieces:
    data += struct.pack("<fi", score, len(piece)) + piece
  path.write_bytes(data)
  return len(pieces)


def plain_llama2c(path, vocab_size: int):
  """The algorithm of the format's description, as a function of the text."""
  data, offset, vocab = path.read_bytes(), 4, {}
  for i in range(vocab_size):
    score, length = struct.unpack_from("<fi", data, offset)
    if i >= 259:
      vocab[data[offset + 8 : offset + 8 + length].decode()] = (score, i)
    offset += 8 + length

  def joint(left, right) -> float:
    if isinstance(left, int) or isinstance(right, int):
      return -np.inf
    return vocab.get(left + right, (-np.inf, -1))[0]

  def encode(text: str) -> list[int]:
    parts = []
    for char in " " + text if text else "":
      parts += [char] if char in vocab else [*char.encode()]
    scores = [joint(*pair) for pair in zip(parts, parts[1:], strict=False)]
    while scores and (best := max(scores)) > -np.inf:
      i = scores.index(best)
      parts[i : i + 2] = [parts[i] + parts[i + 1]]
      del scores[i]
      for j in (i - 1, i):
        if 0 <= j < len(scores):
          scores[j] = joint(parts[j], parts[j + 1])
    return [
      vocab[part][1] if isinstance(part, str) else part + 3 for part in parts
    ]

  return encode


@pytest.fixture(scope="module")
def made(tmp_path_factory):
  """One tokenizer of each kind, by name."""
  path = tmp_path_factory.mktemp("llama2c") / "tok.bin"
  stories = corpus.generate_stories(100, seed=0)
  pre = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
  return {
    "bytes": tokenizer_lib.ByteTokenizer(),
    "sentencepiece": tokenizer_lib.train_sentencepiece(stories, 400),
    "gpt2": tokenizer_lib.HFTokenizer(train_byte_level(pre)),
    "smollm": tokenizer_lib.HFTokenizer(train_byte_level(smollm_pre())),
    "llama2c": tokenizer_files.from_llama2c(path, write_llama2c(path)),
  }


KINDS = pytest.mark.parametrize(
  "kind", ["bytes", "sentencepiece", "gpt2", "smollm", "llama2c"]
)


def test_llama2c_ids_are_those_of_its_reference(test_data):
  folder = test_data / "stories260K"
  tok = tokenizer_files.from_llama2c(folder / "tok512.bin", 512)
  reference = json.loads((folder / "reference.json").read_text())
  for text, ids in reference["encode"].items():
    assert tok.encode_prompt(text) == ids
    assert tok.encode(text) == ids[1:]
    assert tok.decode(ids) == text
  ids, text = (
    reference["greedy_from_bos_token_ids"],
    reference["greedy_text"],
  )
  assert tok.decode(ids, continues=True) == text
  assert tok.decode(ids) == text.removeprefix(" ")
  assert (tok.bos_id, tok.eos_id, tok.adds_bos) == (1, 1, True)


def test_llama2c_ids_of_stories_follow_the_description(test_data):
  path = test_data / "stories260K" / "tok512.bin"
  encode = plain_llama2c(path, 512)
  tok = tokenizer_files.from_llama2c(path, 512)
  valid = (test_data / "tinystories" / "valid.txt").read_text(encoding="utf-8")
  stories = valid.split("<|endoftext|>")[:200]
  ids = tok.encode_batch(stories)
  assert sum(len(row) for row in ids) > 50_000
  assert ids == [encode(story) for story in stories]
  assert [tok.decode(row) for row in ids] == stories


def test_llama2c_ids_of_odd_texts_follow_the_description(made, tmp_path):
  """Overlapping cuts ("aaa", "aba"), bytes, U+2581."""
  size = write_llama2c(tmp_path / "tok.bin")
  encode = plain_llama2c(tmp_path / "tok.bin", size)
  tok = made["llama2c"]
  rng = np.random.default_rng(1)
  knots = ["".join(rng.choice(list(" ab"), 20)) for _ in range(200)]
  for text in TEXTS + random_texts() + knots:
    assert tok.encode(text) == encode(text)
    assert tok.decode(tok.encode(text)) == text


@pytest.mark.parametrize("cut", [0, 3, 4, 9, 12, 500, -1])
def test_cut_llama2c_file_is_told(tmp_path, cut):
  path = tmp_path / "tok.bin"
  size = write_llama2c(path)
  path.write_bytes(path.read_bytes()[:cut])
  with pytest.raises(UserError, match="so it is no llama2.c tok") as info:
    tokenizer_files.from_llama2c(path, size)
  assert "\n" not in str(info.value)


@pytest.mark.parametrize(
  "pieces, match",
  [
    ([(b"\xff", 0.0)], "token 259 that is not UTF-8"),
    ([(b"a", 0.0), (b"a", 1.0)], "the piece 'a' twice"),
  ],
)
def test_odd_llama2c_pieces_are_told(tmp_path, pieces, match):
  size = write_llama2c(tmp_path / "tok.bin", pieces)
  with pytest.raises(UserError, match=match):
    tokenizer_files.from_llama2c(tmp_path / "tok.bin", size)


def test_inconsistent_llama2c_file_is_told(tmp_path):
  path = tmp_path / "tok.bin"
  size = write_llama2c(path)
  data = path.read_bytes()
  for changed, told, match in [
    (data + b"1", size, "1 bytes after the last token"),
    (data, size - 1, "bytes after the last token"),
    (data, size + 1, f"ends in token {size}"),
    (data.replace(b"<0x01>", b"<0x02>"), size, "does not have the 256 bytes"),
    (b"\1" + data[1:], size, "longest token that is too short"),
    (data[:8] + b"\xff\xff\xff\xff" + data[12:], size, "the length -1"),
  ]:
    path.write_bytes(changed)
    with pytest.raises(UserError, match=match):
      tokenizer_files.from_llama2c(path, told)
  with pytest.raises(UserError, match="cannot be read"):
    tokenizer_files.from_llama2c(tmp_path / "none.bin", size)


def auto(tok, folder):
  """The exported tokenizer, in transformers."""
  transformers = pytest.importorskip("transformers")
  folder.mkdir(exist_ok=True)
  (folder / "config.json").write_text('{"model_type": "llama"}')
  content = tokenizer_files.to_tokenizer_json(tok)
  (folder / "tokenizer.json").write_bytes(content)
  config = tokenizer_files.tokenizer_config(tok)
  (folder / "tokenizer_config.json").write_text(json.dumps(config))
  return transformers.AutoTokenizer.from_pretrained(folder)


@KINDS
def test_auto_tokenizer_gives_our_ids(made, kind, tmp_path):
  tok = made[kind]
  found = auto(tok, tmp_path / kind)
  texts = TEXTS + random_texts() + [*corpus.generate_stories(50, seed=3)]
  start = [tok.bos_id] if tok.adds_bos else []
  for text, ids in zip(texts, found(texts)["input_ids"], strict=True):
    assert ids == start + tok.encode(text)
    assert found.decode(ids, skip_special_tokens=True) == text
  assert found.encode("a", add_special_tokens=False) == tok.encode("a")
  for name, i in tokenizer_files.special_ids(tok).items():
    assert getattr(found, name) == i
  assert len(found) == tok.vocab_size


@KINDS
def test_exported_folder_reads_as_the_same_tokenizer(made, kind, tmp_path):
  tok = made[kind]
  auto(tok, tmp_path / kind)
  again = tokenizer_files.from_hf_folder(tmp_path / kind)
  assert [again.encode(text) for text in TEXTS] == tok.encode_batch(TEXTS)
  ends = lambda t: (t.bos_id, t.eos_id, t.adds_bos, t.vocab_size)
  assert ends(again) == ends(tok)


def test_real_sentencepiece_text_has_the_same_ids_as_tokenizer_json(
  test_data, tmp_path
):
  """1 MB of real stories, in pieces that were trained on other ones."""
  path = test_data / "tinystories" / "train.txt"
  with path.open(encoding="utf-8") as file:
    documents = file.read(1_000_000).split("<|endoftext|>")
  tok = tokenizer_lib.train_sentencepiece(documents, 4000)
  valid = (test_data / "tinystories" / "valid.txt").read_text(encoding="utf-8")
  stories = valid.split("<|endoftext|>") + random_texts(2000)
  told = tokenizer_files.special_ids(tok)
  same = tokenizer_lib.HFTokenizer(
    tokenizer_files.to_tokenizer_json(tok),
    told={"bos_id": None, "eos_id": told["eos_token_id"]},
  )
  assert same.encode_batch(stories) == tok.encode_batch(stories)
  np.testing.assert_array_equal(same.id_bytes(), tok.id_bytes())
  found = auto(tok, tmp_path)(stories)["input_ids"]
  assert found == tok.encode_batch(stories)


def test_sentencepiece_that_has_no_equal_is_refused(tmp_path):
  import io

  import sentencepiece

  for options, match in [
    ({"model_type": "unigram"}, "another model than BPE"),
    ({"add_dummy_prefix": True}, "a blank before each text"),
    ({"normalization_rule_name": "nfkc"}, "has normalization"),
    ({"user_defined_symbols": ["cat"]}, "user-defined words"),
  ]:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(**{
      "sentence_iterator": iter(corpus.generate_stories(50, seed=0)),
      "model_writer": model,
      "model_type": "bpe",
      "vocab_size": 320,
      "normalization_rule_name": "identity",
      "add_dummy_prefix": False,
      "remove_extra_whitespaces": False,
      "byte_fallback": True,
      "minloglevel": 3,
      **options,
    })
    tok = tokenizer_lib.SentencePieceTokenizer(model.getvalue())
    with pytest.raises(UserError, match=match):
      tokenizer_files.to_tokenizer_json(tok)


def hf_folder(folder, **files) -> None:
  folder.mkdir(exist_ok=True)
  (folder / "tokenizer.json").write_bytes(train_byte_level(smollm_pre()))
  for name, content in files.items():
    (folder / f"{name}.json").write_text(json.dumps(content))


@pytest.mark.parametrize(
  "files, bos, eos",
  [
    ({}, None, 0),
    ({"config": {"bos_token_id": 5, "eos_token_id": [7, 8]}}, 5, 7),
    (
      {
        "generation_config": {"eos_token_id": 3},
        "config": {"bos_token_id": 5, "eos_token_id": 7},
      },
      5,
      3,
    ),
    (
      {
        "tokenizer_config": {
          "bos_token": None,
          "eos_token": {"content": "<|im_start|>"},
        },
        "config": {"bos_token_id": 5, "eos_token_id": 7},
      },
      None,
      1,
    ),
  ],
)
def test_ends_of_a_hugging_face_folder(tmp_path, files, bos, eos):
  hf_folder(tmp_path, **files)
  tok = tokenizer_files.from_hf_folder(tmp_path)
  assert (tok.bos_id, tok.eos_id, tok.adds_bos) == (bos, eos, False)


@pytest.mark.parametrize(
  "files, match",
  [
    ({"config": {"eos_token_id": 400}}, "eos_id=400 is not an id"),
    ({"config": {"eos_token_id": "x"}}, "eos_id='x' is not an id"),
    ({"tokenizer_config": {"eos_token": "</x>"}}, "eos_token='</x>' is not in"),
    ({"tokenizer_config": {"eos_token": "\ud800"}}, "is not in tokenizer.json"),
    ({"tokenizer_config": {"eos_token": ["x"]}}, "is not in tokenizer.json"),
    ({"config": [1]}, "config.json holds no JSON object"),
  ],
)
def test_wrong_ends_of_a_hugging_face_folder_are_told(tmp_path, files, match):
  hf_folder(tmp_path, **files)
  with pytest.raises(UserError, match=match):
    tokenizer_files.from_hf_folder(tmp_path)


def test_post_processor_that_ends_texts_is_refused(tmp_path):
  """Beginnings of text are kept as adds_bos; no model here saw other ids."""
  hf_folder(tmp_path)
  path = tmp_path / "tokenizer.json"
  model = tokenizers.Tokenizer.from_file(str(path))
  for template, adds in [("<|im_start|> $A", True), ("$A <|im_start|>", None)]:
    model.post_processor = tokenizers.processors.TemplateProcessing(
      single=template, special_tokens=[("<|im_start|>", 1)]
    )
    path.write_text(model.to_str())
    (tmp_path / "config.json").write_text('{"bos_token_id": 1}')
    if adds:
      assert tokenizer_files.from_hf_folder(tmp_path).adds_bos
    else:
      with pytest.raises(UserError, match="its post-processor makes"):
        tokenizer_files.from_hf_folder(tmp_path)


def test_folder_without_a_tokenizer_json_has_none(tmp_path):
  assert tokenizer_files.from_hf_folder(tmp_path) is None


@KINDS
def test_gguf_metadata_gives_the_same_ids_back(made, kind):
  tok = made[kind]
  metadata = tokenizer_files.to_gguf(tok, tok.vocab_size)
  again = tokenizer_files.from_gguf(metadata, "a.gguf")
  texts = TEXTS + random_texts()
  assert again.encode_batch(texts) == tok.encode_batch(texts)
  assert [again.decode(again.encode(text)) for text in texts] == texts
  assert (again.eos_id, again.adds_bos) == (tok.eos_id, tok.adds_bos)
  assert again.bos_id == (tok.eos_id if tok.bos_id is None else tok.bos_id)
  longer = tokenizer_files.to_gguf(tok, tok.vocab_size + 3)
  again = tokenizer_files.from_gguf(longer, "a.gguf")
  assert again.vocab_size == tok.vocab_size + 3
  assert again.encode_batch(texts) == tok.encode_batch(texts)


def test_a_blank_is_a_piece_in_gguf_and_no_byte():
  """llama.cpp looks a blank up as U+2581, whose bytes would be three others."""
  tok = tokenizer_lib.ByteTokenizer()
  metadata = tokenizer_files.to_gguf(tok, 257)
  assert metadata["tokenizer.ggml.tokens"][32] == "\u2581"
  kinds = metadata["tokenizer.ggml.token_type"]
  assert (kinds[31], kinds[32], kinds[33]) == (6, 1, 6)


def test_llama3_words_are_cut_as_there(made):
  metadata = tokenizer_files.to_gguf(made["gpt2"], 400)
  words = ["123", "1234"]
  metadata |= {
    "tokenizer.ggml.pre": "llama-bpe",
    "tokenizer.ggml.tokens": metadata["tokenizer.ggml.tokens"] + words,
    "tokenizer.ggml.token_type": [1] * 402,
    "tokenizer.ggml.bos_token_id": 1,
  }
  del metadata["tokenizer.ggml.add_bos_token"]
  tok = tokenizer_files.from_gguf(metadata, "a.gguf")
  four = tok.encode("4")
  assert tok.encode("1234") == [400, *four]  # three digits, whole word first
  assert tok.adds_bos
  again = tokenizer_files.to_gguf(tok, 402)
  assert again["tokenizer.ggml.pre"] == "llama-bpe"


@pytest.mark.parametrize(
  "change, match",
  [
    ({"model": "rwkv"}, r"model='rwkv' is neither gpt2 nor llama"),
    ({"pre": "qwen2"}, r"pre='qwen2' is not one of gpt-2, smollm, llama-bpe"),
    ({"pre": None}, r"pre=None is not one of"),
    ({"token_type": [1] * 399 + [6]}, "token_type='byte' of .* not supported"),
    ({"token_type": [1]}, "tokens have 1 types"),
    ({"tokens": []}, "tokens=0"),
    ({"tokens": ["a"] * 400}, "holds a token twice"),
    ({"merges": ["ab"]}, "not a pair"),
    ({"merges": ["zz zz"]}, "is not a tokenizer.json"),
    ({"eos_token_id": 400}, "eos_id=400 is not an id"),
    ({"add_eos_token": True}, "would end each prompt"),
    ({"model": "llama"}, "scores=0 are not those"),
  ],
)
def test_gguf_tokenizers_that_are_not_known_are_refused(made, change, match):
  metadata = tokenizer_files.to_gguf(made["gpt2"], 400)
  metadata |= {f"tokenizer.ggml.{key}": x for key, x in change.items()}
  with pytest.raises(UserError, match=match) as info:
    tokenizer_files.from_gguf(metadata, "a.gguf")
  assert "\n" not in str(info.value)


@pytest.mark.parametrize(
  "change, match",
  [
    ({"normalizer": {"type": "NFC"}}, "has a normalizer"),
    ({"pre_tokenizer": {"type": "Whitespace"}}, "another way of cutting"),
  ],
)
def test_byte_level_that_gguf_cannot_hold_is_refused(made, change, match):
  parts = json.loads(made["gpt2"].definition) | change
  tok = tokenizer_lib.HFTokenizer(json.dumps(parts).encode())
  with pytest.raises(UserError, match=match):
    tokenizer_files.to_gguf(tok, 400)


def test_merges_that_scores_do_not_give_are_refused(made):
  parts = json.loads(made["llama2c"].definition)
  parts["model"]["merges"].pop()
  tok = tokenizer_lib.HFTokenizer(json.dumps(parts).encode())
  with pytest.raises(UserError, match="merges that no scores"):
    tokenizer_files.to_gguf(tok, tok.vocab_size)


def test_a_piece_like_the_blank_of_gguf_is_refused(tmp_path):
  pieces = [(b" ", 0.0), ("▁".encode(), 0.0)]
  size = write_llama2c(tmp_path / "tok.bin", pieces)
  tok = tokenizer_files.from_llama2c(tmp_path / "tok.bin", size)
  assert tok.encode("▁") == [259, 260]
  with pytest.raises(UserError, match=r"U\+2581 beside those with blanks"):
    tokenizer_files.to_gguf(tok, size)


def test_pieces_whose_merges_would_outgrow_the_memory_are_refused(tmp_path):
  """Of n pieces a, aa, aaa, ... there are n^2 / 2 merges of n characters."""
  path = tmp_path / "tok.bin"
  size = write_llama2c(path, [(b"a", 0.0), (b"a" * 256, 0.0)])
  assert tokenizer_files.from_llama2c(path, size).encode("a")
  size = write_llama2c(path, [(b"a", 0.0), (b"a" * 257, 0.0)])
  with pytest.raises(UserError, match="has a piece of 257 characters"):
    tokenizer_files.from_llama2c(path, size)


def test_a_score_that_is_no_number_is_refused(tmp_path):
  """Pieces sorted by it would come in any order."""
  size = write_llama2c(tmp_path / "tok.bin", [(b"a", float("nan"))])
  with pytest.raises(UserError, match="a score that is not finite"):
    tokenizer_files.from_llama2c(tmp_path / "tok.bin", size)
