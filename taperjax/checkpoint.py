"""Checkpoints: one orbax save of state and meta, checked bit by bit.

orbax restores an array with a flipped bit without a word, casts a leaf to
another dtype silently, and keeps a damaged step in its list of steps. So every
array has a sha256 of its own in a JSON record beside the state, the record has
one of itself, and nothing leaves this module unless both agree.

    FOLDER/STEP/state     orbax tree of numpy arrays (nested dicts)
    FOLDER/STEP/record    format version, array list, meta, valid_loss, sha256
    FOLDER/STEP.damaged   a step that resuming had to step over
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import logging
import math
import pathlib
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from taperjax import sharding
from taperjax.errors import UserError

FORMAT_VERSION = 1

_KEEP_LATEST = 2  # one alone would leave nothing to fall back to
_RESERVE = 1.2  # free space wanted, in sizes of the state
_MB = 1_000_000
# Bytes of all arrays for one in the files, at most, however well they compress.
_COMPRESSION = 1_000


class _Damaged(UserError):
  """A step that cannot be trusted; resuming may fall back from it."""


class Checkpoints:
  """The checkpoints of one run: the two latest and the best are kept.

  Args:
    folder: where the steps lie; made unless `read_only`.
    log: takes one line of text, for what the user must see.
    read_only: nothing in the folder is made, cleaned or moved.

  Raises:
    UserError: the folder cannot be written.
  """

  def __init__(
    self,
    folder: str | pathlib.Path,
    *,
    log: Callable[[str], Any] = print,
    read_only: bool = False,
  ):
    self.folder = pathlib.Path(folder).absolute()  # orbax insists on absolute
    self._log = log
    self._read_only = read_only
    self._manager = None  # opened by the first save
    self._saving: tuple[int, float | None] | None = None
    if not read_only:
      try:
        self.folder.mkdir(parents=True, exist_ok=True)
        self._clean()
      except OSError as error:
        raise self._unwritable(error) from error

  def save(
    self,
    step: int,
    state: Any,
    meta: dict[str, Any],
    *,
    valid_loss: float | None = None,
    copy: bool = True,
  ) -> None:
    """Copies the state to the host and writes it in the background.

    The copy is done when this returns, so the caller may donate the state to
    its next step at once. Saves never overlap: this waits for the one before.
    Of several processes each must call it; process 0 gathers and writes.

    Args:
      step: not saved yet, from 0.
      state: pytree of arrays; typed keys come back as typed keys.
      meta: JSON; comes back equal (tuples as lists). NaN and infinity are no
        JSON and are refused.
      valid_loss: finite; None does not compete for "best".
      copy: False spares the copy where nobody changes the arrays before `wait`.

    Raises:
      UserError: too little free space, a step that is there already, meta that
        is not JSON, a folder that is gone, or a fault of the save before this.
    """
    if jax.process_index():  # takes part in the gathering; process 0 writes
      for name, leaf in _flatten(state).items():
        _to_host(name, leaf, copy=False)
      return
    if self._read_only:
      raise ValueError("these checkpoints were opened with read_only=True")
    self.wait()
    if step in self.steps():
      raise UserError(
        f"checkpoint at step {step} is already in {self.folder}; a step is "
        f"saved once: use a new folder, or --overwrite"
      )
    leaves = _flatten(state)
    arrays = {name: _to_host(name, leaf, copy) for name, leaf in leaves.items()}
    record = {
      "format_version": FORMAT_VERSION,
      "step": step,
      "arrays": {
        name: _kind(leaf)
        | {"sha256": _array_sum(arrays[name]), "key_impl": _key_impl(leaf)}
        for name, leaf in leaves.items()
      },
      "fields": _top_names(state),
      "meta": meta,
      "valid_loss": valid_loss,
    }
    try:
      record = json.loads(json.dumps(record, allow_nan=False))
    except (TypeError, ValueError) as error:
      raise UserError(
        f"checkpoint at step {step}: meta is not strict JSON ({error}); "
        f"store plain dicts, lists, strings and finite numbers"
      ) from error
    record["sha256"] = _record_sum(record)
    self._check_space(step, sum(a.nbytes for a in arrays.values()))
    self._saving = (step, valid_loss)
    import orbax.checkpoint as ocp

    with self._save_errors():
      if self._manager is None:
        self._manager = self._open()
      self._manager.save(
        step,
        args=ocp.args.Composite(
          state=ocp.args.PyTreeSave(_nest(arrays)),
          record=ocp.args.JsonSave(record),
        ),
        force=True,
      )

  def wait(self) -> None:
    """Returns when the last save is on disk; raises if it failed."""
    if self._saving is not None:
      with self._save_errors():
        self._manager.wait_until_finished()
      self._saving = None

  def close(self) -> None:
    """Waits, then lets go of orbax's threads."""
    try:
      self.wait()
    finally:
      self._drop_manager()

  def steps(self) -> list[int]:
    """Steps whose save was finished, ascending; the damaged ones too."""
    try:
      return sorted(
        int(path.name)
        for path in self.folder.iterdir()
        if path.name == _number(path.name) and path.is_dir()
      )
    except (FileNotFoundError, NotADirectoryError):
      return []
    except OSError as error:
      raise UserError(
        f"checkpoint folder {self.folder} cannot be read ({error.strerror}); "
        "make it readable, or give another folder"
      ) from error

  def latest_step(self) -> int | None:
    """The newest finished step."""
    return max(self.steps(), default=None)

  def best_step(self) -> int | None:
    """The step of the lowest valid_loss, the later one of equals."""
    return _best(self._valid_losses())

  def meta(self, step: int) -> dict[str, Any]:
    """What was saved as meta at this step; UserError when it is damaged."""
    return self._record(step)["meta"]

  def restore_latest(
    self, abstract_state: Any
  ) -> tuple[int, Any, dict[str, Any]] | None:
    """The newest intact step, for resuming; None when there is no step.

    Damaged newer steps are named in the log and moved to STEP.damaged, so that
    the run can save these steps again.

    Raises:
      UserError: no step is intact, or the state has another structure.
    """
    return self._newest(lambda step: self.restore(step, abstract_state))

  def newest_intact(self, abstract_state: Any) -> int | None:
    """The step that `restore_latest` restores, and all that it does besides."""
    found = self._newest(lambda step: self._checked(step, abstract_state))
    return None if found is None else found[0]

  def _newest(self, read: Callable[[int], tuple[Any, Any]]) -> Any:
    """(step, *read(step)) of the newest step where it finds no damage."""
    damaged: dict[int, _Damaged] = {}
    for step in reversed(self.steps()):
      try:
        state, meta = read(step)
      except _Damaged as error:
        damaged[step] = error
        continue
      for bad, error in damaged.items():
        kept = "left in place" if self._read_only else self._move_aside(bad)
        self._log(
          f"WARNING: {error} Resuming from step {step} instead: the work of "
          f"steps {step + 1} to {bad} is lost; the damaged folder is {kept}."
        )
      return step, state, meta
    if damaged:
      first = next(iter(damaged.values()))
      raise UserError(
        f"none of the checkpoints in {self.folder} is intact (steps "
        f"{sorted(damaged)}; the latest: {first}) Start again with --overwrite "
        f"or in another folder"
      )
    return None

  def restore(
    self, step: int, abstract_state: Any
  ) -> tuple[Any, dict[str, Any]]:
    """State and meta of exactly this step.

    Args:
      step: one of `steps()`.
      abstract_state: pytree of arrays or jax.ShapeDtypeStruct. A leaf with a
        sharding is put there, one without on the default device.

    Raises:
      UserError: the step is absent or damaged, or its leaves differ from the
        abstract state in name, shape or dtype.
    """
    arrays, record = self._checked(step, abstract_state)
    want = _flatten(abstract_state)
    state = jax.tree.unflatten(
      jax.tree.structure(abstract_state),
      [
        _to_device(arrays[name], leaf, record["arrays"][name]["key_impl"])
        for name, leaf in want.items()
      ],
    )
    return state, record["meta"]

  def _checked(
    self, step: int, abstract_state: Any
  ) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Arrays by name, as the sums tell them, and the record."""
    record = self._record(step)
    want = _flatten(abstract_state)
    self._check_leaves(step, want, record["arrays"])
    return self._arrays(step, record["arrays"], list(want)), record

  def _record(self, step: int) -> dict[str, Any]:
    """The JSON record of a step, if it is what was written."""
    if step not in self.steps():
      raise UserError(
        f"there is no checkpoint at step {step} in {self.folder}; steps there: "
        f"{self.steps()}"
      )
    with self._damage(step, "its record cannot be read"):
      import orbax.checkpoint as ocp

      with ocp.Checkpointer(
        ocp.JsonCheckpointHandler(**_alone()), **_alone()
      ) as reader:
        record = reader.restore(self.folder / str(step) / "record")
      told = record.pop("sha256")
    # First the sum, by a rule that no version may change: then a version
    # that is not ours is truly another one.
    with self._damage(step, "its record does not match its sha256"):
      if _record_sum(record) != told:
        raise ValueError(told)
    with self._damage(step, "its record is none of taperjax"):
      version = int(record["format_version"])
    if version > FORMAT_VERSION:
      raise UserError(
        f"checkpoint {self.folder / str(step)} has format version {version}, "
        f"this taperjax reads up to {FORMAT_VERSION}; upgrade taperjax"
      )
    # The sum tells damage, not who wrote it: what is read must be sound, too.
    with self._damage(step, "its record is none of taperjax"):
      _check_record(record)
    if record["step"] != step:
      raise self._damaged(step, f"it is step {record['step']} under this name")
    return record

  def _arrays(
    self, step: int, told: dict[str, dict[str, Any]], names: Sequence[str]
  ) -> dict[str, np.ndarray]:
    """The named numpy arrays, each checked against its sum."""
    import orbax.checkpoint as ocp

    self._check_size(step, [told[name] for name in names])
    arrays = {}
    options = _alone()
    handler = ocp.PyTreeCheckpointHandler(**options)
    with ocp.Checkpointer(handler, **options) as reader:
      for name in names:
        entry = told[name]
        with self._damage(step, f"array {name} cannot be made"):
          array = np.empty(entry["shape"], jnp.dtype(entry["dtype"]))
        # One array at a time: among several, orbax leaves the reads beside a
        # broken one to report to a closed event loop, loudly and much later.
        if template := _nest({name: array}):
          with self._damage(step, f"array {name} cannot be read"):
            tree = reader.restore(
              self.folder / str(step) / "state",
              args=ocp.args.PyTreeRestore(template, partial_restore=True),
            )
            array = _flatten(tree)[name]
        if _array_sum(array) != entry["sha256"]:
          raise self._damaged(step, f"array {name} does not match its sha256")
        arrays[name] = array
    return arrays

  def _check_size(self, step: int, entries: list[dict[str, Any]]) -> None:
    """Raises where arrays are said to be far larger than what lies there."""
    size = sum(
      math.prod(e["shape"]) * jnp.dtype(e["dtype"]).itemsize for e in entries
    )
    folder = self.folder / str(step)
    with self._damage(step, "its files cannot be read"):
      there = sum(p.stat().st_size for p in folder.rglob("*") if p.is_file())
    if size > _COMPRESSION * there:
      raise self._damaged(
        step, f"its arrays are said to have {size:,} bytes, its files {there:,}"
      )

  def _check_leaves(
    self,
    step: int,
    want: dict[str, Any],
    told: dict[str, dict[str, Any]],
  ) -> None:
    """Raises unless names, shapes and dtypes agree."""
    where = f"checkpoint {self.folder / str(step)}"
    remedy = "resume with the configuration that wrote it"
    for name in sorted(want.keys() ^ told.keys()):
      lacks = "lacks" if name in want else "has the unexpected"
      raise UserError(f"{where} {lacks} leaf {name}; {remedy}")
    for name, leaf in want.items():
      wanted, stored = _kind(leaf), told[name]
      if any(wanted[part] != stored[part] for part in wanted):
        raise UserError(
          f"{where}: leaf {name} is {stored['type']}{stored['shape']}, the "
          f"model wants {wanted['type']}{wanted['shape']}; {remedy}"
        )

  def _check_space(self, step: int, nbytes: int) -> None:
    """Raises when the disk cannot hold another save of this size."""
    need = int(nbytes * _RESERVE) + _MB
    try:
      free = shutil.disk_usage(self.folder).free
    except OSError as error:
      raise self._unwritable(error) from error
    if need > free:
      raise UserError(
        f"checkpoint at step {step} needs {need / _MB:.1f} MB, {self.folder} "
        f"has {free / _MB:.1f} MB free; make room or choose another folder "
        f"(the earlier steps {self.steps()} are intact)"
      )

  def _open(self) -> Any:
    """orbax's manager, which saves and deletes but never decides."""
    import orbax.checkpoint as ocp

    _ignore_closed_loops()
    checkpoints = self

    class KeepBest(ocp.checkpoint_managers.PreservationPolicy):
      """By our own record: orbax's best_fn would delete the latest."""

      def should_preserve(self, checkpoints_there, *, context):
        del context
        losses = checkpoints._valid_losses()
        return [info.step == _best(losses) for info in checkpoints_there]

    options = _alone()
    # orbax would copy each of our copies once more.
    kinds = ocp.type_handlers.create_type_handler_registry(
      (np.ndarray, ocp.type_handlers.NumpyHandler(deepcopy_host_arrays=False))
    )
    return ocp.CheckpointManager(
      self.folder,
      item_handlers={
        "state": ocp.PyTreeCheckpointHandler(
          type_handler_registry=kinds, **options
        ),
        "record": ocp.JsonCheckpointHandler(**options),
      },
      options=ocp.CheckpointManagerOptions(
        preservation_policy=ocp.checkpoint_managers.AnyPreservationPolicy(
          [ocp.checkpoint_managers.LatestN(_KEEP_LATEST), KeepBest()]
        ),
        create=not options,  # orbax refuses it where a process is alone
        **options,
      ),
    )

  def _drop_manager(self) -> None:
    manager, self._manager, self._saving = self._manager, None, None
    if manager is not None:
      with _quiet(), contextlib.suppress(Exception):  # told by wait() before
        manager.close()

  def _valid_losses(self) -> dict[int, float]:
    """valid_loss of each step that has one and can be read."""
    losses = {}
    for step in self.steps():
      with contextlib.suppress(UserError):
        losses[step] = self._record(step)["valid_loss"]
    if self._saving is not None:
      losses.update([self._saving])
    return {step: loss for step, loss in losses.items() if loss is not None}

  def _clean(self) -> None:
    """Removes what a killed save left; no finished step looks like this."""
    for path in self.folder.glob("*.orbax-checkpoint-tmp*"):
      shutil.rmtree(path)

  def _move_aside(self, step: int) -> str:
    """Renames a damaged step, so that it can be saved again."""
    self._drop_manager()  # it would remember the step
    source = self.folder / str(step)
    target = self.folder / f"{step}.damaged"
    count = 1
    try:
      while target.exists():
        count += 1
        target = self.folder / f"{step}.damaged{count}"
      source.rename(target)
    except OSError as error:
      raise self._unwritable(error) from error
    return f"kept as {target.name}"

  def _unwritable(self, error: OSError) -> UserError:
    return UserError(
      f"checkpoint folder {self.folder} cannot be written ({error.strerror}); "
      "choose a writable folder"
    )

  def _damaged(self, step: int, what: str) -> _Damaged:
    others = [other for other in self.steps() if other != step]
    return _Damaged(
      f"checkpoint {self.folder / str(step)} is damaged: {what}; choose "
      f"another step, there are {others or 'none'}."
    )

  @contextlib.contextmanager
  def _damage(self, step: int, what: str) -> Iterator[None]:
    """Turns whatever orbax raises on a broken file into one line."""
    try:
      with _quiet():
        yield
    except Exception as error:  # orbax raises plain Exception, too
      raise self._damaged(step, f"{what} ({type(error).__name__})") from error

  @contextlib.contextmanager
  def _save_errors(self) -> Iterator[None]:
    """Turns a failed write into one line and forgets the attempt."""
    try:
      with _quiet():
        yield
    except Exception as error:
      step, _ = self._saving
      self._drop_manager()
      with contextlib.suppress(OSError):
        self._clean()
      reason = (str(error) or type(error).__name__).splitlines()[0][:160]
      if "No space left" in str(error):
        reason = "no space left on the disk"
      raise UserError(
        f"checkpoint at step {step} could not be written to {self.folder} "
        f"({reason}); make room or choose a writable folder (the earlier "
        f"steps {self.steps()} are intact)"
      ) from error


