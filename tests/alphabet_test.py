"""The alphabet: the same everywhere, certain but for one die per document."""

import collections
import math
import os
import subprocess
import sys

import pytest

from taperjax import data
from taperjax.data import alphabet, text

PINNED = ["i", "i", "+", "E", "7"]


def test_one_start_of_the_text_is_pinned():
  """A changed text changes all results on it: then change this too."""
  first = [doc[0] for doc in alphabet.generate_documents(5, seed=0)]
  assert first == PINNED


def test_the_text_does_not_depend_on_the_process():
  code = (
    "from taperjax.data import alphabet;"
    "print('|'.join(alphabet.generate_documents(20, seed=5)))"
  )
  expected = "|".join(alphabet.generate_documents(20, seed=5))
  for hash_seed in ("1", "2"):
    result = subprocess.run(
      [sys.executable, "-c", code],
      env={**os.environ, "PYTHONHASHSEED": hash_seed},
      capture_output=True,
      text=True,
      check=True,
    )
    assert result.stdout.strip() == expected


def test_only_the_first_symbol_of_a_document_is_drawn():
  """The known least loss rests on it: no other token may be uncertain."""
  symbols = alphabet.SYMBOLS
  assert len(set(symbols)) == len(symbols) == 64
  documents = list(alphabet.generate_documents(20_000, seed=0))
  assert all(doc and symbols.endswith(doc) for doc in documents)
  starts = collections.Counter(doc[0] for doc in documents)
  assert set(starts) == set(symbols)
  # 312 each on average; five standard deviations of a count.
  assert max(abs(n - 312.5) for n in starts.values()) < 5 * math.sqrt(312.5)


def test_entropy_is_that_of_the_text():
  """Measured with the counts of the text itself, one end per document."""
  documents = list(alphabet.generate_documents(20_000, seed=0))
  tokens = sum(len(doc) + 1 for doc in documents)
  measured = len(documents) * math.log(64) / tokens
  assert alphabet.entropy() == pytest.approx(0.1241, abs=5e-5)
  # The mean length has a standard error of 0.4 percent.
  assert measured == pytest.approx(alphabet.entropy(), rel=0.02)


def test_a_run_gets_two_texts_that_differ(tmp_path):
  """Train and valid have dice of their own, and a seed has others."""
  found = load(tmp_path)
  train = found.train.tokens[:].tolist()
  valid = found.valid.tokens[:].tolist()
  assert found.train.meta["num_documents"] == 20_000
  assert found.valid.meta["num_documents"] == 2_000
  assert train[: len(valid)] != valid
  end = train.index(found.tokenizer.eos_id)
  assert alphabet.SYMBOLS.endswith(found.tokenizer.decode(train[:end]))
  again = load(tmp_path)
  assert again.hashes == found.hashes
  hashes = load(tmp_path, seed=1).hashes
  for part in ("train", "valid"):
    assert (
      hashes[part]["tokens_sha256"] != found.hashes[part]["tokens_sha256"]
    )


def test_the_file_holds_the_documents(tmp_path):
  path = tmp_path / "alphabet.txt"
  alphabet.write_alphabet(path, 30, seed=2)
  expected = list(alphabet.generate_documents(30, seed=2))
  assert list(text.iter_documents(path)) == expected


def load(folder, seed=0):
  return data.load_data(
    train="alphabet",
    valid="alphabet",
    tokenizer="bytes",
    vocab_size=None,
    folder=folder,
    seed=seed,
    corpus_stories=None,
    log=print,
  )
