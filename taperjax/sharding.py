"""Many devices: the mesh, and which part of each array a device holds.

A mesh has four axes. `seed` splits the seeds of a run; `data` and `fsdp` both
split the batch, and `fsdp` the parameters as well; `tensor` splits heads and
the MLP within a layer. The programs are those of one device: the arrays carry
their shardings, and the compiler puts in what the devices tell each other.
Without a mesh nothing here leaves a trace in a program.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import (
  AxisType,
  Mesh,
  NamedSharding,
  PartitionSpec as Spec,
)

from taperjax.config import MeshConfig
from taperjax.errors import UserError

AXES = ("seed", "data", "fsdp", "tensor")
ROWS = ("data", "fsdp")  # what splits the batch
_WIDTH = ("fsdp", "tensor")
_WHOLE = Spec()  # whole on every device

# The end of a leaf's name, and how its last axes are split; every leaf of a
# state ends in exactly one of these names. Layers of a scan and seeds are axes
# before these. Embeddings and the head split their width, for a vocabulary may
# be any number, a prime as well.
RULES: tuple[tuple[str, Spec], ...] = (
  ("embed/embedding", Spec(None, _WIDTH)),
  ("position_embed/embedding", Spec(None, _WIDTH)),
  ("attn/q/kernel", Spec("fsdp", "tensor", None)),
  ("attn/k/kernel", Spec("fsdp", "tensor", None)),
  ("attn/v/kernel", Spec("fsdp", "tensor", None)),
  ("attn/o/kernel", Spec("tensor", None, "fsdp")),
  ("attn/q/bias", Spec("tensor", None)),
  ("attn/k/bias", Spec("tensor", None)),
  ("attn/v/bias", Spec("tensor", None)),
  ("attn/o/bias", Spec(None)),
  ("mlp/gate/kernel", Spec("fsdp", "tensor")),
  ("mlp/up/kernel", Spec("fsdp", "tensor")),
  ("mlp/down/kernel", Spec("tensor", "fsdp")),
  ("mlp/gate/bias", Spec("tensor")),
  ("mlp/up/bias", Spec("tensor")),
  ("mlp/down/bias", Spec(None)),
  ("head/kernel", Spec(_WIDTH, None)),
  ("head/bias", Spec(None)),
  # Small ones are whole everywhere: gains, adapters, statistics, counters.
  *(
    (f"{norm}/{name}", Spec(None))
    for norm in ("attn_norm", "mlp_norm", "final_norm")
    for name in ("scale", "bias", "taper_scale")
  ),
  *(
    (f"{name}/{factor}", Spec(None, None))
    for name in ("q", "k", "v", "o", "gate", "up", "down")
    for factor in ("a", "b")
  ),
  *(
    (f"taper/{name}", _WHOLE)
    for name in (
      "num", "den", "scale", "count", "c", "scale_target", "std",
    )
  ),
  *((f"opt_state/{i}/count", _WHOLE) for i in range(4)),
  *((name, _WHOLE) for name in ("step", "gate", "key", "diverged")),
)


def connect(
  coordinator: str | None, processes: int | None, process: int | None
) -> None:
  """Joins the processes of a run; before anything asks for a device.

  Args:
    coordinator: HOST:PORT of process 0; "auto" where the cluster tells all
      (Slurm, Open MPI, a TPU pod); None for a process alone.
    processes: how many there are. process: which one this is, from 0.

  Raises:
    UserError: the three do not fit, or nobody answers.
  """
  given = {"--processes": processes, "--process": process}
  if coordinator in (None, "auto"):
    for name, value in given.items():
      if value is not None:
        raise UserError(
          f"{name}={value} with --coordinator={coordinator}: it goes with the "
          "HOST:PORT of process 0 alone; give that, or leave it out"
        )
    if coordinator is None:
      return
  else:
    for name, value in given.items():
      if value is None:
        raise UserError(
          f"--coordinator={coordinator} needs {name}; give --processes=N and "
          "--process=I from 0 to N - 1, or --coordinator=auto on a cluster"
        )
    if not 0 <= process < processes:
      raise UserError(
        f"--process={process} must be from 0 to --processes - 1 = "
        f"{processes - 1}; each process has its own number"
      )
    if not coordinator.rpartition(":")[2].isdecimal():
      raise UserError(
        f"--coordinator={coordinator} must be HOST:PORT, for example "
        "127.0.0.1:8476"
      )
  address = None if coordinator == "auto" else coordinator
  try:
    jax.distributed.initialize(address, processes, process)
  except (RuntimeError, ValueError) as error:
    reason = (str(error) or type(error).__name__).splitlines()[0]
    raise UserError(
      f"--coordinator={coordinator}: the processes did not meet ({reason}); "
      "start all of them, with the same address"
    ) from error


# In what jax says where another process is gone.
_GONE = ("gloo", "nccl", "coordination", "connection", "unavailable")


@contextlib.contextmanager
def peers() -> Iterator[None]:
  """Says in one line that another process of the run is gone.

  Raises:
    UserError: a sum over the processes failed.
  """
  try:
    yield
  except jax.errors.JaxRuntimeError as error:
    text = next(iter(str(error).splitlines()), type(error).__name__)
    if jax.process_count() == 1 or not any(x in text.lower() for x in _GONE):
      raise
    raise UserError(
      f"another process of this run seems to be gone ({text}), and its own "
      "message says why; start all of them again: the run goes on from its "
      "newest checkpoint"
    ) from error


def make_mesh(
  config: MeshConfig, devices: Sequence[jax.Device] | None = None
) -> Mesh | None:
  """The mesh of a run; None on one device, where nothing is split.

  Args:
    config: sizes of the axes.
    devices: all that there are, of all processes, unless told.

  Raises:
    UserError: the axes do not multiply to the number of devices.
  """
  devices = jax.devices() if devices is None else devices
  sizes = tuple(getattr(config, name) for name in AXES)
  size, count = math.prod(sizes), len(devices)
  if size == 1 and jax.process_count() == 1:
    return None
  if size != count:
    shown = ", ".join(
      f"mesh.{name}={value}" for name, value in zip(AXES, sizes, strict=True)
    )
    raise UserError(
      f"{shown} make {size} devices, but there are {count}; they must multiply "
      f"to that number: set for example mesh.data={count} and the others to 1"
    )
  auto = (AxisType.Auto,) * len(AXES)
  return jax.make_mesh(sizes, AXES, auto, devices=devices)


def specs(abstract: Any, mesh: Mesh, seeds: bool = False) -> Any:
  """The sharding of every leaf of a state, or of a part of one.

  Args:
    abstract: tree of shapes.
    mesh: from `make_mesh`.
    seeds: whether every leaf leads with an axis for the seeds.

  Raises:
    UserError: a leaf is covered by no rule or by several, or cannot be split
      evenly.
  """

  def sharding(path, leaf):
    name = jax.tree_util.keystr(path, simple=True, separator="/")
    found = [spec for end, spec in RULES if f"/{name}".endswith(f"/{end}")]
    if len(found) != 1:
      raise UserError(
        f"parameter {name} is covered by {len(found)} partition rules; it must "
        "be exactly one: mend RULES in taperjax/sharding.py, or train on one "
        "device"
      )
    lead = ["seed"] if seeds else []
    lead += [None] * (len(leaf.shape) - len(lead) - len(found[0]))
    spec = Spec(*lead, *found[0])
    for size, axes in zip(leaf.shape, spec, strict=True):
      axes = axes if isinstance(axes, tuple) else (axes,)
      parts = math.prod(mesh.shape[axis] for axis in axes if axis)
      if size % parts:
        shown = " * ".join(f"mesh.{axis}" for axis in axes)
        raise UserError(
          f"parameter {name} has an axis of {size}, which {shown}={parts} does "
          "not divide; change the size of the model or of these axes"
        )
    return NamedSharding(mesh, spec)

  return jax.tree_util.tree_map_with_path(sharding, abstract)


def everywhere(mesh: Mesh) -> NamedSharding:
  """Whole on every device."""
  return NamedSharding(mesh, _WHOLE)


def batch_sharding(mesh: Mesh, seeds: bool = False) -> NamedSharding:
  """Of tokens (B, L + 1) or a mask; with seeds (S, B, L + 1)."""
  return NamedSharding(mesh, Spec(*["seed"] * seeds, ROWS))


def place(array: np.ndarray, sharding: NamedSharding) -> jax.Array:
  """An array of the host, each device taking its part.

  Every process has the whole of it; only its own parts are read.
  """
  return jax.make_array_from_callback(
    array.shape, sharding, lambda part: array[part]
  )


def on_mesh(mesh: Mesh | None, function: Callable) -> Callable:
  """A compiled function that knows the mesh while it is traced and run."""
  if mesh is None:
    return function

  def call(*args):
    with jax.set_mesh(mesh):
      return function(*args)

  call.lower = lambda *args: _lower(mesh, function, args)
  return call


def _lower(mesh, function, args):
  with jax.set_mesh(mesh):
    return function.lower(*args)


def here() -> bool:
  """Whether the program that is being traced is for a mesh."""
  return not jax.sharding.get_abstract_mesh().empty


def split_rows(x_B: jax.Array) -> jax.Array:
  """Says that the rows of an array are split as the batch is; inside jit."""
  if not here():
    return x_B
  return jax.lax.with_sharding_constraint(x_B, Spec(ROWS))


def whole(x: jax.Array) -> jax.Array:
  """Says that every device has the whole array; inside jit."""
  if not here():
    return x
  return jax.lax.with_sharding_constraint(x, _WHOLE)


def by_part(
  function: Callable[..., Any],
  *arrays: jax.Array,
  join: Callable[[jax.Array], jax.Array],
  axes: Sequence[str] = ROWS,
) -> Any:
  """function(*arrays), each device running it on its own rows; inside jit.

  For a function that loops over rows, where every device would otherwise wait
  for the rows of each other one.

  Args:
    function: of arrays with rows first.
    arrays: split into P parts of equal size, one for each place on `axes`.
    join: (P, ...) -> the output, for each array that the function returns.
    axes: of the mesh; those of the batch unless told.
  """
  mesh = jax.sharding.get_abstract_mesh()
  if mesh.empty:
    return function(*arrays)
  count = math.prod(mesh.shape[axis] for axis in axes)
  split = lambda x: jax.lax.with_sharding_constraint(
    x.reshape(count, -1, *x.shape[1:]),
    Spec(tuple(axes), *[Spec.UNCONSTRAINED] * x.ndim),
  )
  return jax.tree.map(join, jax.vmap(function)(*map(split, arrays)))


def deal(x_B: jax.Array, count: int) -> jax.Array:
  """(B, ...) -> (count, B / count, ...), some rows of each device in each."""
  mesh, rest = jax.sharding.get_abstract_mesh(), x_B.shape[1:]
  if mesh.empty:
    return x_B.reshape(count, -1, *rest)
  parts = math.prod(mesh.shape[axis] for axis in ROWS)
  x_PCR = x_B.reshape(parts, count, -1, *rest)
  x_CB = jnp.swapaxes(x_PCR, 0, 1).reshape(count, -1, *rest)
  return jax.lax.with_sharding_constraint(x_CB, Spec(None, ROWS))


def to_host(tree: Any) -> Any:
  """Whole numpy arrays; every process must call it, in the same order.

  One leaf at a time is gathered, so that no device holds a second tree.
  """

  def fetch(leaf):
    if not isinstance(leaf, jax.Array) or leaf.is_fully_addressable:
      return jax.device_get(leaf)
    if not leaf.is_fully_replicated:
      out = everywhere(leaf.sharding.mesh)
      leaf = jax.jit(jnp.copy, out_shardings=out)(leaf)
    return np.asarray(leaf)

  return jax.tree.map(fetch, tree)


def lead(function: Callable[[], Any]) -> Any:
  """function() of process 0, which the others wait for; they get None.

  Raises:
    UserError: in the other processes, where it failed in process 0.
  """
  if jax.process_count() == 1:
    return function()
  result = error = None
  if jax.process_index() == 0:
    try:
      result = function()
    except BaseException as caught:
      error = caught
  try:
    ok = multihost_utils.broadcast_one_to_all(np.int32(error is None))
  finally:
    if error is not None:
      raise error
  if not ok:
    raise UserError("process 0 has stopped; its own message says why")
  return result


def in_turn(function: Callable[[], Any]) -> Any:
  """function() of every process, process 0 before the others."""
  result = lead(function)
  return function() if jax.process_index() else result


def of_first(number: int) -> int:
  """The number that process 0 has; every process must ask."""
  return int(multihost_utils.broadcast_one_to_all(np.int32(number)))


def anywhere(flag: bool) -> bool:
  """Whether the flag is set in some process; every process must ask."""
  if jax.process_count() == 1:
    return flag
  return bool(np.any(multihost_utils.process_allgather(np.array(flag))))
