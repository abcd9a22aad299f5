"""Share of generated sentences that the corpus grammar accepts.

  python -m tests.story_quality WORKDIR

For a quickstart run: 64 stories from its folded model, sampled as the run's own
samples are. At least 80 percent of the whole sentences must parse, and at least
30 percent must stand nowhere in the training text; exit code 1 otherwise.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import sys

import taperjax
from taperjax.data import corpus, text
from taperjax.loop import SAMPLING

STORIES = 64
LEAST_PARSED, LEAST_NEW = 0.8, 0.3


def whole_sentences(story: str) -> list[str]:
  """Sentences up to the last full stop; what the length cut is left out."""
  sentences = [s.strip() for s in corpus.split_sentences(story)]
  sentences = [s for s in sentences if s]
  if sentences and sentences[-1][-1] not in '.!?"':
    sentences.pop()
  return sentences


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("workdir", type=pathlib.Path)
  workdir = parser.parse_args().workdir
  model = taperjax.load(workdir / "folded")
  (train,) = (workdir / "data").glob("corpus-0-*.txt")  # 0: training part
  known = set()
  for story in text.iter_documents(train):
    known.update(whole_sentences(story))
  stories = taperjax.generate(
    model,
    [""] * STORIES,
    max_new=model.config.context_len - 1,
    temperature=SAMPLING.temperature,
    top_p=SAMPLING.top_p,
  )
  sentences = [s for story in stories for s in whole_sentences(story)]
  parsed = sum(map(corpus.parses, sentences)) / len(sentences)
  new = sum(s not in known for s in sentences) / len(sentences)
  found = {
    "stories": len(stories),
    "sentences": len(sentences),
    "parsed": round(parsed, 3),
    "new": round(new, 3),
  }
  print(json.dumps(found))
  if parsed < LEAST_PARSED or new < LEAST_NEW:
    sys.exit(1)


if __name__ == "__main__":
  main()
