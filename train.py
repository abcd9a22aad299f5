"""Trains one run: python train.py --config configs/quickstart.py."""

from __future__ import annotations

import operator
import os
import re
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

from absl import app, flags, logging
from ml_collections import config_flags

from taperjax.cli import check_config_flags, ends_alone, report_errors
from taperjax.errors import UserError

_CONFIG = config_flags.DEFINE_config_file(
  "config", None, "Config file, with its argument: FILE[:ARGUMENT]."
)
_WORKDIR = flags.DEFINE_string(
  "workdir", None, "Folder of the run; a dated one under runs/ if left out."
)
_OVERWRITE = flags.DEFINE_bool(
  "overwrite", False, "Remove an earlier run in the workdir first."
)
_STOP_AFTER = flags.DEFINE_integer(
  "stop_after", None, "Save and stop after this step; run again to go on."
)
_CACHE = flags.DEFINE_string(
  "compilation_cache", None, "Folder of compiled programs; default in workdir."
)
_COORDINATOR = flags.DEFINE_string(
  "coordinator", None, "Of several processes: HOST:PORT of process 0, or auto."
)
_PROCESSES = flags.DEFINE_integer(
  "processes", None, "Number of processes of the run."
)
_PROCESS = flags.DEFINE_integer(
  "process", None, "Which one this is, from 0."
)
_DEBUG = flags.DEFINE_bool("debug", False, "Show tracebacks of user errors.")


def _parse_flags(argv: list[str]) -> list[str]:
  """absl's parser, with one line for each mistake in place of a traceback."""
  with report_errors("train.py", "--debug" in argv):
    if any(re.match("--?help", arg) for arg in argv):
      return flags.FLAGS(argv)
    argv, empty = check_config_flags(argv)
    sys.argv = argv  # ml_collections reads the fields to set from there
    try:
      rest = flags.FLAGS(argv)
      for field in empty:
        group, _, name = field.rpartition(".")
        group = operator.attrgetter(group)(_CONFIG.value) if group else (
          _CONFIG.value
        )
        group[name] = None
    except (flags.Error, AttributeError, LookupError, TypeError,
            ValueError) as error:
      text = str(error)
      if isinstance(error, flags.UnrecognizedFlagError):
        text += "; see train.py --help"
      raise UserError(text) from error
    if len(rest) > 1:
      raise UserError(f"stray argument {rest[1]!r}; options start with --")
  return rest


def main(argv: list[str]) -> None:
  del argv
  sys.stdout.reconfigure(errors="replace")  # a story in an ASCII terminal
  logging.set_verbosity(logging.ERROR)  # orbax tells every rename
  with ends_alone(), report_errors("train.py", _DEBUG.value):
    from taperjax import loop, saved, sharding

    sharding.connect(_COORDINATOR.value, _PROCESSES.value, _PROCESS.value)
    loop.train(
      saved.read_config(_CONFIG.value),
      _WORKDIR.value,
      overwrite=_OVERWRITE.value,
      stop_after=_STOP_AFTER.value,
      compilation_cache=_CACHE.value,
    )


if __name__ == "__main__":
  app.run(main, flags_parser=_parse_flags)
