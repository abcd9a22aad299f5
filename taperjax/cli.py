"""The command line: `taperjax eval | probe | fold | generate | info | ...`.

Every command takes --json and then prints one JSON object on standard output;
all else goes to standard error. A mistake of the user is one line and exit
code 2.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import difflib
import functools
import json
import math
import operator
import os
import pathlib
import re
import runpy
import signal
import sys
import textwrap
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import taperjax
from taperjax.errors import UserError


@contextlib.contextmanager
def report_errors(program: str, debug: bool) -> Iterator[None]:
  """A UserError becomes one line and exit code 2; --debug lets it through."""
  try:
    yield
  except UserError as error:
    if debug:
      raise
    text = " ".join(str(error).split())
    print(f"{program}: error: {text}", file=sys.stderr)
    sys.exit(2)
  except KeyboardInterrupt:
    print(f"{program}: interrupted", file=sys.stderr)
    sys.exit(130)
  except (UnicodeEncodeError, MemoryError, RecursionError) as error:
    if debug:
      raise
    what = {
      UnicodeEncodeError: "an argument or a text is not valid UTF-8; mend it",
      MemoryError: "not enough memory; use smaller sizes or batches",
      RecursionError: "a file is nested too deeply; mend it",
    }
    what = next(text for kind, text in what.items() if isinstance(error, kind))
    print(f"{program}: error: {what}", file=sys.stderr)
    sys.exit(2)
  except BrokenPipeError:  # the reader has enough, as in `... | head`
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(0)
  except OSError as error:  # a name too long, a file that is not ours to read
    if debug:
      raise
    name = str(error.filename)[:200]
    print(
      f"{program}: error: {name} cannot be used ({error.strerror or error}); "
      "choose another file or folder",
      file=sys.stderr,
    )
    sys.exit(2)


@contextlib.contextmanager
def ends_alone() -> Iterator[None]:
  """Of several processes, one that fails ends at once.

  At its exit jax would wait for the others, for minutes, while they wait for a
  sum with it. So they see its connections close, see `sharding.peers`.
  """
  try:
    yield
  except BaseException as error:
    import jax

    if not jax.distributed.is_initialized():
      raise
    code = error.code if isinstance(error, SystemExit) else 1
    with contextlib.suppress(OSError, ValueError):  # a closed stream
      if not isinstance(error, SystemExit):
        traceback.print_exc()
      sys.stdout.flush()
      sys.stderr.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))


@contextlib.contextmanager
def unwind_sigterm() -> Iterator[None]:
  """SIGTERM ends as Ctrl-C does, after half-written folders are removed."""

  def stop(number, frame):
    del frame
    sys.exit(128 + number)

  try:
    before = signal.signal(signal.SIGTERM, stop)
  except ValueError:  # not in the main thread: the caller handles signals
    yield
    return
  try:
    yield
  finally:
    signal.signal(signal.SIGTERM, before)


def load_config(argument: str) -> Any:
  """The ConfigDict of FILE or FILE:ARGUMENT.

  Raises:
    UserError: no such file, or whatever its get_config raises, in one line.
  """
  path, colon, argument_text = argument.partition(":")
  file = pathlib.Path(path)
  if not file.is_file():
    raise UserError(f"config file {path} does not exist; see configs/")
  # Configs import one another from the folder that holds configs/.
  folders = [str(file.absolute().parent.parent), os.getcwd()]
  sys.path[:0] = folders
  try:
    get_config = runpy.run_path(path)["get_config"]
    return get_config(argument_text) if colon else get_config()
  except Exception as error:  # the file is the user's, so is any mistake in it
    kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
    raise UserError(f"config {argument}: {kind}{error}") from error
  finally:
    for folder in folders:
      sys.path.remove(folder)


# How a value on the command line is read, and what it is called.
_READERS = {
  bool: (lambda text: {"true": 1, "false": 0}[text.lower()], "true or false"),
  int: (int, "a whole number"),
  float: (float, "a number"),
}


def check_config_flags(argv: list[str]) -> tuple[list[str], list[str]]:
  """Tells mistakes in --config and --config.FIELD=VALUE in one line each.

  Returns:
    argv without the fields that are set to None, which absl cannot read, and
    the names of these fields.

  Raises:
    UserError: no --config, a file that gives no config, or a field or a value
      that does not fit it.
  """
  argument, fields = None, []
  for flag, following in zip(argv, [*argv[1:], None], strict=True):
    match = re.fullmatch(r"--?config(?:\.([^=]+))?(?:=(.*))?", flag, re.DOTALL)
    if match and match[1] is None:
      argument = following if match[2] is None else match[2]
    elif match:
      fields.append((flag, match[1], match[2]))
  if argument is None:
    raise UserError("--config is missing; try --config configs/quickstart.py")
  config = load_config(argument)
  empty = {}
  for flag, field, text in fields:
    kind = _field_type(config, field)
    if text is None:
      continue  # the next word, or a bare flag: left to absl
    if text == "None":
      empty[flag] = field
    elif kind in _READERS:
      read, words = _READERS[kind]
      try:
        read(text)
      except (ValueError, KeyError) as error:
        raise UserError(f"{field}={text!r} must be {words}") from error
  return [a for a in argv if a not in empty], list(empty.values())


def _field_type(config: Any, field: str) -> type:
  """The type of a field by its dotted name, which must exist."""
  node, prefix = config, ""
  *parents, last = field.partition("[")[0].split(".")
  for name in [*parents, last]:
    known = list(node.keys()) if hasattr(node, "keys") else []
    if name not in known:
      close = difflib.get_close_matches(name, known, 1, 0.5)
      hint = f"did you mean {prefix}{close[0]}?" if close else (
        "the fields are " + ", ".join(sorted(known))
      )
      if not known:
        hint = f"{prefix[:-1]} is a single value"
      raise UserError(f"{prefix}{name} is not a config field; {hint}")
    parent, node, prefix = node, node[name], f"{prefix}{name}."
  if hasattr(node, "keys"):
    raise UserError(
      f"{field} is a group of fields; set one of them, for example "
      f"--config.{field}.{min(node.keys())}"
    )
  return parent.get_type(last)


def main(argv: list[str] | None = None) -> None:
  """Entry point of the `taperjax` command."""
  os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
  with contextlib.suppress(AttributeError):  # a stream of a test
    sys.stdout.reconfigure(errors="replace")  # a story in an ASCII terminal
  parser = _parser()
  args, rest = parser.parse_known_args(argv)
  args.fields = []
  if args.run in (_reproduce, _bench_train, _bench_start, _bench_all, _plan):
    args.fields = [arg for arg in rest if arg.startswith("--config.")]
  if unknown := [arg for arg in rest if arg not in args.fields]:
    parser.error(f"unrecognized arguments: {' '.join(unknown)}")
  program = f"taperjax {args.command}"
  with unwind_sigterm(), report_errors(program, args.debug):
    _check_named(args)
    result = args.run(args)
    if args.json:
      from taperjax.summary import strict

      print(json.dumps(strict(result), allow_nan=False))
    sys.stdout.flush()


def _check_named(args: argparse.Namespace) -> None:
  """Refuses an empty name, which would mean the current folder."""
  for name, value in vars(args).items():
    given = value if isinstance(value, list) else [value]
    if "" in given and name != "prompt":
      raise UserError(
        f"{name}='' is empty; name a file or a folder, . for the current one"
      )


class _Parser(argparse.ArgumentParser):
  """Tells a mistake in one line, without the usage."""

  def error(self, message: str) -> None:
    self.exit(2, f"{self.prog}: error: {message}; see {self.prog} --help\n")


_EXPORTS = ("hf", "transformer-lens", "stablehlo", "safetensors", "gguf")


def _step(text: str) -> int | str:
  """A step on the command line; argparse names it in its message."""
  return text if text == "best" else int(text)


_step.__name__ = "step number"


def _parser() -> argparse.ArgumentParser:
  parser = _Parser(
    prog="taperjax", description="Transformers whose norms taper away."
  )
  parser.add_argument(
    "--version", action="version", version=f"taperjax {taperjax.__version__}"
  )
  commands = parser.add_subparsers(dest="command", required=True)

  def output(sub):
    sub.add_argument("--json", action="store_true", help="print a JSON object")
    sub.add_argument("--debug", action="store_true", help="show tracebacks")

  def measured(sub, written, out=None):
    sub.add_argument("--repeats", type=int, default=20, help="rounds; 20")
    written += "" if out is None else f"; default {out}"
    sub.add_argument("--out", default=out, help=f"folder for {written}")
    output(sub)

  def step(sub, seed="--seed"):
    sub.add_argument(
      "--step",
      type=_step,
      metavar="STEP",
      help="checkpoint, a number or best; default the latest",
    )
    sub.add_argument(
      seed,
      dest="model_seed",
      type=int,
      metavar="SEED",
      help="which one of a run with several seeds",
    )

  def command(name, run, text, model_help, **options):
    sub = commands.add_parser(name, help=text, description=text)
    sub.set_defaults(run=run)
    sub.add_argument("model", help=model_help)
    step(sub, **options)
    output(sub)
    return sub

  where = "workdir, folder of checkpoints, or one step in it"

  def gate(sub):
    text = "gate of the tapered norms, 0 to 1; default the saved one"
    sub.add_argument("--gate", type=float, help=text)

  text = "Loss of texts, its tails, and how large the model's numbers grow."
  sub = command("eval", _eval, text, where)
  gate(sub)
  sub.add_argument(
    "--data",
    nargs="+",
    metavar="FILE",
    help=".txt, .jsonl or .parquet; default the run's validation text",
  )
  sub.add_argument(
    "--per-document",
    action="store_true",
    help="begin-of-text before each document, each cut at the context",
  )
  sub.add_argument(
    "--reference",
    metavar="MODEL",
    help="another model of the same tokenizer: the divergence to it",
  )
  sub.add_argument("--batch-size", type=int, default=16, help="windows")
  sub.add_argument(
    "--max-windows",
    type=int,
    help="score only the first ones; default all of FILE, or those of the run",
  )
  sub.add_argument(
    "--int8",
    action="store_true",
    help="the loss with int8 weights, too",
  )

  text = "Which norms are free to remove: the loss without each, and in order."
  sub = command("probe", _probe, text, where)
  sub.add_argument(
    "--data",
    nargs="+",
    metavar="FILE",
    help="the first half of its windows calibrates, the second is scored; "
    "default the run's validation text",
  )
  sub.add_argument(
    "--calibrate",
    nargs="+",
    metavar="FILE",
    help="text to calibrate on; all of --data is scored then",
  )
  sub.add_argument(
    "--out", help="folder for probe.json, and the plot as PNG and SVG"
  )
  sub.add_argument("--batch-size", type=int, default=16, help="windows")
  sub.add_argument(
    "--max-windows", type=int, help="use only the first ones of a text"
  )

  sub = command("fold", _fold, "Fold the tapers into the weights.", where)
  sub.add_argument("--out", help="folder to write; default folded/ in the run")
  sub.add_argument(
    "--data",
    metavar="FILE",
    help="text to compare on; default the run's validation text",
  )

  sub = command(
    "generate", _generate, "Continue texts.", where, seed="--model-seed"
  )
  gate(sub)
  sub.add_argument(
    "--prompt",
    action="append",
    help="text to continue; may be repeated; default a new text",
  )
  sub.add_argument(
    "--max-new",
    type=int,
    help="tokens; default 200, or what the context has room for",
  )
  sub.add_argument("--temperature", type=float, default=0.8, help="0: greedy")
  sub.add_argument("--top-k", type=int, default=0, help="0: off")
  sub.add_argument("--top-p", type=float, default=1.0, help="1: off")
  sub.add_argument("--seed", type=int, default=0, help="of the sampling")
  sub.add_argument(
    "--window", action="store_true", help="slide on past the context"
  )
  sub.add_argument(
    "--int8", action="store_true", help="matrices of 8 bits with scales"
  )

  command(
    "info",
    _info,
    "Shape of a model or of a config file.",
    where + ", or a config FILE.py[:ARGUMENT]",
  )

  text = "Run a config with several variants and seeds, and report on them."
  sub = commands.add_parser(
    "reproduce",
    help=text,
    description=f"{text} Stopped or killed, the same command goes on.",
    epilog="Fields are set as for train.py: --config.steps=1000.",
  )
  sub.set_defaults(run=_reproduce)
  sub.add_argument("config", help="config FILE.py[:ARGUMENT]")
  sub.add_argument(
    "--variants",
    default="baseline,internal,internal_aux,final,all,all_aux",
    help="default the six of the paper",
  )
  sub.add_argument("--seeds", default="0-5", help="as 0-5 or 0,2,7")
  sub.add_argument("--workdir", required=True, help="folder of the grid")
  sub.add_argument(
    "--together",
    action=argparse.BooleanOptionalAction,
    help="all seeds of a variant in one program; default but on a CPU",
  )
  output(sub)

  text = "Memory, work and time of a run on devices that are not here."
  sub = commands.add_parser(
    "plan",
    help=text,
    description=text,
    epilog="Fields are set as for train.py: --config.micro_batches=8.",
  )
  sub.set_defaults(run=_plan)
  sub.add_argument("--config", required=True, help="FILE.py[:ARGUMENT]")
  sub.add_argument(
    "--mesh",
    metavar="AXIS=N,...",
    help="data=64,fsdp=8; default the config's",
  )
  sub.add_argument("--device", default="h100", help="default h100")
  output(sub)

  def subject(sub):
    sub.add_argument("model", nargs="?", help=where + "; or give --shape")
    step(sub)
    sub.add_argument("--shape", help="random weights: 1m, 3m, 9m, 30m, ...")

  text = "Speed, measured in turn: of decoding, or of a training step."
  sub = commands.add_parser("bench", help=text, description=text)
  kinds = sub.add_subparsers(dest="what", required=True, metavar="WHAT")
  text = "Decoding: live norms, tapered away, and folded."
  sub = kinds.add_parser("decode", help=text, description=text)
  sub.set_defaults(run=_bench_decode)
  subject(sub)
  sub.add_argument("--batch", default="1,4,16,64", help="rows; 1,4,16,64")
  sub.add_argument("--prompt", default="128", help="tokens; 128, or a list")
  sub.add_argument("--new", type=int, default=256, help="tokens; 256")
  sub.add_argument(
    "--dtype",
    default="float32,bfloat16",
    help="computed in; or int8 weights, computed in the model's dtype",
  )
  sub.add_argument("--forms", default="baseline,unfused,folded")
  measured(sub, "bench.json, and the plot as PNG and SVG")
  text = "Decoding beside other programs, with the same weights."
  sub = kinds.add_parser("peers", help=text, description=text)
  sub.set_defaults(run=_bench_peers)
  subject(sub)
  sub.add_argument("--batch", default="1,16", help="rows; 1,16")
  sub.add_argument("--prompt", type=int, default=32, help="tokens; 32")
  sub.add_argument("--new", type=int, default=128, help="tokens; 128")
  sub.add_argument("--forms", default="baseline,folded")
  sub.add_argument(
    "--peers",
    default="jax,transformers",
    help="jax: a plain loop over the Flax model; transformers; "
    "transformers-static: compiled, with a static cache; llama.cpp: by "
    "llama-cpp-python",
  )
  measured(sub, "bench.json")
  text = "A training step: the model without a taper, and the three phases."
  sub = kinds.add_parser("train", help=text, description=text)
  sub.set_defaults(run=_bench_train)
  sub.add_argument(
    "config",
    help="FILE or FILE:ARGUMENT of a variant with a taper; fields are set with "
    "--config.NAME=VALUE",
  )
  sub.add_argument("--forms", default="baseline,norm,taper,scale")
  sub.add_argument(
    "--peers",
    help="steps of PyTorch beside baseline: torch, torch-compile or both",
  )
  measured(sub, "bench.json")
  text = "Start-up of train.py, tokenizing, and making batches."
  sub = kinds.add_parser("start", help=text, description=text)
  sub.set_defaults(run=_bench_start)
  sub.add_argument(
    "config", help="FILE or FILE:ARGUMENT; fields as for bench train"
  )
  sub.add_argument("--script", default="train.py", help="default train.py")
  measured(sub, "bench.json")
  text = "All of these one after another, in one Markdown file."
  sub = kinds.add_parser("all", help=text, description=text)
  sub.set_defaults(run=_bench_all)
  sub.add_argument(
    "config", nargs="?", default="configs/tinystories.py:1m,all_aux",
    help="of bench train and bench start; default "
    "configs/tinystories.py:1m,all_aux",
  )
  sub.add_argument("--shapes", default="1m,30m", help="decoded; 1m,30m")
  measured(sub, "benchmarks.md, and one folder for each section", "bench")

  text = "Write a model for another program, and read it back there."
  sub = commands.add_parser("export", help=text, description=text)
  sub.set_defaults(run=_export)
  sub.add_argument("model", nargs="+", help=where)
  step(sub)
  sub.add_argument("--to", choices=_EXPORTS, help="format")
  sub.add_argument("--out", help="folder to write; default export/ in the run")
  sub.add_argument(
    "--dtype",
    choices=("bfloat16", "float32", "float16"),
    default="bfloat16",
    help="of the file; default bfloat16",
  )
  sub.add_argument(
    "--remote-code",
    action="store_true",
    help="hf: a modeling file without norms in place of the stock class",
  )
  sub.add_argument(
    "--weights",
    choices=("arguments", "constants"),
    help="stablehlo: in one safetensors file (default), or in the artifacts",
  )
  sub.add_argument(
    "--data",
    metavar="FILE",
    help="text to compare on; default the run's validation text",
  )
  sub.add_argument(
    "--matrix",
    action="store_true",
    help="every format of every MODEL, and a table of their errors",
  )
  output(sub)

  text = "Import a model of another program."
  sub = commands.add_parser("import", help=text, description=text)
  sub.set_defaults(run=_import)
  sub.add_argument(
    "source",
    help="Hugging Face folder with safetensors or, with the extra hub, "
    "owner/name; GGUF file; or llama2.c .bin",
  )
  sub.add_argument("workdir", help="new folder, for all other commands")
  sub.add_argument("--tokenizer", metavar="FILE", help="default: beside SOURCE")
  sub.add_argument(
    "--context-len", type=int, metavar="N", help="shorten the context"
  )
  sub.add_argument(
    "--gain-offset",
    type=float,
    default=0.0,
    metavar="X",
    help="added to every norm's gain; 1 for files that store them as (1 + w)",
  )
  output(sub)

  text = "A page, figures and tables of runs, finished or not."
  sub = commands.add_parser("report", help=text, description=text)
  sub.set_defaults(run=_report)
  sub.add_argument("runs", nargs="+", metavar="RUN", help="workdir of train.py")
  sub.add_argument(
    "--out",
    required=True,
    metavar="FOLDER",
    help="a new or empty folder, or an earlier report, which is replaced",
  )
  output(sub)
  return parser


def _at_least_one(args: argparse.Namespace, *names: str) -> None:
  for name in names:
    value = getattr(args, name)
    if value is not None and value < 1:
      raise UserError(
        f"--{name.replace('_', '-')}={value} must be 1 or more; for example 16"
      )


def _eval(args: argparse.Namespace) -> dict[str, Any]:
  from taperjax import api, saved
  from taperjax.summary import by_seed, mean_text

  _at_least_one(args, "batch_size", "max_windows")
  seeds = None
  if args.model_seed is None:
    seeds = saved.seeds(args.model, args.step)
  if seeds is None:
    model = api.load(args.model, args.step, args.model_seed)
    return _eval_model(args, model, _other_model(args, args.model_seed))
  rows = []
  for seed, diverged in seeds.items():
    row = None
    if not diverged:
      model = api.load(args.model, args.step, seed)
      row = _eval_model(args, model, _other_model(args, seed), f"seed {seed}, ")
    rows.append(row)
  live = [row for row in rows if row is not None]
  results = []
  for j, first in enumerate(live[0]["results"]):
    found = by_seed([row and row["results"][j] for row in rows])
    results.append(found | {"data": first["data"]})
    if not args.json:
      losses = [loss for loss in found["loss"] if loss is not None]
      print(f"{first['data']}: {mean_text(losses)} nats per token")
  return live[0] | {"seed": list(seeds), "results": results}


def _other_model(args: argparse.Namespace, seed: int | None):
  """The model to compare with; of several seeds the same one."""
  from taperjax import api, saved

  if args.reference is None:
    return None
  several = saved.seeds(args.reference) is not None
  return api.load(args.reference, seed=seed if several else None)


def _eval_model(
  args: argparse.Namespace, model, reference, label: str = ""
) -> dict[str, Any]:
  """Every text with one model; a label stands for the tables on the tails."""
  from taperjax import api

  gate = api.check_gate(model, args.gate)
  shown = f", gate {gate:g}" if model.tapered else ""
  eight_bits = api.as_int8(model) if args.int8 else None
  results = []
  for name, batches in _eval_texts(args, model):
    found = {"data": name}
    found |= api.evaluate_tails(
      model, batches(), gate=args.gate, reference=reference
    )
    if model.calibrated and gate > 0.0:  # the paper evaluates at gate 0
      zero = api.evaluate_batches(model, batches(), gate=0.0)
      found["loss_g0"] = zero["loss"]
    if args.int8:
      eight = api.evaluate_batches(eight_bits, batches(), gate=args.gate)
      found["loss_int8"] = eight["loss"]
    results.append(found)
    if not args.json:
      bits = found["bits_per_byte"]
      bits = "" if bits is None else f"  {bits:.4f} bits per byte"
      zero = f"  {found['loss_g0']:.4f} at gate 0" if "loss_g0" in found else ""
      if args.int8:
        more = found["loss_int8"] - found["loss"]
        zero += f"  {found['loss_int8']:.4f} in int8 ({more:+.5f})"
      print(
        f"{label}{name}: {found['loss']:.4f} nats per token{bits}{zero}  "
        f"({found['tokens']:,} tokens{shown})"
      )
      if not label:
        _print_tails(found, args.reference)
  spike = None if label else _train_spike(model)
  if not args.json and spike is not None:
    where = f", to {spike['loss']:.4f} at step {spike['step']:,}"
    print(
      f"largest rise of the training loss: {spike['rise']:.4f} nats"
      + (where if spike["rise"] else "")
    )
  return {
    "step": model.step,
    "gate": gate if model.tapered else None,  # norms, or folded: there is none
    "reference": args.reference,
    "train_spike": spike,
    "results": results,
  }


def _train_spike(model) -> dict[str, Any] | None:
  """Of the run that made the model; an import or a bare folder has none."""
  from taperjax import metrics, saved, tails

  workdir = saved.workdir_of(model.folder)
  path = None if workdir is None else workdir / "metrics.jsonl"
  if path is None or not path.exists():
    return None
  records = metrics.read_metrics(path)
  if any(isinstance(r.get("loss"), list) for r in records):  # by seed
    i = model.meta["config"]["seeds"].index(model.meta["seed"])
    records = [
      r | {"loss": r["loss"][i]} if r["kind"] == "train" else r for r in records
    ]
  return tails.train_spike(records, model.step)


def _print_tails(found: dict[str, Any], reference: str | None) -> None:
  """Figures and worst tokens of one text, as two tables."""
  import numpy as np
  from rich.table import Table
  from rich.text import Text

  residuals = found["residuals"]
  largest = residuals["largest_by_layer"]
  n = int(np.argmax(largest))  # the first NaN, if there is one
  figures = Table(show_header=False)
  figures.add_column()
  figures.add_column(justify="right")
  rows = [
    ("loss of a token, median", f"{found['median']:.4f}"),
    ("loss of a token, 99.9th percentile", f"{found['p99_9']:.4f}"),
    ("entropy of the predictions", f"{found['entropy']:.4f}"),
    ("calibration error, 15 bins", f"{found['calibration_error']:.4f}"),
    (
      f"largest |residual|, behind block {n} of 0..{len(largest) - 1}",
      f"{largest[n]:.4g}",
    ),
    ("margin to float16 overflow", f"x {residuals['float16_margin']:.4g}"),
  ]
  if reference is not None:
    rows.insert(4, (f"divergence to {reference}", f"{found['jsd']:.4g}"))
  for name, value in rows:
    figures.add_row(Text(name), value)
  worst = Table(title="the worst tokens")
  for name in ("nats", "window", "position", "token", "after"):
    number = name in ("nats", "window", "position")
    worst.add_column(name, justify="right" if number else "left")
  for token in found["worst"]:
    worst.add_row(
      f"{token['nll']:.2f}",
      f"{token['window']:,}",
      f"{token['position']:,}",
      Text(repr(token["token"]) if token["token"] else f"id {token['id']}"),
      Text(repr(token["before"][-24:])),
    )
  print(_drawn(figures, worst), end="")


def _eval_texts(args, model) -> Iterator[tuple[str, Callable[[], Any]]]:
  """(name, function that gives batches) of every text that was asked for."""
  from taperjax import saved
  from taperjax.data import text, windows

  shape = {
    "batch_size": args.batch_size,
    "context_len": model.config.context_len,
  }
  tokenizer = _need_tokenizer(model)
  if args.per_document:
    if not args.data:
      raise UserError("--per-document needs texts; add --data FILE")
    if args.max_windows is not None:
      raise UserError(
        "--max-windows has no effect with --per-document; leave it out"
      )
    bos = tokenizer.eos_id if tokenizer.bos_id is None else tokenizer.bos_id
    for path in args.data:
      rows = [tokenizer.encode(t) for t in text.iter_documents(path)]
      yield path, functools.partial(
        windows.document_batches, rows, bos_id=bos, **shape
      )
    return
  shape["max_windows"] = args.max_windows
  if not args.data:
    ids = saved.valid_tokens(model)
    config = model.meta["config"]  # its windows, so that losses agree
    shape["context_len"] = config["context_len"]
    if args.max_windows is None:
      shape["max_windows"] = config["eval"]["max_windows"]
    yield "validation", functools.partial(windows.eval_batches, ids, **shape)
  for path in args.data or ():
    ids = _stream_of(path, tokenizer)
    yield path, functools.partial(windows.eval_batches, ids, **shape)


def _stream_of(path: str, tokenizer) -> Any:
  """Ids of a file's documents, each followed by end-of-text."""
  import numpy as np

  from taperjax.data import text

  parts = (
    np.asarray([*tokenizer.encode(t), tokenizer.eos_id], np.int32)
    for t in text.iter_documents(path)
  )
  return np.concatenate(list(parts))


