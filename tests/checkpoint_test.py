"""Checkpoints: nothing but the saved bits comes back, whatever the damage."""

import json
import logging
import os
import pathlib
import shutil
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from taperjax import checkpoint
from taperjax.checkpoint import Checkpoints, load_arrays
from taperjax.errors import UserError

META = {
  "config": {"lr": 1e-3, "odd": 0.1 + 0.2, "tiny": 5e-324, "name": "ä"},
  "data": {"position": 12345678901234567890},
  "flags": [True, None, -0.0],
}


class Moments(NamedTuple):
  """Stands for an optax state."""

  mu: dict
  empty: tuple = ()


def make_state(scale: float = 1.0) -> dict:
  """Sizes differ pairwise; one leaf of every kind that a run has."""
  # Large and random: orbax keeps small arrays inside nodes with a checksum,
  # but large ones bare.
  w_DF = scale * np.random.RandomState(0).normal(size=(20, 15))
  w_DF = jnp.asarray(w_DF, jnp.float32)
  return {
    "params": {"w": w_DF, "half": jnp.ones(7, jnp.bfloat16) * scale},
    "taper": {},
    "opt": Moments({"w": w_DF * 2}),
    "step": jnp.array(3, jnp.int32),
    "none": jnp.zeros((0, 4)),
    "key": jax.random.split(jax.random.key(7), 2),
  }


def bits(tree) -> list[bytes]:
  """Raw bytes of every leaf: equality without tolerance."""
  return [
    np.asarray(
      jax.random.key_data(x)
      if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)
      else x
    ).tobytes()
    for x in jax.tree.leaves(tree)
  ]


def save_steps(folder, steps=(1, 2), **kwargs) -> None:
  checkpoints = Checkpoints(folder)
  for step in steps:
    checkpoints.save(step, make_state(step), META, **kwargs)
  checkpoints.close()


@pytest.fixture(scope="module")
def two_steps(tmp_path_factory) -> pathlib.Path:
  """Steps 1 and 2, intact; tests damage copies of it."""
  folder = tmp_path_factory.mktemp("two_steps")
  save_steps(folder)
  return folder


@pytest.fixture
def copy(two_steps, tmp_path) -> pathlib.Path:
  return shutil.copytree(two_steps, tmp_path / "copy")


def files_of(step_folder) -> list[pathlib.Path]:
  return sorted(p for p in step_folder.rglob("*") if p.is_file())


@pytest.mark.parametrize("abstract", ["arrays", "shapes"])
def test_restore_gives_back_every_bit(two_steps, abstract):
  """Exact resume rests on this: dtypes, typed keys, empty arrays, meta."""
  template = make_state()
  if abstract == "shapes":
    template = jax.eval_shape(make_state)
  step, state, meta = Checkpoints(two_steps).restore_latest(template)
  assert step == 2
  assert bits(state) == bits(make_state(2))
  assert jax.tree.structure(state) == jax.tree.structure(make_state())
  for got, want in zip(
    jax.tree.leaves(state), jax.tree.leaves(make_state()), strict=True
  ):
    assert isinstance(got, jax.Array) and got.committed
    assert (got.dtype, got.shape) == (want.dtype, want.shape)
  assert meta == META
  assert str(meta["flags"][2]) == "-0.0"


def test_keys_of_another_kind_come_back(tmp_path):
  """A typed key knows its generator; wrapping it as threefry is wrong."""
  key = jax.random.key(5, impl="rbg")
  checkpoints = Checkpoints(tmp_path)
  checkpoints.save(0, {"key": key}, {})
  checkpoints.close()
  state, _ = checkpoints.restore(0, jax.eval_shape(lambda: {"key": key}))
  assert state["key"].dtype == key.dtype
  assert bits(state) == bits({"key": key})
  with pytest.raises(UserError, match=r"leaf key is key<rbg>.4., the model"):
    checkpoints.restore(0, {"key": jax.random.key(5)})


def test_the_state_may_be_donated_right_after_save(tmp_path):
  """The background write must not read memory that a step reuses."""
  step = jax.jit(lambda x: {"w": x["w"] * 0 - 1}, donate_argnums=0)
  state = {"w": jnp.arange(1 << 20, dtype=jnp.float32)}
  checkpoints = Checkpoints(tmp_path)
  checkpoints.save(1, state, {})
  for _ in range(3):
    state = step(state)
  jax.block_until_ready(state)
  checkpoints.close()
  state, _ = checkpoints.restore(1, state)
  expected = np.arange(1 << 20, dtype=np.float32)
  np.testing.assert_array_equal(state["w"], expected)
  state = step(state)  # and a restored state may be donated, too
  np.testing.assert_array_equal(state["w"], np.full_like(expected, -1))