def load_arrays(
  folder: str | pathlib.Path,
  step: int | None = None,
  subtree: Sequence[str] = ("params", "taper"),
) -> tuple[int, dict[str, Any], dict[str, Any]]:
  """Checked numpy arrays without a template, for eval, fold and generate.

  Args:
    folder: as for `Checkpoints`; only read.
    step: the latest unless told.
    subtree: names of fields of the saved state; () for all of them.

  Returns:
    step, nested dict of numpy arrays (typed keys as their uint32 data, empty
    dicts left out below the fields), meta.

  Raises:
    UserError: no checkpoint, a damaged one, or no such field.
  """
  checkpoints = Checkpoints(folder, read_only=True)
  if step is None:
    step = checkpoints.latest_step()
  if step is None:
    raise UserError(
      f"there is no checkpoint in {checkpoints.folder}; train first, or give "
      f"the workdir of a run that has saved"
    )
  record = checkpoints._record(step)
  fields = record["fields"]
  for name in subtree:
    if name not in fields:
      raise UserError(
        f"checkpoint {checkpoints.folder / str(step)} has no field {name!r}; "
        f"fields there: {fields}"
      )
  fields = subtree or fields
  names = [n for n in record["arrays"] if n.split("/")[0] in fields]
  arrays = checkpoints._arrays(step, record["arrays"], names)
  tree = {name: {} for name in fields} | _nest(arrays, keep_empty=True)
  return step, tree, record["meta"]


