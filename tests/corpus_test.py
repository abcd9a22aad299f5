"""The embedded corpus: the same everywhere, and all of its own language."""

import collections
import math
import os
import random
import re
import subprocess
import sys

import pytest

from taperjax.data import corpus, text

NUM_STORIES = 500
PINNED = """There once was a quiet girl named Emma. Emma and Zoe were \
old friends.
Emma thought about a gift for Zoe, who liked every basket. Emma went to \
the market with her grandpa to find a soft basket. Emma hid the soft \
basket beside the bridge in the park.
"I have a surprise for you, Zoe!" said Emma. Zoe closed her eyes, and \
Emma gave her the soft basket. Zoe was so happy that she danced around \
the bridge. An orange mouse came to the park and wanted a bit of pie \
too.
Emma and Zoe smiled and played with the soft basket until the morning \
was over. Emma learned that it is good to be quiet and to help a friend."""


@pytest.fixture(scope="module")
def stories():
  return list(corpus.generate_stories(NUM_STORIES, seed=3))


@pytest.fixture(scope="module")
def sentences(stories):
  return [s for story in stories for s in corpus.split_sentences(story)]


def test_every_sentence_parses(sentences):
  """A share of parsed sentences only says something if the truth has all."""
  assert len(sentences) > 10 * NUM_STORIES
  assert [s for s in sentences if not corpus.parses(s)] == []


def test_every_template_is_used_and_parsed(stories):
  """A template that cannot be matched would hide behind a common one."""
  used = " ".join(stories)
  unused = [p for p in corpus._patterns() if not re.search(p, used)]
  assert len(unused) < 0.05 * len(corpus._patterns())  # rare casts of three


def test_shuffled_words_do_not_parse(sentences):
  rng = random.Random(0)
  shuffled = []
  for sentence in sentences[:1000]:
    words = sentence.split()
    rng.shuffle(words)
    if words != sentence.split():
      shuffled.append(" ".join(words))
  assert len(shuffled) > 900
  assert sum(map(corpus.parses, shuffled)) < 0.01 * len(shuffled)


@pytest.mark.parametrize(
  "good, bad",
  [
    (
      "There once was a shy girl named Mia.",
      "There once was a shy boy named Mia.",
    ),
    (
      "There once was an eager boy named Tom.",
      "There once was a eager boy named Tom.",
    ),
    ("Tom and Ben were good friends.", "Tom and Tom were good friends."),
    (
      "Lily hid under the log with her red ball.",
      "Lily hid under the log with his red ball.",
    ),
    (
      '"I lost my red ball in the park," said Mia.',
      '"I lost my red ball in the park" said Mia.',
    ),
    (
      "Tom looked at Mia, and Mia looked at the broken kite.",
      "Tom looked at Mia, and Anna looked at the broken kite.",
    ),
    ("At last, Mia could sing as well as Tom.", "At last, Mia could sing."),
  ],
)
def test_parsing_checks_agreement(good, bad):
  """Names, pronouns, articles and quotation marks must fit each other."""
  assert corpus.parses(good)
  assert not corpus.parses(bad)


def test_a_story_is_the_same_in_a_process_with_another_hash_seed():
  """Runs are compared across machines, so the corpus must not vary."""
  code = (
    "from taperjax.data import corpus;"
    "print(*corpus.generate_stories(20, seed=5), sep='|', end='')"
  )
  for hash_seed in ("1", "2"):
    result = subprocess.run(
      [sys.executable, "-c", code],
      env={**os.environ, "PYTHONHASHSEED": hash_seed},
      capture_output=True,
      text=True,
      check=True,
    )
    assert result.stdout == "|".join(corpus.generate_stories(20, seed=5))


def test_one_story_is_pinned():
  """A changed corpus changes all quickstart results: then change this too."""
  story = corpus.generate_story(0, 3)
  assert story == PINNED


def test_stories_are_short_and_new_with_another_seed(stories):
  lengths = [len(story.split()) for story in stories]
  share = sum(60 <= n <= 150 for n in lengths) / len(lengths)
  assert share > 0.95
  assert len(set(stories)) == NUM_STORIES
  assert not set(stories) & set(corpus.generate_stories(NUM_STORIES, seed=4))


def test_words_are_hundreds_and_most_sentences_are_new(stories, sentences):
  """The loss must have room to fall below the unigram entropy, and a model
  that writes by the grammar must write new sentences."""
  words = collections.Counter(
    word for story in stories for word in re.findall(r"\w+|[^\w\s]|\n", story)
  )
  total = sum(words.values())
  entropy = -sum(n / total * math.log(n / total) for n in words.values())
  assert 400 < len(words) < 600
  assert 5 < entropy < 5.5  # nats a word; 5.20, measured on 9,000 stories
  train = {
    s
    for story in corpus.generate_stories(1000, seed=0)
    for s in corpus.split_sentences(story)
  }
  assert sum(s not in train for s in sentences) > 0.6 * len(sentences)


def test_written_corpus_reads_back(tmp_path):
  path = tmp_path / "corpus.txt"
  corpus.write_corpus(path, 30, seed=7)
  assert path.read_text().endswith(".\n<|endoftext|>\n")
  written = list(text.iter_documents(path))
  assert written == list(corpus.generate_stories(30, seed=7))
  assert list(tmp_path.iterdir()) == [path]  # no temporary file is left


def test_splitting_keeps_a_quotation_with_its_speaker():
  text = 'He ran. "Is it here?" asked Tom. Mia said, "No." It rained.\nThe end'
  assert corpus.split_sentences(text) == [
    "He ran.",
    '"Is it here?" asked Tom.',
    'Mia said, "No."',
    "It rained.",
    "The end",
  ]