def _need_tokenizer(model):
  if model.tokenizer is None and "source" in model.meta:
    raise UserError(
      f"{model.folder} was imported without a tokenizer; import it again with "
      "--tokenizer FILE"
    )
  if model.tokenizer is None:
    raise UserError(
      f"{model.folder} has no tokenizer beside it; keep tokenizer/ with the "
      "checkpoints"
    )
  return model.tokenizer


def _probe(args: argparse.Namespace) -> dict[str, Any]:
  from taperjax import api, probing, saved
  from taperjax.summary import write_json

  _at_least_one(args, "batch_size", "max_windows")
  model = api.load(args.model, args.step, args.model_seed)
  probing.open_sites(model.config, model.gate)  # before texts are read
  out = None if args.out is None else pathlib.Path(args.out).resolve()
  if out is not None:
    saved.check_outside_runs(out)
    out.mkdir(parents=True, exist_ok=True)
  shape = {"batch_size": args.batch_size, "max_windows": args.max_windows}
  if args.data:
    tokens = _streams_of(args.data, model)
  else:
    tokens = saved.valid_tokens(model)
    config = model.meta["config"]  # its windows, so that losses agree
    shape["context_len"] = config["context_len"]
    limit = config["eval"]["max_windows"]
    if args.max_windows is None and limit:  # of this text alone
      tokens = tokens[: limit * config["context_len"] + 1]
  if args.calibrate:
    shape["calibration_tokens"] = _streams_of(args.calibrate, model)
  found = api.probe(model, tokens, show=True, **shape)
  result = {
    "model": args.model,
    "step": model.step,
    "data": args.data or ["validation"],
    "calibration_data": args.calibrate,
    **found,
  }
  if out is not None:
    write_json(out / "probe.json", result)
    probing.plot(found, f"{args.model}, step {model.step:,}", out)
  if not args.json:
    _print_probe(result)
    if out is not None:
      print(f"wrote {out}: probe.json, probe.png, probe.svg")
  return result


