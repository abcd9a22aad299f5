"""Windows of context_len + 1 tokens: random for training, fixed for scoring.

Axis letters: B batch, L context length, P = L + 1 (inputs and targets share
the window: inputs are `[:, :-1]`, targets `[:, 1:]`). Only numpy is needed.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from taperjax.errors import UserError


def train_batch(
  tokens: np.ndarray,
  *,
  seed: int,
  step: int,
  batch_size: int,
  context_len: int,
  rows: slice | None = None,
) -> np.ndarray:
  """Random contiguous windows: the global batch is a function of (seed, step).

  Philox is keyed by the pair itself, so a resumed run needs no generator
  state and two steps can never share a stream.

  Args:
    tokens: one stream of ids, 1-D, read at the windows only.
    seed: any integer, taken modulo 2**64.
    step: step number, 0 or more.
    batch_size: rows of the global batch, over all processes.
    context_len: inputs per window; a window holds one token more.
    rows: the rows of the global batch that this process wants; None is all.

  Returns:
    batch_BP, int32.
  """
  if len(tokens) <= context_len:
    raise UserError(
      f"context_len={context_len} needs a text of at least {context_len + 1} "
      f"tokens, but it has {len(tokens)}; give a longer text or a smaller "
      "context_len."
    )
  key = np.array([seed % 2**64, step % 2**64], np.uint64)
  rng = np.random.Generator(np.random.Philox(key=key))
  starts = rng.integers(0, len(tokens) - context_len, size=batch_size)
  if rows is not None:
    starts = starts[rows]
  batch_BP = np.empty((len(starts), context_len + 1), np.int32)
  for row_P, start in zip(batch_BP, starts, strict=True):
    row_P[:] = tokens[start : start + context_len + 1]
  return batch_BP


def eval_batches(
  tokens: np.ndarray,
  *,
  batch_size: int,
  context_len: int,
  max_windows: int | None = None,
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
  """Fixed windows with stride context_len: all tokens but the first, once.

  The last window is padded with 0 and masked there; the last batch is filled
  up with fully masked rows, so that all batches have one shape.

  Yields:
    (batch_BP int32, mask_BL float32), mask 1 where a target is scored.
  """
  if len(tokens) < 2:
    where = getattr(tokens, "path", "the text")  # of a `tokens.Stream`
    raise UserError(
      f"data={where} holds {len(tokens)} tokens, and the first is not scored; "
      "give a text of 2 or more."
    )
  starts = range(0, len(tokens) - 1, context_len)[:max_windows]
  windows = (tokens[start : start + context_len + 1] for start in starts)
  yield from _pad_batches(windows, batch_size, context_len)


def document_batches(
  documents_ids: Iterable[Sequence[int]],
  *,
  bos_id: int,
  batch_size: int,
  context_len: int,
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
  """One document a row: bos_id before it, cut at context_len ids.

  bos_id counts as one of the context_len ids, so that a row has at most
  context_len - 1 predictions; the rest of a longer document is not scored.

  Yields:
    (batch_BP int32, mask_BL float32) as `eval_batches`.
  """
  if context_len < 2:
    raise UserError(
      f"context_len={context_len} has room for the beginning of a document "
      "only; use a model with a context of 2 or more."
    )
  windows = ([bos_id, *ids[: context_len - 1]] for ids in documents_ids)
  yield from _pad_batches(windows, batch_size, context_len)


def _pad_batches(
  windows: Iterable[Sequence[int]], batch_size: int, context_len: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
  """Pads windows to one length, and the last batch to batch_size rows."""
  windows = iter(windows)
  while group := list(itertools.islice(windows, batch_size)):
    batch_BP = np.zeros((batch_size, context_len + 1), np.int32)
    mask_BL = np.zeros((batch_size, context_len), np.float32)
    for row, window in enumerate(group):
      batch_BP[row, : len(window)] = window
      mask_BL[row, : len(window) - 1] = 1
    yield batch_BP, mask_BL