def test_the_host_copy_is_made_before_save_returns(tmp_path):
  """numpy leaves can change under the writer without any donation."""
  jax_array = jnp.arange(5.0)
  copy = checkpoint._to_host("w", jax_array)
  assert not np.shares_memory(copy, np.asarray(jax_array))
  array = np.arange(5, dtype=np.float32)
  meta = {"list": [1]}
  checkpoints = Checkpoints(tmp_path)
  checkpoints.save(1, {"w": array}, meta)
  array[:] = -1
  meta["list"].append(2)
  checkpoints.close()
  state, meta = checkpoints.restore(1, {"w": array})
  np.testing.assert_array_equal(state["w"], np.arange(5))
  assert meta == {"list": [1]}


def test_restored_arrays_do_not_alias_numpy():
  """A donated alias of numpy memory would be written to by XLA."""
  buffer = np.zeros(1016, np.float32)
  start = -buffer.ctypes.data % 64 // 4
  array = buffer[start : start + 1000]  # aligned, so XLA could take it over
  placed = checkpoint._to_device(array, jax.eval_shape(lambda: array))
  assert placed.unsafe_buffer_pointer() != array.ctypes.data


def test_latest_two_and_best_are_kept(tmp_path):
  """orbax's best_fn with max_to_keep deletes the latest."""
  checkpoints = Checkpoints(tmp_path)
  losses = [None, 2.0, 1.0, 3.0, 4.0, 1.0, None, None, 5.0]
  kept = []
  for step, loss in enumerate(losses):
    checkpoints.save(step, make_state(), {}, valid_loss=loss)
    checkpoints.wait()
    kept.append((checkpoints.steps(), checkpoints.best_step()))
    if step == 3:  # a resumed run knows the best by the files alone
      checkpoints.close()
      checkpoints = Checkpoints(tmp_path)
  checkpoints.close()
  assert kept == [
    ([0], None),
    ([0, 1], 1),
    ([1, 2], 2),
    ([2, 3], 2),
    ([2, 3, 4], 2),
    ([4, 5], 5),
    ([5, 6], 5),
    ([5, 6, 7], 5),
    ([5, 7, 8], 5),
  ]
  assert checkpoints.latest_step() == 8


def flip(place: float):
  def damage(path):
    data = bytearray(path.read_bytes())
    data[int(place * (len(data) - 1))] ^= 1 << 2
    path.write_bytes(data)

  return damage


def truncate(share: float):
  return lambda path: os.truncate(path, int(path.stat().st_size * share))