def _streams_of(paths: list[str], model) -> Any:
  """Ids of several files as one stream."""
  import numpy as np

  tokenizer = _need_tokenizer(model)
  return np.concatenate([_stream_of(path, tokenizer) for path in paths])


def _print_probe(found: dict[str, Any]) -> None:
  """The sites by increase, each alone and with all above it."""
  from rich.table import Table
  from rich.text import Text

  def number(value, form):
    if not math.isfinite(value):
      return "not finite"
    return format(value, form if abs(value) < 1e4 else form[:-2] + "3g")

  table = Table(
    title=f"loss {number(found['loss'], '.4f')} with every norm in place",
    caption="alone: this norm replaced by its fixed map; so far: with all "
    "above it",
  )
  table.add_column("norm")
  for name in ("c", "alone", "increase", "so far", "increase"):
    table.add_column(name, justify="right")
  rows = zip(found["sites"], found["cumulative"], strict=True)
  for site, so_far in rows:
    table.add_row(
      Text(site["site"]),
      number(site["c"], ".4g"),
      *(
        number(row[name], form)
        for row in (site, so_far)
        for name, form in (("loss", ".4f"), ("increase", "+.4f"))
      ),
    )
  data = ", ".join(found["data"])
  on = found["calibration_data"]
  on = "its first half" if on is None else ", ".join(on)
  print(
    f"{data}: {found['tokens']:,} tokens scored; c from {on}, "
    f"{found['calibration_tokens']:,} tokens"
  )
  print(_drawn(table), end="")


