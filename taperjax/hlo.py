"""What an optimized program does in one run: its products and collectives.

The compiler's own cost analysis counts the body of a loop once; here all counts
as often as it runs.
"""

from __future__ import annotations

import dataclasses
import math
import re

import numpy as np


@dataclasses.dataclass(frozen=True)
class Collective:
  """An exchange that each device takes part in.

  Attributes:
    kind: "all-gather", "all-reduce", "all-to-all", "collective-permute" or
      "reduce-scatter".
    times: how often it runs.
    sent: bytes that a device sends each time, around the ring of its group.
    groups: devices by their place in the mesh, (groups, devices); of a permute
      (pairs, 2).
  """

  kind: str
  times: int
  sent: float
  groups: np.ndarray


@dataclasses.dataclass
class Work:
  """Of one device: FLOPs of its products, and its collectives."""

  flops: float = 0
  collectives: list[Collective] = dataclasses.field(default_factory=list)


def computations(text: str) -> dict[str, dict[str, str]]:
  """Instructions by name of each computation; the entry's name is "".

  Args:
    text: optimized HLO, `compiled.as_text()`.
  """
  found, name = {}, None
  for line in text.splitlines():
    if head := re.match(r"(ENTRY )?%?([\w.\-]+) \(.*\{$", line):
      name = "" if head[1] else head[2]
      found[name] = {}
    elif name is not None and (
      match := re.match(r"\s+(?:ROOT )?%?([\w.\-]+) = (.*)", line)
    ):
      found[name][match[1]] = match[2]
  return found


def work(text: str) -> Work:
  """What a run of a program does on one device.

  Args:
    text: optimized HLO of a partitioned program.

  Raises:
    ValueError: a loop whose length is not known, a conditional, or an exchange
      that only starts.
  """
  programs, total = computations(text), Work()

  def run(name, times):
    program = programs[name]
    for line in program.values():
      shape, opcode, rest = _split(line)
      if opcode == "dot":
        total.flops += times * _dot_flops(shape, rest, program)
      elif opcode in _SENT:
        total.collectives.append(_collective(opcode, times, shape, rest))
      elif opcode == "while":
        trips = re.search(r'"known_trip_count":\{"n":"(\d+)"', rest)
        if trips is None:
          raise ValueError(f"a loop of unknown length: {line}")
        run(_called("body", rest), times * int(trips[1]))
      elif opcode == "conditional" or opcode.removesuffix("-start") in _SENT:
        raise ValueError(f"{opcode} is not counted: {line}")
      elif opcode in ("fusion", "call"):
        run(_called("calls" if opcode == "fusion" else "to_apply", rest), times)

  run("", 1)
  return total


def _split(line):
  """(shape, opcode, the rest) of an instruction."""
  return re.match(r"(.*?) ([a-z][a-z\-]*)\((.*)", line).groups()


def _called(how, rest):
  return re.search(rf"\b{how}=%?([\w.\-]+)", rest)[1]


def _arrays(shape):
  """(dtype, sizes) of each array in a shape, which may be a tuple."""
  return [
    (dtype, [int(size) for size in sizes.split(",") if size])
    for dtype, sizes in re.findall(r"\b([a-z]\w*)\[([\d,]*)\]", shape)
  ]


def _bytes(shape):
  bits = lambda dtype: int((re.search(r"\d+", dtype) or ["8"])[0])  # pred: 8
  return sum(bits(d) // 8 * math.prod(sizes) for d, sizes in _arrays(shape))


def _dot_flops(shape, rest, program):
  """Two for each product that is summed."""
  left = re.match(r"(?:[^%)]*? )?%?([\w.\-]+)", rest)[1]
  [(_, sizes)] = _arrays(_split(program[left])[0])
  axes = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", rest)[1]
  summed = math.prod(sizes[int(axis)] for axis in axes.split(",") if axis)
  [(_, out)] = _arrays(shape)
  return 2 * math.prod(out) * summed


# Bytes that each of g devices sends in a ring, of the bytes of its result.
_SENT = {
  "all-gather": lambda result, g: result * (g - 1) / g,
  "all-reduce": lambda result, g: 2 * result * (g - 1) / g,
  "reduce-scatter": lambda result, g: result * (g - 1),
  "all-to-all": lambda result, g: result * (g - 1) / g,
  "collective-permute": lambda result, g: result,
}


def _collective(kind, times, shape, rest):
  groups = _groups(rest)
  sent = _SENT[kind](_bytes(shape), groups.shape[1])
  return Collective(kind, times, sent, groups)


def _groups(rest):
  """Written in one of three ways, or the pairs of a permute:

      {{0,1},{2,3}}    [2,2]<=[2,2]T(1,0)    mesh['a'=2,'b'=2] {'a'}
  """
  if listed := re.search(r"(?:groups|pairs)=\{(\{.*?\})\}", rest):
    return np.array([_ints(row) for row in listed[1].split("},{")])
  order = r"\[([\d,]+)\](T\([\d,]+\))?"
  if iota := re.search(rf"groups=\[([\d,]+)\]<={order}", rest):
    return _devices(iota[2], iota[3]).reshape(_ints(iota[1]))
  axes = re.search(
    rf"groups=mesh\[([^\]]*)\](?:, device_ids=\({order}\))? \{{([^}}:]*)\}}",
    rest,
  )
  if axes is None:
    raise ValueError(f"groups of devices that are not understood: {rest}")
  sizes = {name: int(n) for name, n in re.findall(r"('\w+')=(\d+)", axes[1])}
  devices = _devices(axes[2] or str(math.prod(sizes.values())), axes[3])
  devices = devices.reshape(list(sizes.values()))
  members = [list(sizes).index(name) for name in axes[4].split(",")]
  devices = np.moveaxis(devices, members, range(-len(members), 0))
  return devices.reshape(-1, math.prod(devices.shape[-len(members):]))


def _ints(text):
  return [int(number) for number in re.findall(r"\d+", text)]


def _devices(sizes, order):
  """0, 1, 2, ... in these sizes, its axes in another order."""
  devices = np.arange(math.prod(_ints(sizes))).reshape(_ints(sizes))
  return devices.transpose(_ints(order)) if order else devices