DAMAGES = {
  "bit in the first byte": flip(0),
  "bit at a third": flip(1 / 3),
  "bit in the middle": flip(0.5),
  "bit in the last byte": flip(1),
  "half": truncate(0.5),
  "emptied": truncate(0),
  "removed": os.remove,
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
def test_damaged_file_never_gives_a_wrong_array(
  two_steps, tmp_path, damage, capfd
):
  """orbax restores a flipped bit silently, 30 times of 30."""
  reasons = []
  files = files_of(two_steps / "2")
  for number, file in enumerate(files):
    folder = shutil.copytree(two_steps, tmp_path / str(number))
    damage(folder / file.relative_to(two_steps))
    lines = []
    checkpoints = Checkpoints(folder, log=lines.append)
    explicit = None
    try:
      state, meta = checkpoints.restore(2, make_state())
      assert (bits(state), meta) == (bits(make_state(2)), META)
    except UserError as error:
      explicit = str(error)
      assert "\n" not in explicit and str(folder / "2") in explicit
    step, state, meta = checkpoints.restore_latest(make_state())
    assert step == (1 if explicit else 2), file
    assert bits(state) == bits(make_state(step)), file
    assert meta == META
    if explicit:
      reasons.append(explicit)
      (line,) = lines
      assert "instead: the work of steps 2 to 2 is lost" in line
      assert (folder / "2.damaged").is_dir()
      checkpoints.save(2, make_state(4), META)
      checkpoints.close()
      assert checkpoints.steps() == [1, 2]
      state, _ = checkpoints.restore(2, make_state())
      assert bits(state) == bits(make_state(4))
  assert len(files) > 10
  assert len(reasons) >= 3  # the data, the manifest, the record
  assert capfd.readouterr() == ("", "")


def test_an_array_that_orbax_reads_without_a_word_is_still_checked(
  two_steps, tmp_path
):
  """Whole files of another save stand for the bit that orbax lets through:
  where a flipped bit falls on its own sums differs from save to save."""
  folder = shutil.copytree(two_steps, tmp_path / "copy")
  shutil.rmtree(folder / "2" / "state")
  shutil.copytree(folder / "1" / "state", folder / "2" / "state")
  with pytest.raises(UserError, match="array .* does not match its sha256"):
    Checkpoints(folder, read_only=True).restore(2, make_state())


def test_a_renamed_step_is_not_believed(two_steps, tmp_path):
  """A run that went on from it would skip or repeat steps."""
  folder = shutil.copytree(two_steps, tmp_path / "copy")
  (folder / "2").rename(folder / "7")
  shutil.copytree(folder / "1", folder / "01")  # no name of a step of ours
  lines = []
  checkpoints = Checkpoints(folder, log=lines.append)
  assert checkpoints.steps() == [1, 7]
  step, _, _ = checkpoints.restore_latest(make_state())
  assert step == 1
  assert "it is step 2 under this name" in lines[0]


@pytest.mark.parametrize("item", ["state", "record", "state/d", "."])
def test_removed_folder_falls_back(copy, item):
  """A half-copied run is damage as well."""
  shutil.rmtree(copy / "2" / item)
  (copy / "2").mkdir(exist_ok=True)
  with pytest.raises(UserError, match="/2 is damaged"):
    load_arrays(copy)
  step, state, _ = Checkpoints(copy).restore_latest(make_state())
  assert (step, bits(state)) == (1, bits(make_state(1)))


def test_changed_number_in_the_record_is_damage(copy):
  """A flipped bit in JSON text is often still JSON."""
  (path,) = [p for p in files_of(copy / "2" / "record") if "meta" in p.name]
  path.write_text(path.read_text().replace("0.001", "0.003"))
  with pytest.raises(UserError, match="record does not match its sha256"):
    Checkpoints(copy).meta(2)


HOSTILE = {
  "no arrays": lambda r: r.pop("arrays"),
  "no number": lambda r: r.update(step="2"),
  "meta": lambda r: r.update(meta=[]),
  "fields": lambda r: r.update(fields=[{}]),
  "loss": lambda r: r.update(valid_loss="x"),
  "version": lambda r: r.update(format_version="new"),
  "negative": lambda r: r["arrays"]["params/w"].update(shape=[-1]),
  "dtype": lambda r: r["arrays"]["params/w"].update(dtype="O"),
  "out": lambda r: r["arrays"].update({"params/../../x": r["arrays"]["none"]}),
  "nested": lambda r: r["arrays"].update({"none/a": r["arrays"]["none"]}),
}


@pytest.mark.parametrize("change", HOSTILE.values(), ids=HOSTILE.keys())
def test_a_record_with_a_good_sum_is_not_believed_for_it(copy, change):
  """Whoever makes the sum anew may write anything under it."""
  rewrite_record(copy, change)
  with pytest.raises(UserError, match="/2 is damaged: its record is none of"):
    load_arrays(copy)
  step, state, _ = Checkpoints(copy).restore_latest(make_state())
  assert (step, bits(state)) == (1, bits(make_state(1)))


def test_no_array_is_made_that_is_far_larger_than_the_files(copy):
  """Nor is its place in memory asked for."""
  huge = lambda r: r["arrays"]["params/w"].update(shape=[2**40, 2**40])
  rewrite_record(copy, huge)
  with pytest.raises(UserError, match="are said to have 4,835,703,278,458,5"):
    load_arrays(copy)


def rewrite_record(folder, change) -> None:
  """Changes the record of step 2, and its sum with it."""
  (path,) = [p for p in files_of(folder / "2" / "record") if "meta" in p.name]
  record = json.loads(path.read_text())
  del record["sha256"]
  change(record)
  record["sha256"] = checkpoint._record_sum(record)
  path.write_text(json.dumps(record))


def test_the_loss_of_work_is_told_loudly(tmp_path, capsys):
  """Two damaged steps: both named, with what is lost; the default log."""
  save_steps(tmp_path, (25,), valid_loss=0.5)  # the best is kept
  save_steps(tmp_path, (40, 55), valid_loss=1.0)
  for step in (40, 55):
    shutil.rmtree(tmp_path / str(step) / "state")
  checkpoints = Checkpoints(tmp_path)
  step, _, _ = checkpoints.restore_latest(make_state())
  assert (step, checkpoints.steps()) == (25, [25])
  first, second = capsys.readouterr().out.splitlines()
  assert first.startswith("WARNING") and second.startswith("WARNING")
  assert "/55 is damaged" in first and "steps 26 to 55 is lost" in first
  assert "/40 is damaged" in second and "kept as 40.damaged" in second


def test_no_intact_step_is_an_error_that_moves_nothing(copy):
  """A run that starts anew by itself would overwrite what may be rescued."""
  for step in (1, 2):
    shutil.rmtree(copy / str(step) / "record")
  checkpoints = Checkpoints(copy)
  with pytest.raises(UserError, match=r"none .* is intact \(steps \[1, 2\]"):
    checkpoints.restore_latest(make_state())
  assert checkpoints.steps() == [1, 2]
  assert checkpoints.best_step() is None


def test_read_only_changes_nothing(copy):
  """eval and generate look at a run that may still be training."""
  (copy / "3.orbax-checkpoint-tmp").mkdir()
  shutil.rmtree(copy / "2" / "state")
  before = sorted(copy.rglob("*"))
  checkpoints = Checkpoints(copy, read_only=True, log=lambda line: None)
  assert checkpoints.restore_latest(make_state())[0] == 1
  with pytest.raises(UserError):
    load_arrays(copy)
  assert load_arrays(copy, 1)[0] == 1
  assert sorted(copy.rglob("*")) == before
  absent = Checkpoints(copy / "absent", read_only=True)
  assert absent.restore_latest(make_state()) is None
  assert (absent.steps(), absent.latest_step()) == ([], None)
  assert not (copy / "absent").exists()


def test_remains_of_a_killed_save_are_removed(copy):
  (copy / "3.orbax-checkpoint-tmp" / "state").mkdir(parents=True)
  checkpoints = Checkpoints(copy)
  assert [p.name for p in copy.glob("3*")] == []
  assert checkpoints.steps() == [1, 2]


def test_no_checkpoint_is_none_for_resuming_and_an_error_for_reading(tmp_path):
  checkpoints = Checkpoints(tmp_path)
  assert checkpoints.restore_latest(make_state()) is None
  assert checkpoints.best_step() is None
  with pytest.raises(UserError, match="there is no checkpoint in .*; train"):
    load_arrays(tmp_path)
  with pytest.raises(UserError, match=r"no checkpoint at step 4 .*: \[\]"):
    checkpoints.restore(4, make_state())


MISMATCHES = {
  "shape": (
    {"w": jnp.zeros((5, 3))},
    r"leaf w is float32\[3, 5\], the model wants float32\[5, 3\]",
  ),
  "dtype": (
    {"w": jnp.zeros((3, 5), jnp.bfloat16)},
    r"leaf w is float32\[3, 5\], the model wants bfloat16\[3, 5\]",
  ),
  "missing": ({"w": jnp.zeros((3, 5)), "x": jnp.zeros(1)}, "lacks leaf x"),
  "extra": ({}, "has the unexpected leaf w"),
}


@pytest.mark.parametrize("case", MISMATCHES)
def test_another_model_is_refused_and_never_a_fallback(tmp_path, case):
  """orbax casts another dtype silently."""
  abstract, match = MISMATCHES[case]
  checkpoints = Checkpoints(tmp_path)
  checkpoints.save(0, {"w": jnp.zeros((3, 5))}, {})
  checkpoints.close()
  with pytest.raises(UserError, match=match):
    checkpoints.restore(0, abstract)
  with pytest.raises(UserError, match=match):
    checkpoints.restore_latest(abstract)
  assert checkpoints.steps() == [0]


def test_newer_format_names_both_versions(tmp_path, monkeypatch):
  """A newer file is not damaged: falling back would lose work."""
  save_steps(tmp_path, (1,))
  monkeypatch.setattr(checkpoint, "FORMAT_VERSION", 7)
  save_steps(tmp_path, (2,))
  monkeypatch.undo()
  checkpoints = Checkpoints(tmp_path)
  for read in (
    lambda: checkpoints.restore_latest(make_state()),
    lambda: checkpoints.meta(2),
    lambda: load_arrays(tmp_path),
  ):
    with pytest.raises(UserError, match="version 7, .* up to 1; upgrade"):
      read()
  assert checkpoints.steps() == [1, 2]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), {1, 2}])