def _drawn(*tables: Any) -> str:
  """Tables of rich as text, for print(), which knows a closed pipe."""
  from rich.console import Console

  console = Console()
  with console.capture() as printed:
    console.print(*tables)
  return printed.get()


def _sheet(*tables: Any) -> str:
  """Tables of rich in Markdown, each with its caption below."""
  from rich import box

  parts = []
  for table in tables:
    caption, table.caption, table.box = table.caption, None, box.MARKDOWN
    parts.append(f"{_drawn(table).strip()}\n\n{textwrap.fill(caption, 79)}\n")
  return "\n".join(parts)


def _bench_subject(args, prompt: int) -> tuple[dict, Any, Any]:
  """params, config and c of the model or --shape that is timed."""
  from taperjax import api
  from taperjax.bench import decode as bench

  if (args.model is None) == (args.shape is None):
    raise UserError("give a model or --shape, one of the two; see --help")
  if args.model is not None:
    model = api.load(args.model, args.step, args.model_seed)
    bench.check(model.config, prompt, args.new)
    return model.params, model.config, model.c
  if args.shape not in bench.SHAPES:
    raise UserError(
      f"--shape={args.shape} must be one of {', '.join(bench.SHAPES)}"
    )
  bench.check(bench.SHAPES[args.shape], prompt, args.new)
  return bench.random_model(args.shape)


