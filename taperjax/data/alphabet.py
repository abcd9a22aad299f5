"""The alphabet: text in which all but one token in 33 is certain.

A document is the alphabet of base64 from one of its 64 symbols on to the last:

    wxyz0123456789+/

Each symbol tells the next, and `/` the end of the document; only the first one
is drawn, and all are equally likely. So the least loss that a model can have is
known: ln 64 nats once in a document of 33.5 tokens on average, its end
included, 0.124 nats per token (`entropy`). There are but 64 documents, and both
parts of the text hold them all: this is a text for how a model gives certain
tokens their probability (configs/chase.py), not for what it can generalize.
"""

from __future__ import annotations

import math
import os
import random
import string
from collections.abc import Iterator

from taperjax.data import files, text

SYMBOLS = (
  string.ascii_uppercase + string.ascii_lowercase + string.digits + "+/"
)


def generate_documents(num_documents: int, seed: int) -> Iterator[str]:
  """The first documents of the text with this seed; a pure function."""
  rng = random.Random(f"taperjax alphabet {seed}")  # a str is hashed by sha512
  for _ in range(num_documents):
    # From `random()` alone: that is stable over versions.
    yield SYMBOLS[int(rng.random() * len(SYMBOLS)) :]


def entropy() -> float:
  """Nats per token that no model can save: one die per document."""
  mean_tokens = (len(SYMBOLS) + 1) / 2 + 1  # 1 to 64 symbols, and the end
  return math.log(len(SYMBOLS)) / mean_tokens


def write_alphabet(
  path: str | os.PathLike, num_documents: int, seed: int
) -> None:
  """Writes documents as .txt, each followed by a line `<|endoftext|>`."""
  with files.atomic_write(path) as file:
    for document in generate_documents(num_documents, seed):
      file.write(f"{document}\n{text.SEPARATOR}\n".encode())