def test_meta_that_is_no_json_is_refused(tmp_path, bad):
  checkpoints = Checkpoints(tmp_path)
  with pytest.raises(UserError, match="step 3: meta is not strict JSON"):
    checkpoints.save(3, make_state(), {"x": bad})
  assert list(tmp_path.iterdir()) == []


def test_a_step_is_saved_once(copy):
  with pytest.raises(UserError, match="step 2 is already in"):
    Checkpoints(copy).save(2, make_state(), {})


def test_free_space_is_checked_before_a_save(copy, monkeypatch):
  usage = shutil.disk_usage(copy)._replace(free=500_000)
  monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage)
  checkpoints = Checkpoints(copy)
  state = {"w": jnp.zeros(250_000)}
  with pytest.raises(UserError, match=r"step 9 needs 2\.2 MB, .* has 0\.5 MB"):
    checkpoints.save(9, state, {})
  assert checkpoints.restore_latest(make_state())[0] == 2


@pytest.mark.parametrize("found_by", ["wait", "next save", "close"])
def test_a_failed_write_is_one_error_and_keeps_the_previous(
  copy, found_by, capfd, caplog
):
  """A full disk, acted by a limit on file sizes."""
  resource = pytest.importorskip("resource")
  checkpoints = Checkpoints(copy)
  keys = jax.random.split(jax.random.key(0), 7)  # bits do not compress
  big = {f"w{i}": jax.random.bits(k, (100_000,)) for i, k in enumerate(keys)}
  soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
  resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
  try:
    with pytest.raises(UserError, match="step 3 could not be written") as info:
      checkpoints.save(3, big, {}, valid_loss=0.0)
      if found_by == "wait":
        checkpoints.wait()
      elif found_by == "close":
        checkpoints.close()
      else:
        checkpoints.save(4, big, {})
  finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
  assert "\n" not in str(info.value)
  assert capfd.readouterr() == ("", "")  # no tracebacks of orbax's threads
  assert caplog.records == []
  assert checkpoints.best_step() is None
  assert sorted(p.name for p in copy.iterdir() if p.name[0] in "1234") == [
    "1",
    "2",
  ]
  assert checkpoints.restore_latest(make_state())[0] == 2
  checkpoints.save(3, make_state(3), META)  # room again: goes on
  checkpoints.close()
  assert checkpoints.restore_latest(make_state())[0] == 3