def _flatten(tree: Any) -> dict[str, Any]:
  """Leaves by their path: params/layer_0/kernel."""
  return {
    jax.tree_util.keystr(path, simple=True, separator="/"): leaf
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
  }


def _nest(
  arrays: dict[str, np.ndarray], keep_empty: bool = False
) -> dict[str, Any]:
  """Nested dicts; without empty arrays, which orbax refuses to write."""
  tree: dict[str, Any] = {}
  for name, array in arrays.items():
    if array.size or keep_empty:
      *parents, last = name.split("/")
      node = tree
      for parent in parents:
        node = node.setdefault(parent, {})
      node[last] = array
  return tree


def _top_names(state: Any) -> list[str]:
  """Names of the state's fields, those without arrays included."""
  children = jax.tree_util.tree_leaves_with_path(
    state, is_leaf=lambda node: node is not state
  )
  return [jax.tree_util.keystr(path, simple=True) for path, _ in children]


def _is_key(leaf: Any) -> bool:
  return jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _key_impl(leaf: Any) -> str | None:
  return str(jax.random.key_impl(leaf)) if _is_key(leaf) else None


def _kind(leaf: Any) -> dict[str, Any]:
  """What must agree; a typed key is stored as its uint32 data."""
  data = jax.eval_shape(jax.random.key_data, leaf) if _is_key(leaf) else leaf
  return {
    "type": str(leaf.dtype),  # float32 or key<fry>
    "dtype": data.dtype.name,
    "shape": list(data.shape),
  }