def _bench_decode(args: argparse.Namespace) -> dict[str, Any]:
  from taperjax import metrics
  from taperjax.bench import decode as bench, roofline
  from taperjax.summary import write_json

  _at_least_one(args, "new", "repeats")
  forms = _chosen(args, "forms", bench.FORMS)
  dtypes = _chosen(args, "dtype", bench.DTYPES)
  batches = _whole_numbers(args, "batch")
  prompts = _whole_numbers(args, "prompt")
  params, config, c = _bench_subject(args, max(prompts))
  out = _bench_folder(args)
  forms = bench.make_forms(params, config, c, forms)
  cores = roofline.cores()
  bandwidth = roofline.read_bandwidth(cores)
  rounds = len(batches) * len(dtypes) * len(prompts) * (args.repeats + 1)
  with metrics.Progress(rounds, 0) as progress:
    rows = bench.run(
      forms, batches=batches, dtypes=dtypes, prompts=prompts, new=args.new,
      repeats=args.repeats, bandwidth=bandwidth, progress=progress.update,
    )
  result = {
    "model": args.model, "shape": args.shape, "cores": cores,
    "read_bytes_per_s": bandwidth, "rows": rows,
  }
  if out is not None:
    write_json(out / "bench.json", result)
    bench.plot(rows, f"decoding, {args.model or args.shape}", out)
  if not args.json:
    _print_bench(result)
    if out is not None:
      print(f"wrote {out}: bench.json, bench.png, bench.svg")
  return result


def _bench_peers(args: argparse.Namespace) -> dict[str, Any]:
  from taperjax import metrics
  from taperjax.bench import decode as bench, peers as lib, roofline
  from taperjax.summary import write_json

  _at_least_one(args, "prompt", "new", "repeats")
  names = _chosen(args, "forms", bench.FORMS)
  peers = _chosen_peers(args, names, lib.PEERS)
  batches = _whole_numbers(args, "batch")
  params, config, c = _bench_subject(args, args.prompt)
  forms = bench.make_forms(params, config, c, names)
  out = _bench_folder(args)
  with metrics.Progress(len(batches) * (args.repeats + 1), 0) as progress:
    rows = lib.run(
      forms, peers, batches=batches, prompt=args.prompt, new=args.new,
      repeats=args.repeats, progress=progress.update,
    )
  result = {
    "model": args.model, "shape": args.shape, "cores": roofline.cores(),
    "rows": rows,
  }
  if out is not None:
    write_json(out / "bench.json", result)
  if not args.json:
    _print_peers(result)
    if out is not None:
      print(f"wrote {out}: bench.json")
  return result


def _print_peers(found: dict[str, Any]) -> None:
  """Tables of the programs, and of how many times faster each form is."""
  from rich.table import Table
  from rich.text import Text

  from taperjax.bench import stats

  speed = Table(caption="same ids: share of the new ids that baseline gives")
  for name in ("rows", "program", "tok/s", "ms/call (quartiles)", "same ids"):
    speed.add_column(name, justify="left" if name == "program" else "right")
  ratios = Table(
    caption="above 1, the form is faster; 95 percent of the median ratio"
  )
  for name in ("rows", "program / form", "ratio"):
    ratios.add_column(name, justify="left" if "form" in name else "right")
  for row in found["rows"]:
    rows = f"{row['batch']:,}"
    for name, program in row["programs"].items():
      ms = program["ms"]
      speed.add_row(
        rows, name, f"{program['tokens_per_s']:,.0f}",
        f"{ms['median']:.4g} ({ms['q1']:.4g} to {ms['q3']:.4g})",
        f"{program['same_ids']:.1%}",
      )
    for pair, ratio in row["ratios"].items():
      cell = Text(stats.ratio_text(ratio))
      ratios.add_row(rows, pair.replace("/", " / "), cell)
  print(_sheet(speed, *([ratios] if ratios.rows else [])), end="")
  last = found["rows"][-1]
  versions = {n: p["version"] for n, p in last["programs"].items()}
  _print_notes(versions | last["missing"])


def _print_notes(notes: dict[str, str]) -> None:
  """A Markdown list below a table, if there are any."""
  if notes:
    print()
  for name, text in notes.items():
    print(f"- {name}: {text}")


def _bench_folder(args: argparse.Namespace) -> pathlib.Path | None:
  """--out, made; before anything is measured."""
  from taperjax import saved

  if args.out is None:
    return None
  out, _ = saved.look_out(pathlib.Path(args.out))
  out.mkdir(parents=True, exist_ok=True)
  return out


def _bench_train(args: argparse.Namespace) -> dict[str, Any]:
  from taperjax import metrics
  from taperjax.bench import roofline, torch_step, train as bench
  from taperjax.summary import write_json

  _at_least_one(args, "repeats")
  names = _chosen(args, "forms", bench.FORMS)
  peers = []
  if args.peers is not None:
    peers = _chosen_peers(args, names, torch_step.PEERS)
  fields = load_config(args.config)
  _set_fields(fields, args.config, args.fields)
  forms = bench.make_forms(fields, names, _whole_config)
  out = _bench_folder(args)
  with metrics.Progress(args.repeats + 1, 0) as progress:
    found = bench.run(
      forms, peers, repeats=args.repeats, progress=progress.update
    )
  result = {"config": args.config, "cores": roofline.cores(), **found}
  if out is not None:
    write_json(out / "bench.json", result)
  if not args.json:
    _print_bench_train(result)
    if out is not None:
      print(f"wrote {out}: bench.json")
  return result


def _bench_start(args: argparse.Namespace) -> dict[str, Any]:
  from taperjax import metrics, saved
  from taperjax.bench import roofline, start
  from taperjax.summary import write_json

  _at_least_one(args, "repeats")
  fields = load_config(args.config)
  _set_fields(fields, args.config, args.fields)
  out = _bench_folder(args)
  with metrics.Progress(start.MEASURES, 0) as progress:
    found = start.run(
      saved.read_config(fields), args.config, args.fields, args.script,
      repeats=args.repeats, progress=progress.update,
    )
  result = {"config": args.config, "cores": roofline.cores(), **found}
  if out is not None:
    write_json(out / "bench.json", result)
  if not args.json:
    print(
      f"{args.script} --help {found['help_s']:.2f} s\n"
      f"first step {found['first_step_cold_s']:.1f} s, with compiled programs "
      f"at hand {found['first_step_warm_s']:.1f} s\n"
      f"tokenizing {found['tokenize_bytes_per_s'] / 1e6:.1f} MB/s of "
      f"{found['train_bytes'] / 1e6:.1f} MB\n"
      f"a batch {found['batch_ms']:.3f} ms, a step {found['step_ms']:.1f} ms: "
      f"{found['stall']:.3%}"
    )
    if out is not None:
      print(f"wrote {out}: bench.json")
  return result


def _bench_all(args: argparse.Namespace) -> dict[str, Any]:
  from taperjax.bench import decode, sheet

  _at_least_one(args, "repeats")
  shapes = _chosen(args, "shapes", tuple(decode.SHAPES))
  _set_fields(load_config(args.config), args.config, args.fields)
  out = _bench_folder(args)
  sections = sheet.commands(shapes, args.config, args.fields, args.repeats)
  codes = sheet.run(sections, out)
  if failed := [name for name, code in codes.items() if code]:
    raise UserError(
      f"{', '.join(failed)} of {len(codes)} sections failed; "
      f"{out / 'benchmarks.md'} says why, and holds the others"
    )
  if not args.json:
    print(f"wrote {out / 'benchmarks.md'}, {len(codes)} sections")
  return {"out": str(out), "sections": list(codes)}


