"""All measurements of one device in one Markdown file, one after another."""

from __future__ import annotations

import datetime
import os
import pathlib
import platform
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence

import jax

from taperjax import summary
from taperjax.bench import roofline
from taperjax.data import files

_COLUMNS = 160  # of a table: no cell is broken
_HEAD = "from taperjax.bench import sheet; print(sheet._head(), end='')"
_PROGRAM = "from taperjax.cli import main; main()"


def commands(
  shapes: Sequence[str], config: str, fields: Sequence[str], repeats: int
) -> dict[str, list[str]]:
  """Arguments of `taperjax bench` for each section, by its name.

  Args:
    shapes: of `bench.decode.SHAPES`.
    config: FILE[:ARGUMENT] of a variant with a taper.
    fields: --config.NAME=VALUE for it.
    repeats: rounds of all of them.
  """
  rounds = [f"--repeats={repeats}"]
  found = {}
  for shape in shapes:
    of = ["--shape", shape, *rounds]
    found[f"decode-{shape}"] = [
      "decode", *of, "--batch=1,16", "--prompt=128", "--new=32",
      "--dtype=float32,bfloat16,int8",
    ]
    found[f"length-{shape}"] = [
      "decode", *of, "--batch=1", "--prompt=64,128,256,448", "--new=32",
      "--dtype=float32",
    ]
    found[f"peers-{shape}"] = [
      "peers", *of, "--batch=1,16", "--new=64",
      "--peers=jax,transformers,transformers-static,llama.cpp",
    ]
  found["train"] = ["train", config, *rounds, *fields]
  found["torch"] = [
    "train", config, "--forms=baseline", "--peers=torch,torch-compile",
    *rounds, *fields,
  ]
  found["start"] = ["start", config, *rounds, *fields]
  return found


def run(sections: dict[str, list[str]], out: pathlib.Path) -> dict[str, int]:
  """Runs every section in a process of its own, and adds it to the file.

  A section that fails leaves its message, and the next one follows. Sections
  that are done stay in the file when the run is stopped. Progress goes to
  standard error.

  Args:
    sections: from `commands`.
    out: exists; gets benchmarks.md, and a folder NAME for each section.

  Returns:
    The exit code of each section.
  """
  # In a process of its own: this one must not hold the device.
  text = subprocess.run(
    [sys.executable, "-c", _HEAD], check=True, text=True,
    stdout=subprocess.PIPE,
  ).stdout
  codes = {}
  for number, (name, arguments) in enumerate(sections.items(), 1):
    print(f"{number}/{len(sections)} {name}", file=sys.stderr, flush=True)
    begin = time.perf_counter()
    codes[name], printed, last = _bench([*arguments, f"--out={out / name}"])
    shown = [  # "wrote ..." names a folder of this machine
      line for line in printed if not line.startswith("wrote ")
    ]
    if codes[name]:
      shown += ["", f"Exit code {codes[name]}: {last}"]
    body = "\n".join(shown).strip()
    text += (
      f"\n## {name}\n\n```sh\ntaperjax bench {shlex.join(arguments)}\n```\n\n"
      f"{body}\n\n{time.perf_counter() - begin:,.0f} s in all.\n"
    )
    with files.atomic_write(out / "benchmarks.md") as file:
      file.write(text.encode())
  return codes


def _bench(arguments: Sequence[str]) -> tuple[int, list[str], str]:
  """Exit code, lines printed, and the last line on standard error."""
  with tempfile.TemporaryFile("w+") as printed, subprocess.Popen(
    [sys.executable, "-c", _PROGRAM, "bench", *arguments], text=True,
    stdout=printed, stderr=subprocess.PIPE,
    env=os.environ | {"COLUMNS": str(_COLUMNS)},
  ) as process:
    last = ""
    for line in process.stderr:
      sys.stderr.write(line)
      last = line.strip() or last
    code = process.wait()
    printed.seek(0)
    return code, printed.read().splitlines(), last


def _head() -> str:
  """Date, device, cores, commit and versions."""
  device = jax.devices()[0]
  kind = device.device_kind
  if device.platform == "cpu":
    kind = _processor()
  versions = ", ".join(f"{k} {v}" for k, v in summary.versions().items())
  day = datetime.datetime.now(datetime.UTC).date()
  return (
    f"# Measurements of one device\n\n{day}, {kind}, "
    f"{len(jax.devices())} x {device.platform}, {roofline.cores()} cores; "
    f"commit {summary.commit()}; {versions}.\n"
  )


def _processor() -> str:
  """The name of the processor, as far as the system tells it."""
  try:
    for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines():
      if line.startswith("model name"):
        return line.partition(":")[2].strip()
  except OSError:  # not Linux
    pass
  return platform.processor() or platform.machine()