def _to_host(name: str, leaf: Any, copy: bool = True) -> np.ndarray:
  """In C order; a copy outlives the leaf's donation."""
  if _is_key(leaf):
    leaf = jax.random.key_data(leaf)
  if jax.dtypes.canonicalize_dtype(leaf.dtype) != leaf.dtype:
    raise ValueError(f"leaf {name} is {leaf.dtype}, too wide for jax here")
  if not getattr(leaf, "is_fully_addressable", True):
    return sharding.to_host(leaf)
  return (np.array if copy else np.asarray)(leaf, order="C")


def _to_device(
  array: np.ndarray, leaf: Any, key_impl: str | None = None
) -> jax.Array:
  """A committed array, in memory of its own: a step may donate it."""
  where = getattr(leaf, "sharding", None)
  if isinstance(where, jax.sharding.NamedSharding):
    placed = sharding.place(array, where)
    make = jnp.copy
    if key_impl is not None:
      make = functools.partial(jax.random.wrap_key_data, impl=key_impl)
    return jax.jit(make, out_shardings=where)(placed)
  if where is None:
    where = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
  if key_impl is not None:
    key = jax.random.wrap_key_data(jnp.array(array), impl=key_impl)
    return jax.device_put(key, where)
  # On the CPU device_put aliases aligned numpy memory, may_alias=False or not.
  return jax.device_put(jnp.copy(jax.device_put(array, where)), where)