def _print_bench_train(found: dict[str, Any]) -> None:
  """A table of the forms, with the ratios of their times."""
  from rich.table import Table
  from rich.text import Text

  from taperjax.bench import stats

  table = Table(
    caption="above 1, slower than baseline; 95 percent of the median ratio"
  )
  for name in (
    "step", "tok/s", "ms/step (quartiles)", "over baseline", "GFLOP/s", "MB"
  ):
    table.add_column(name, justify="left" if name == "step" else "right")
  for name, form in (found["forms"] | found["peers"]).items():
    time, ratio = form["ms_per_step"], found["ratios"].get(f"{name}/baseline")
    memory = form.get("temporary_bytes")
    table.add_row(
      name, f"{form['tokens_per_s']:,.0f}",
      f"{time['median']:.4g} ({time['q1']:.4g} to {time['q3']:.4g})",
      "" if ratio is None else Text(stats.ratio_text(ratio)),
      f"{form['model_flops_per_s'] / 1e9:,.4g}",
      "" if memory is None else f"{memory / 1e6:,.0f}",
    )
  print(_sheet(table), end="")
  print(
    f"{found['batch']} windows of {found['context_len']} tokens, "
    f"{found['dtype']}, {found['repeats']} rounds; MB: temporary memory"
  )
  versions = {name: peer["version"] for name, peer in found["peers"].items()}
  _print_notes(versions | found["missing"])


def _whole_numbers(args: argparse.Namespace, flag: str) -> list[int]:
  """The numbers of a flag, each once and rising."""
  text = getattr(args, flag)
  numbers = text.split(",")
  if not all(re.fullmatch("[1-9][0-9]{0,5}", number) for number in numbers):
    raise UserError(
      f"--{flag}={text} must be whole numbers from 1; for example 1,16"
    )
  return sorted({int(number) for number in numbers})


def _chosen(args: argparse.Namespace, flag: str, known) -> list[str]:
  """The names of a flag, each of them known and given once."""
  text = getattr(args, flag)
  names = text.split(",")
  if set(names) <= set(known) and len(set(names)) == len(names):
    return names
  raise UserError(
    f"--{flag}={text} must be of {', '.join(known)}, each once"
  )


def _chosen_peers(args: argparse.Namespace, forms, known) -> list[str]:
  """The names of --peers, which need a form to be compared with."""
  if "baseline" not in forms:
    raise UserError(
      f"--forms={args.forms} lacks baseline, which the others are compared "
      "with; add it"
    )
  return _chosen(args, "peers", known)


def _print_bench(found: dict[str, Any]) -> None:
  """Tables of the forms: speed, counts, and the ratios of their times."""
  from rich.table import Table
  from rich.text import Text

  from taperjax.bench import stats

  several = len({row["prompt"] for row in found["rows"]}) > 1

  def table(caption, *names):
    made = Table(caption=caption)
    for name in ("rows", *["prompt"] * several, "dtype", *names):
      left = name in ("dtype", "form", "first / second")
      made.add_column(name, justify="left" if left else "right")
    return made

  speed = table(
    "of reading: share of the read bandwidth that the step must use",
    "form", "tok/s", "ms/token (quartiles)", "of reading",
  )
  counts = table(
    "reductions of a traced step; kernels of the compiled loop",
    "form", "MB/token", "reductions", "kernels",
  )
  ratios = table(
    "above 1, the second is faster; 95 percent of the median ratio",
    "first / second", "ratio",
  )
  for row in found["rows"]:
    prompt = [f"{row['prompt']:,}"] * several
    start = (f"{row['batch']:,}", *prompt, row["dtype"])
    for name, form in row["forms"].items():
      time = form["ms_per_token"]
      speed.add_row(
        *start, name, f"{form['tokens_per_s']:,.0f}",
        f"{time['median']:.4g} ({time['q1']:.4g} to {time['q3']:.4g})",
        f"{form['roofline']:.3f}",
      )
      counts.add_row(
        *start, name, f"{form['bytes_per_token'] / 1e6:.2f}",
        str(form["reductions"]), str(form["kernels"]),
      )
    for pair, ratio in row["ratios"].items():
      cell = Text(stats.ratio_text(ratio))
      ratios.add_row(*start, pair.replace("/", " / "), cell)
  cores = found["cores"]
  print(
    f"reads {found['read_bytes_per_s'] / 1e9:.1f} GB/s with {cores} "
    f"core{'' if cores == 1 else 's'}"
  )
  print(_sheet(speed, counts, *([ratios] if ratios.rows else [])), end="")


def _fold(args: argparse.Namespace) -> dict[str, Any]:
  from taperjax import api, saved
  from taperjax.summary import by_seed

  seeds = saved.seeds(args.model, args.step)
  if seeds is None or args.model_seed is not None:
    model = api.load(args.model, args.step, args.model_seed)
    return _fold_model(args, model, None if seeds is None else args.model_seed)
  rows = []
  for seed, diverged in seeds.items():
    row = None
    if not diverged:
      row = _fold_model(args, api.load(args.model, args.step, seed), seed)
    rows.append(row)
  return by_seed(rows) | {"seed": list(seeds)}


def _fold_model(
  args: argparse.Namespace, model, seed: int | None
) -> dict[str, Any]:
  """Folds one model; of several seeds each has a folder of its own."""
  from taperjax import saved
  from taperjax.data import windows

  out = args.out or (saved.workdir_of(model.folder) or model.folder) / "folded"
  out = pathlib.Path(out)
  if seed is not None:
    out = out / f"seed_{seed}"

  def batches():  # those of the run, so that the report is the same
    config = model.meta["config"]
    if args.data:
      ids = _stream_of(args.data, _need_tokenizer(model))
    else:
      ids = saved.valid_tokens(model)
    return windows.eval_batches(
      ids,
      batch_size=config["eval"]["batch_size"],
      context_len=config["context_len"],
      max_windows=config["eval"]["max_windows"],
    )

  report, *_ = saved.write_folded(out, model, batches)
  if not args.json:
    errors = {
      k: math.nan if v is None else v for k, v in report["errors"].items()
    }
    print(f"wrote {out}")
    for entry in report["folded"]:
      print(f"  {entry['name']}: {entry['formula']}")
    print(
      f"largest logit difference {errors['max_abs_delta_logit_f32']:.3g} in "
      f"float32 at logit scale {errors['logit_scale_f32']:.3g}, "
      f"{errors['max_abs_delta_logit_bf16']:.3g} in bfloat16"
    )
  return {"out": str(out), **report}


def _generate(args: argparse.Namespace) -> dict[str, Any]:
  from taperjax import api, decode

  _at_least_one(args, "max_new")
  sampling = decode.Sampling(args.temperature, args.top_k, args.top_p)
  model = api.load(args.model, args.step, args.model_seed)
  tokenizer = _need_tokenizer(model)
  prompts = args.prompt or [""]
  for prompt in prompts:  # not all tokenizers tell what is no UTF-8
    prompt.encode()
  ids = api.encode_prompts(model, prompts)
  options = {
    "max_new": args.max_new,
    "gate": args.gate,
    "sampling": sampling,
    "seed": args.seed,
    "window": args.window,
    "weights": "int8" if args.int8 else "float",
  }
  if len(prompts) == 1 and not args.json:
    return _stream(model, prompts[0], ids[0], options)
  rows = api.generate_ids(model, ids, **options)
  found = [
    {
      "prompt": prompt,
      "text": tokenizer.decode(row, continues=bool(prompt)),
      "tokens": row,
    }
    for prompt, row in zip(prompts, rows, strict=True)
  ]
  if not args.json:
    print("\n\n".join(f["prompt"] + f["text"] for f in found))
  return found[0] if len(found) == 1 else {"results": found}