def test_folder_that_cannot_be_written_is_named(tmp_path):
  (tmp_path / "file").write_text("")
  with pytest.raises(UserError, match="file/ckpt cannot be written .*folder$"):
    Checkpoints(tmp_path / "file" / "ckpt")


def test_a_folder_that_is_gone_is_one_line(tmp_path):
  """Somebody tidied up while the run went on."""
  checkpoints = Checkpoints(tmp_path / "gone")
  (tmp_path / "gone").rmdir()
  with pytest.raises(UserError, match="gone cannot be written .*folder$"):
    checkpoints.save(1, make_state(), META)


def test_a_damaged_step_that_cannot_be_moved_is_one_line(copy, monkeypatch):
  """Resuming needs its name free; a mode bit does not stop root."""
  def refuse(self, target):
    raise PermissionError(13, "Permission denied")

  shutil.rmtree(copy / "2" / "state")
  monkeypatch.setattr(pathlib.Path, "rename", refuse)
  checkpoints = Checkpoints(copy)
  with pytest.raises(UserError, match="written .Permission denied.; choose a"):
    checkpoints.restore_latest(make_state())


def test_a_folder_that_cannot_be_read_is_one_line(copy, monkeypatch):
  def refuse(self):
    raise PermissionError(13, "Permission denied")

  checkpoints = Checkpoints(copy, read_only=True)
  monkeypatch.setattr(pathlib.Path, "iterdir", refuse)
  with pytest.raises(UserError, match="copy cannot be read .Permission denied"):
    checkpoints.latest_step()


def test_load_arrays_needs_no_template(two_steps):
  """Nested dicts of numpy; an empty field is there, a wrong one is named."""
  step, tree, meta = load_arrays(two_steps)
  assert (step, set(tree), tree["taper"], meta) == (
    2,
    {"params", "taper"},
    {},
    META,
  )
  np.testing.assert_array_equal(
    tree["params"]["w"], make_state(2)["params"]["w"]
  )
  assert tree["params"]["half"].dtype == jnp.bfloat16
  step, tree, _ = load_arrays(two_steps, 1, ())
  assert set(tree) == set(make_state())
  assert tree["none"].shape == (0, 4)
  np.testing.assert_array_equal(
    tree["opt"]["mu"]["w"], make_state(1)["opt"].mu["w"]
  )
  with pytest.raises(UserError, match=r"no field 'parms'; fields there: \["):
    load_arrays(two_steps, subtree=("parms",))


def test_logging_is_left_as_it_was(copy):
  """Quiet orbax must not mean a quiet program."""
  logger = logging.getLogger("absl")
  before = logger.level
  logger.setLevel(17)
  shutil.rmtree(copy / "2" / "state")
  assert Checkpoints(copy, log=lambda line: None).restore_latest(make_state())
  assert logger.level == 17
  logger.setLevel(before)