def _alone() -> dict[str, Any]:
  """Options by which orbax waits for no other process."""
  if jax.process_count() == 1:
    return {}
  import orbax.checkpoint as ocp

  me = jax.process_index()
  return {
    "multiprocessing_options": ocp.options.MultiprocessingOptions(
      primary_host=me,
      active_processes={me},
      barrier_sync_key_prefix=f"process{me}",
    )
  }


def _array_sum(array: np.ndarray) -> str:
  """sha256 of dtype, shape and raw bytes."""
  array = np.asarray(array, order="C")
  told = hashlib.sha256(f"{array.dtype.name}{array.shape}".encode())
  told.update(array.reshape(-1).view(np.uint8))
  return told.hexdigest()


def _check_record(record: dict[str, Any]) -> None:
  """Raises unless all that this module reads from a record has its form."""

  def check(holds: bool) -> None:
    if not holds:
      raise ValueError

  check(type(record["format_version"]) is type(record["step"]) is int)
  check(isinstance(record["meta"], dict))
  check(all(isinstance(name, str) for name in record["fields"]))
  loss = record["valid_loss"]
  check(loss is None or type(loss) in (int, float) and math.isfinite(loss))
  for name, entry in record["arrays"].items():
    parts = name.split("/")
    check(parts[0] in record["fields"] and "\0" not in name)
    check(not {"", ".", ".."} & {*parts})
    # An array is no folder of others.
    check(not any("/".join(parts[:i]) in record["arrays"]
                  for i in range(1, len(parts))))
    check(all(type(n) is int and 0 <= n < 2**48 for n in entry["shape"]))
    dtype = jnp.dtype(entry["dtype"])
    check(dtype.name == "bool" or jnp.issubdtype(dtype, np.number))
    check(isinstance(entry["type"], str) and isinstance(entry["sha256"], str))
    check(isinstance(entry["key_impl"], str | None))


def _record_sum(record: dict[str, Any]) -> str:
  """sha256 of the record without its sum; the same rule in every version."""
  return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()


def _number(name: str) -> str | None:
  """The name that a step of this number has; None if it is no number."""
  return str(int(name)) if name.isdecimal() and len(name) < 19 else None


def _best(losses: dict[int, float]) -> int | None:
  return min(losses, key=lambda step: (losses[step], -step), default=None)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
  """orbax logs whole tracebacks of errors that we tell in one line."""
  logger = logging.getLogger("absl")
  level = logger.level
  logger.setLevel(logging.CRITICAL)
  try:
    yield
  finally:
    logger.setLevel(level)


@functools.cache
def _ignore_closed_loops() -> None:
  """Hides the tracebacks that follow a failed write.

  The writes beside it report to an event loop that orbax has closed by then,
  from threads, where nothing can be caught.
  """
  hook = sys.unraisablehook

  def without_closed_loops(unraisable):
    if str(unraisable.exc_value) != "Event loop is closed":
      hook(unraisable)

  sys.unraisablehook = without_closed_loops