def _stream(model, prompt, ids, options) -> dict[str, Any]:
  """Prints the text as it comes."""
  from taperjax import api

  blocks = api.stream_ids(model, ids, **options)  # checks the options
  print(prompt, end="", flush=True)
  row, shown = [], ""
  for block in blocks:
    row += block
    # A character may span tokens: decode the whole, print what is new.
    text = model.tokenizer.decode(row, continues=bool(prompt))
    if not text.endswith("\ufffd"):
      print(text[len(shown):], end="", flush=True)
      shown = text
  text = model.tokenizer.decode(row, continues=bool(prompt))
  print(text[len(shown):])
  return {"prompt": prompt, "text": text, "tokens": row}


def _info(args: argparse.Namespace) -> dict[str, Any]:
  file = args.model.partition(":")[0]
  if file.endswith(".py"):
    for name, value in (("step", args.step), ("seed", args.model_seed)):
      if value is not None:
        raise UserError(f"--{name}={value} has no effect with a config file")
    result = _config_info(args.model)
  else:
    result = _model_info(args.model, args.step, args.model_seed)
  if not args.json:
    for name, value in _lines(result):
      print(f"{name:32} {value}")
  return result


def _lines(fields: dict[str, Any], prefix: str = "") -> Iterator[tuple]:
  """(dotted name, text) of every value, for people."""
  for name, value in fields.items():
    if isinstance(value, dict):
      yield from _lines(value, f"{prefix}{name}.")
    elif name == "c":
      for site in value:
        yield f"{prefix}c.{site['site']}", f"{site['c']:.4g}"
    else:
      yield prefix + name, f"{value:,}" if type(value) is int else value


def _config_info(argument: str) -> dict[str, Any]:
  """Of a config file, without data, training or files."""
  from taperjax import config as config_lib, state

  config = _whole_config(load_config(argument))
  params = state.abstract(config).params
  return {
    "config": config_lib.to_dict(config),
    "variant": config.variant,
    "step": 0,
    "gate": 1.0,
    **_shapes(params),
  }


def _whole_config(fields: Any) -> Any:
  """The Config of a config file, with its vocabulary."""
  from taperjax import saved

  config = saved.read_config(fields)
  if config.model.vocab_size:
    return config
  from taperjax.data import tokenizer

  found = tokenizer.load_tokenizer(config.data.tokenizer)
  return config.with_vocab(found.vocab_size)


def _model_info(
  path: str, step: int | None, seed: int | None
) -> dict[str, Any]:
  from taperjax import api, config as config_lib, saved

  model = api.load(path, step, seed)
  origin = {}
  if "source" in model.meta:
    origin["source"] = model.meta["source"]
  if "config" in model.meta:  # an import has none: nothing was trained
    config = model.meta["config"]
    origin |= {"config": config, "variant": config["variant"]}
  return {
    **origin,
    "model": config_lib.to_dict(model.config),
    "step": model.step,
    "gate": model.gate,
    **_shapes(model.params),
    "c": saved.site_factors(model.config, model.c),
    "scale_target": model.meta.get("scale_target"),
    "commit": model.meta["commit"],
    "versions": model.meta["versions"],
  }


def _reproduce(args: argparse.Namespace) -> dict[str, Any]:
  from absl import logging

  logging.set_verbosity(logging.ERROR)  # orbax tells every rename
  config = load_config(args.config)
  for name in ("seeds", "variant"):
    if any(re.match(rf"--config\.{name}\b", flag) for flag in args.fields):
      option = name.rstrip("s") + "s"
      raise UserError(f"--config.{name} has no effect here; use --{option}")
  _set_fields(config, args.config, args.fields)
  seeds = _seeds(args.seeds)
  variants = args.variants.split(",")
  from taperjax import report, reproduce
  from taperjax.summary import say

  folder = pathlib.Path(args.workdir)
  together = args.together
  if together is None:
    import jax

    together = len(seeds) > 1 and jax.default_backend() != "cpu"
  cells = reproduce.plan(config, folder, variants, seeds, together)
  with contextlib.ExitStack() as stack:
    if args.json:  # the tables of the runs
      stack.enter_context(contextlib.redirect_stdout(sys.stderr))
    done, failed = reproduce.reproduce(cells, folder)
    ran = [cell.workdir for cell in (*done, *failed)]
    if ran:
      report.write(ran, folder / "report", log=say)
  names = [str(cell.workdir.relative_to(folder)) for cell in failed]
  result = {
    "workdir": str(folder), "cells": len(cells), "done": len(done),
    "not_finite": names, "report": str(folder / "report") if ran else None,
  }
  if not args.json and ran:
    print(f"wrote {folder / 'report'}: report.html, results.json, results.csv")
  if len(done) + len(failed) < len(cells):
    print("stopped; the same command goes on", file=sys.stderr)
  return result


def _plan(args: argparse.Namespace) -> dict[str, Any]:
  from taperjax import planning

  config = load_config(args.config)
  _set_fields(config, args.config, args.fields)
  if args.mesh is not None:
    config.mesh.update(_mesh(args.mesh, config.mesh.keys()))
  if config.init.checkpoint is not None:  # reading it starts jax
    planning.virtual_devices(math.prod(config.mesh.values()))
  found = {"config": args.config, **planning.plan(
    _whole_config(config), args.device
  )}
  if not args.json:
    _print_plan(found)
  return found


def _mesh(text: str, axes: Any) -> dict[str, int]:
  """Sizes of the axes of "data=64,fsdp=8"; 1 where there is none."""
  sizes = dict.fromkeys(axes, 1)
  parts = [part.partition("=") for part in text.split(",")]
  for axis, _, size in parts:
    if axis not in sizes or not re.fullmatch(r"[1-9]\d{0,5}", size):
      raise UserError(
        f"--mesh={text} must be AXIS=N with commas between, of "
        f"{', '.join(sizes)}; for example data=64,fsdp=8"
      )
    sizes[axis] = int(size)
  if len({axis for axis, _, _ in parts}) < len(parts):
    raise UserError(f"--mesh={text} repeats an axis; name each one once")
  return sizes


def _print_plan(found: dict[str, Any]) -> None:
  memory, seconds, flops = found["memory"], found["seconds"], found["flops"]
  mesh = ", ".join(f"{axis}={n}" for axis, n in found["mesh"].items())
  gigabytes = lambda name: f"{memory[name] / 1e9:.2f}"
  parts = ("parameters", "optimizer", "rest", "temporary")
  fits = "fits" if memory["fits"] else f"DOES NOT FIT: {memory['why']}"
  print(
    f"{found['config']}: {found['params']:,} parameters, {found['tokens']:,} "
    f"tokens a step, {found['phase']} phase\n"
    f"{found['devices']:,} x {found['device']} ({mesh}), compiled in "
    f"{found['compile_s']:.0f} s\n"
    f"memory of a device, GB: "
    + ", ".join(f"{name} {gigabytes(name)}" for name in parts)
    + f"; total {gigabytes('total')} of {gigabytes('usable')} usable\n"
    f"  {fits}\n"
    f"FLOPs of a step: {flops['model']:.3g} of the model, "
    f"{flops['device'] * found['devices']:.3g} as compiled"
  )
  for kind, each in found["collectives"].items():
    print(
      f"{kind}: {each['times']:,} a step, {each['bytes'] / 1e9:.2f} GB sent by "
      "each device"
    )
  print(
    f"estimated step: {seconds['step']:.3g} s, {found['mfu']:.0%} model-FLOP "
    f"utilisation (compute {seconds['compute']:.3g} s, memory "
    f"{seconds['memory']:.3g} s, then collectives "
    f"{seconds['collectives']:.3g} s; {seconds['step_overlapped']:.3g} s and "
    f"{found['mfu_overlapped']:.0%} if they overlap)"
  )
  for line in found["assumes"]:
    print(f"  assumes: {line}")


