"""Windows: which tokens are read, and how often."""

import math
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest

from taperjax.data import tokens as token_files, windows
from taperjax.errors import UserError

TOKENS = np.arange(1000, dtype=np.uint16)


def draw(tokens=TOKENS, seed=0, step=0, batch_size=5, context_len=7, **kwargs):
  return windows.train_batch(
    tokens,
    seed=seed,
    step=step,
    batch_size=batch_size,
    context_len=context_len,
    **kwargs,
  )


def test_training_windows_are_contiguous_and_cover_the_text():
  starts = set()
  for step in range(2000):
    batch = draw(TOKENS[:20], step=step)
    assert batch.dtype == np.int32
    assert batch.shape == (5, 8)
    np.testing.assert_array_equal(batch - batch[:, :1], [list(range(8))] * 5)
    starts.update(batch[:, 0].tolist())
  assert starts == set(range(13))  # first and last window included


def test_batch_depends_on_seed_and_step_alone():
  """A resumed run draws the batches that an unstopped one would draw."""
  first = draw(seed=3, step=17)
  draw(seed=3, step=16)
  np.testing.assert_array_equal(draw(seed=3, step=17), first)
  batches = {
    draw(seed=seed, step=step).tobytes()
    for seed in (0, 1, 17, -1, 2**32, 2**63)
    for step in (0, 1, 17, 2**32)
  }
  assert len(batches) == 24


def test_one_batch_is_pinned():
  """Another numpy must draw the same windows, or a resumed run differs."""
  assert draw(seed=1, step=2)[:, 0].tolist() == [
    703,
    307,
    130,
    354,
    432,
  ]


def test_rows_are_those_of_the_global_batch():
  """Processes share one batch, however many there are."""
  whole = draw(batch_size=6)
  parts = [draw(batch_size=6, rows=slice(i, i + 2)) for i in (0, 2, 4)]
  np.testing.assert_array_equal(np.concatenate(parts), whole)


class Recorder:
  """Stands for a file with 3 * 2**31 tokens and notes what is read."""

  def __init__(self):
    self.starts = []
    self.num_read = 0

  def __len__(self):
    return 3 * 2**31

  def __getitem__(self, window):
    self.starts.append(window.start)
    self.num_read += window.stop - window.start
    return np.zeros(window.stop - window.start, np.uint16)


def test_long_files_are_read_everywhere_and_at_the_windows_only():
  """A start of 32 bits would never reach the end of a large text."""
  recorder = Recorder()
  draw(recorder, batch_size=100)
  assert len(recorder.starts) == 100
  assert max(recorder.starts) > 2**32
  assert recorder.num_read == 100 * 8


@pytest.mark.skipif(
  not pathlib.Path("/proc/self/statm").exists(), reason="needs /proc"
)
def test_memory_stays_flat_on_a_file_of_20_gb(tmp_path):
  """A memory map keeps what it has touched: 64 KB a window, 200 MB here."""
  path = tmp_path / "sparse.bin"
  with path.open("wb") as file:
    file.truncate(20 * 10**9)
  tokens = token_files.Stream(path, np.dtype("<u2"))
  assert len(tokens) == 10**10

  def resident():
    pages = pathlib.Path("/proc/self/statm").read_text().split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")

  def draw_at(step):
    return windows.train_batch(
      tokens, seed=0, step=step, batch_size=16, context_len=512
    )

  draw_at(0)
  before = resident()
  for step in range(200):
    assert draw_at(step).shape == (16, 513)
  assert resident() - before < 20 * 2**20


@pytest.mark.parametrize("length", [2, 7, 8, 9, 15, 16, 57, 100])
@pytest.mark.parametrize("batch_size", [1, 3])
def test_every_token_but_the_first_is_scored_once(length, batch_size):
  tokens = TOKENS[1 : length + 1]
  scored, shapes, num_batches = [], set(), 0
  for batch, mask in windows.eval_batches(
    tokens, batch_size=batch_size, context_len=7
  ):
    num_batches += 1
    shapes.add((batch.shape, mask.shape, batch.dtype.name, mask.dtype.name))
    targets, inputs = batch[:, 1:][mask > 0], batch[:, :-1][mask > 0]
    np.testing.assert_array_equal(inputs, targets - 1)
    scored += targets.tolist()
    assert not batch[:, 1:][mask == 0].any()
  assert scored == tokens[1:].tolist()
  assert num_batches == math.ceil((length - 1) / 7 / batch_size)
  assert shapes == {((batch_size, 8), (batch_size, 7), "int32", "float32")}


def test_max_windows_keeps_the_first_windows():
  batches = list(
    windows.eval_batches(TOKENS, batch_size=3, context_len=7, max_windows=4)
  )
  assert [mask.sum() for _, mask in batches] == [21, 7]
  np.testing.assert_array_equal(batches[1][0][0], np.arange(21, 29))


def test_documents_begin_with_bos_and_are_cut():
  documents = [[5, 6], [], list(range(10, 30)), [7]]
  batches = list(
    windows.document_batches(documents, bos_id=99, batch_size=3, context_len=4)
  )
  ids = np.concatenate([batch for batch, _ in batches]).tolist()
  masks = np.concatenate([mask for _, mask in batches]).tolist()
  assert ids == [
    [99, 5, 6, 0, 0],
    [99, 0, 0, 0, 0],
    [99, 10, 11, 12, 0],  # four ids with BOS: three predictions
    [99, 7, 0, 0, 0],
    [0, 0, 0, 0, 0],
    [0, 0, 0, 0, 0],
  ]
  assert masks == [
    [1, 1, 0, 0],
    [0, 0, 0, 0],
    [1, 1, 1, 0],
    [1, 0, 0, 0],
    [0, 0, 0, 0],
    [0, 0, 0, 0],
  ]


def test_documents_need_a_context_of_two():
  """With one id, the beginning of text, there is nothing to predict."""
  shape = {"bos_id": 99, "batch_size": 3, "context_len": 1}
  with pytest.raises(UserError, match="context_len=1 has room for .* 2 or mor"):
    next(windows.document_batches([[5, 6]], **shape))


def test_text_shorter_than_a_window_is_told():
  match = r"context_len=7 needs .* at least 8 tokens, but it has 7; give"
  with pytest.raises(UserError, match=match):
    draw(TOKENS[:7])
  assert draw(TOKENS[:8]).shape == (5, 8)


def test_text_without_a_token_to_score_is_told(tmp_path):
  """By its file, where it is one; the context has no part in it."""
  with pytest.raises(UserError, match="data=the text holds 1 tokens, .* give"):
    next(windows.eval_batches(TOKENS[:1], batch_size=1, context_len=7))
  TOKENS[:1].tofile(tmp_path / "valid.bin")
  tokens = token_files.Stream(tmp_path / "valid.bin", TOKENS.dtype)
  with pytest.raises(UserError, match=r"data=/.*valid\.bin holds 1 tokens"):
    next(windows.eval_batches(tokens, batch_size=1, context_len=7))


def test_importing_windows_needs_numpy_only():
  """Workers that only draw batches start at once."""
  code = (
    "import sys, taperjax.data.windows;"
    "heavy = {'jax', 'tensorflow_datasets', 'pyarrow', 'sentencepiece',"
    " 'tokenizers', 'pooch', 'requests'};"
    "sys.exit(repr(heavy & set(sys.modules)) if heavy & set(sys.modules)"
    " else 0)"
  )
  subprocess.run([sys.executable, "-c", code], check=True)