def _set_fields(config: Any, argument: str, flags: list[str]) -> None:
  """Sets --config.FIELD=VALUE as train.py does."""
  for flag in flags:
    if "=" not in flag:
      raise UserError(f"{flag} has no value; write {flag}=VALUE")
  flags, empty = check_config_flags([f"--config={argument}", *flags])
  values = dict.fromkeys(empty)
  for flag in flags[1:]:
    name, _, text = flag.removeprefix("--config.").partition("=")
    kind = _field_type(config, name)
    if kind is tuple:
      try:
        values[name] = tuple(ast.literal_eval(text))
      except (ValueError, SyntaxError, TypeError) as error:
        raise UserError(f"{name}={text!r} is no tuple; write (0,)") from error
    elif kind is bool:
      values[name] = text.lower() == "true"
    else:
      values[name] = kind(text)
  for name, value in values.items():
    group, _, last = name.rpartition(".")
    node = operator.attrgetter(group)(config) if group else config
    node[last] = value


def _seeds(text: str) -> list[int]:
  """The numbers of "0-2,7": 0, 1, 2 and 7."""
  found = []
  for part in text.split(","):
    match = re.fullmatch(r"(\d{1,10})(?:-(\d{1,10}))?", part)
    first, last = 1, 0
    if match:
      first, last = int(match[1]), int(match[2] or match[1])
    if not first <= last < first + 1000:
      raise UserError(f"--seeds={text} must name numbers, as 0-5 or 0,2,7")
    found += range(first, last + 1)
  return found


def _export(args: argparse.Namespace) -> dict[str, Any]:
  from taperjax import saved
  from taperjax.interop import exporting
  from taperjax.summary import say, write_json

  if args.matrix == (args.to is not None):
    raise UserError(
      "give either --to FORMAT, one of " + ", ".join(_EXPORTS) + ", or --matrix"
    )
  if args.remote_code and args.to != "hf":
    raise UserError("--remote-code is of --to hf alone; leave it out")
  if args.weights is not None and args.to != "stablehlo":
    raise UserError(
      f"--weights={args.weights} is of --to stablehlo alone; leave it out"
    )
  if len(args.model) > 1 and not args.matrix:
    raise UserError("several models need --matrix; or give one of them")
  # Of the folders as written, so that no ".." leads out of --out.
  names = [os.path.basename(os.path.abspath(path)) for path in args.model]
  if len(set(names)) < len(names):
    raise UserError(
      f"the models {' '.join(args.model)} do not end in different names, which "
      "their folders get; export them one at a time"
    )
  common = {"dtype": args.dtype, "log": say}
  if not args.matrix:
    reference = _reference(args, args.model[0])
    out = args.out
    if out is None:
      label = args.to + ("-remote-code" if args.remote_code else "")
      if len(reference.model.meta.get("config", {}).get("seeds", ())) > 1:
        label += f"-seed_{reference.model.meta['seed']}"
      folder = reference.model.folder
      out = (saved.workdir_of(folder) or folder) / "export" / label
    report = exporting.export(
      reference,
      args.to,
      pathlib.Path(out),
      remote_code=args.remote_code,
      weights=args.weights or "arguments",
      **common,
    )
    if not args.json:
      _print_export(out, report)
    return {"out": str(out), **report}
  out = pathlib.Path(args.out or "export")
  exporting.check_matrix(out)
  rows = []
  for path, name in zip(args.model, names, strict=True):
    reference = _reference(args, path)
    for row in exporting.matrix(name, reference, out, **common):
      rows.append(row)
      out.mkdir(parents=True, exist_ok=True)  # a refusal has made none
      write_json(out / "matrix.json", rows)  # kept, wherever the rest stops
  if not args.json:
    print("\n".join(exporting.matrix_lines(rows)))
  if failed := [row for row in rows if "failed" in row]:
    raise UserError(
      f"{len(failed)} of {len(rows)} exports failed their checks; the reasons "
      f"are in {out / 'matrix.json'}"
    )
  return {"out": str(out), "rows": rows}


def _reference(args: argparse.Namespace, path: str) -> Any:
  """A model with rows of real text, 512 positions where there are so many."""
  import numpy as np

  from taperjax import api, saved
  from taperjax.interop import exporting

  model = api.load(path, args.step, args.model_seed)
  if args.data:  # its name alone: the report goes out with the model
    ids = _stream_of(args.data, _need_tokenizer(model))
    text = pathlib.Path(args.data).name
  else:
    ids, text = saved.valid_tokens(model), "the run's validation text"
  length = min(128, model.config.context_len)
  rows = min(-(-512 // length), len(ids) // length)
  tokens_BL = np.asarray(ids[: rows * length], np.int32).reshape(rows, length)
  return exporting.Reference(model, tokens_BL, text)


def _print_export(out: Any, report: dict[str, Any]) -> None:
  print(f"wrote {out} ({report['format']}, {report['form']})")
  for label, name in (("float32", "float32"), ("stored", "stored"),
                      ("import", "source")):
    errors = report[name]
    if errors is None:
      continue
    if errors["reader"] is None:
      print(f"  {label}: not compared, {errors['reason']}")
      continue
    print(
      f"  {label}: largest logit difference "
      f"{errors['max_abs_delta_logit']:.3g}, KL {errors['kl']:.3g} nats, same "
      f"top token {errors['top1']:.2%}, read by {errors['reader']}"
    )
  if (greedy := report.get("greedy")) and greedy["reader"] is not None:
    same = "the same" if greedy["same_ids"] else "OTHER"
    print(
      f"  greedy: {greedy['reader']} continues 3 prompts with {same} ids as "
      f"taperjax, up to {greedy['tokens']} each"
    )
  for note in report["notes"]:
    print(f"  note: {note}")


def _import(args: argparse.Namespace) -> dict[str, Any]:
  from taperjax import interop, saved, workdir as workdir_lib
  from taperjax.data import files

  workdir_lib.check_unused(pathlib.Path(args.workdir))  # before a long read
  source = args.source
  if not os.path.exists(source) and re.fullmatch(interop.REPOSITORY, source):
    workdir = workdir_lib.open_workdir(args.workdir, "import")
    source = interop.fetch(source, workdir / "download")
  with files.noted_signals() as raise_noted:
    model = interop.read(
      source,
      gain_offset=args.gain_offset,
      context_len=args.context_len,
      tokenizer=args.tokenizer,
    )
    raise_noted()
  config, tokenizer, notes = model.config, model.tokenizer, []
  if tokenizer is None:
    notes.append(
      "no tokenizer was found, so texts cannot be read; import again with "
      "--tokenizer FILE"
    )
  elif tokenizer.vocab_size < config.vocab_size:
    notes.append(
      f"the tokenizer has {tokenizer.vocab_size:,} ids, the embedding "
      f"{config.vocab_size:,} rows: the last ones stand for no text"
    )
  workdir = workdir_lib.open_workdir(args.workdir, "import")
  with workdir_lib.lock(workdir):
    workdir_lib.clean(workdir, results=False)
    report = saved.write_imported(workdir, model, notes)
  if not args.json:
    print(
      f"imported {report['format']} ({report['dtype']}), {report['params']:,} "
      f"parameters, into {workdir}"
    )
    print(
      f"{config.num_layers} layers, width {config.embed_dim:,}, "
      f"{config.num_heads} heads on {config.num_kv_heads} of keys, vocabulary "
      f"{config.vocab_size:,}, context {config.context_len:,}, eps "
      f"{config.norm_eps:g}"
    )
    for note in report["notes"]:
      print(f"note: {note}")
  return {"workdir": str(workdir), **report}


def _shapes(params) -> dict[str, Any]:
  import jax

  from taperjax import model

  total, taper = model.count_params(params)
  shapes = {
    "/".join(part.key for part in path): list(leaf.shape)
    for path, leaf in jax.tree_util.tree_leaves_with_path(params)
  }
  return {"params": total, "params_taper": taper, "shapes": shapes}


def _report(args: argparse.Namespace) -> dict[str, Any]:
  from taperjax import report
  from taperjax.summary import say

  found = report.write(args.runs, args.out, log=say)
  if not args.json:
    print(f"wrote {pathlib.Path(args.out) / 'report.html'}")
  return {"out": args.out, **found}
