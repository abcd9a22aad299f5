"""The command line: `taperjax eval | fold | generate | info`.

Every command takes --json and then prints one JSON object on standard output;
all else goes to standard error. A mistake of the user is one line and exit
code 2.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pathlib
import runpy
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

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


def main(argv: list[str] | None = None) -> None:
  """Entry point of the `taperjax` command."""
  os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
  args = _parser().parse_args(argv)
  with report_errors(f"taperjax {args.command}", args.debug):
    result = args.run(args)
    if args.json:
      print(json.dumps(result, allow_nan=False))
    sys.stdout.flush()


def _parser() -> argparse.ArgumentParser:
  parser = argparse.ArgumentParser(
    prog="taperjax", description="Transformers whose norms taper away."
  )
  commands = parser.add_subparsers(dest="command", required=True)

  def command(name, run, text, model_help):
    sub = commands.add_parser(name, help=text, description=text)
    sub.set_defaults(run=run)
    sub.add_argument("model", help=model_help)
    sub.add_argument("--step", type=int, help="checkpoint; default the latest")
    sub.add_argument("--json", action="store_true", help="print a JSON object")
    sub.add_argument("--debug", action="store_true", help="show tracebacks")
    return sub

  where = "workdir, folder of checkpoints, or one step in it"

  def gate(sub):
    text = "gate of the tapered norms, 0 to 1; default the saved one"
    sub.add_argument("--gate", type=float, help=text)

  sub = command("eval", _eval, "Loss and bits per byte of texts.", where)
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
  sub.add_argument("--batch-size", type=int, default=16)
  sub.add_argument("--max-windows", type=int, help="score only the first ones")

  sub = command("fold", _fold, "Fold the tapers into the weights.", where)
  sub.add_argument("--out", help="folder to write; default folded/ in the run")

  sub = command("generate", _generate, "Continue texts.", where)
  gate(sub)
  sub.add_argument(
    "--prompt",
    action="append",
    help="text to continue; may be repeated; default a new text",
  )
  sub.add_argument("--max-new", type=int, default=200, help="tokens")
  sub.add_argument("--temperature", type=float, default=0.8, help="0: greedy")
  sub.add_argument("--top-k", type=int, default=0, help="0: off")
  sub.add_argument("--top-p", type=float, default=1.0, help="1: off")
  sub.add_argument("--seed", type=int, default=0)
  sub.add_argument(
    "--window", action="store_true", help="slide on past the context"
  )

  command(
    "info",
    _info,
    "Shape of a model or of a config file.",
    where + ", or a config FILE.py[:ARGUMENT]",
  )
  return parser


def _say(text: str) -> None:
  print(text, file=sys.stderr, flush=True)


def _eval(args: argparse.Namespace) -> dict[str, Any]:
  from taperjax import api

  for name in ("batch_size", "max_windows"):
    value = getattr(args, name)
    if value is not None and value < 1:
      raise UserError(f"--{name.replace('_', '-')}={value} must be 1 or more")
  model = api.load(args.model, args.step)
  gate = api.check_gate(model, args.gate)
  results = []
  for name, batches in _eval_texts(args, model):
    found = api.evaluate_batches(model, batches, gate=gate)
    results.append({"data": name, **found})
    if not args.json:
      bits = found["bits_per_byte"]
      bits = "" if bits is None else f"  {bits:.4f} bits per byte"
      print(
        f"{name}: {found['loss']:.4f} nats per token{bits}  "
        f"({found['tokens']:,} tokens, gate {gate:g})"
      )
  return {"step": model.step, "gate": gate, "results": results}


def _eval_texts(args, model) -> Iterator[tuple[str, Any]]:
  """(name, batches) of every text that was asked for."""
  from taperjax import saved
  from taperjax.data import text, tokens, windows

  shape = {
    "batch_size": args.batch_size,
    "context_len": model.config.context_len,
  }
  tokenizer = _need_tokenizer(model)
  if args.per_document:
    if not args.data:
      raise UserError("--per-document needs --data FILE")
    for path in args.data:
      rows = (tokenizer.encode(t) for t in text.iter_documents(path))
      bos = tokenizer.bos_id
      bos = tokenizer.eos_id if bos is None else bos
      yield path, windows.document_batches(rows, bos_id=bos, **shape)
    return
  shape["max_windows"] = args.max_windows
  if not args.data:
    valid = saved.run_data(model).valid
    yield "validation", windows.eval_batches(valid.tokens, **shape)
    return
  for path in args.data:
    with tempfile.TemporaryDirectory(prefix="taperjax-") as folder:
      file = tokens.prepare(path, tokenizer, folder, name="text", log=_say)
      yield path, windows.eval_batches(file.tokens, **shape)


def _need_tokenizer(model):
  if model.tokenizer is None:
    raise UserError(
      f"{model.folder} has no tokenizer beside it; keep tokenizer/ with the "
      "checkpoints"
    )
  return model.tokenizer


def _fold(args: argparse.Namespace) -> dict[str, Any]:
  from taperjax import api, saved
  from taperjax.data import windows

  model = api.load(args.model, args.step)
  out = args.out or (saved.workdir_of(model.folder) or model.folder) / "folded"
  out = pathlib.Path(out)
  report, *_ = saved.write_folded(
    out,
    model,
    lambda: windows.eval_batches(
      saved.run_data(model).valid.tokens,
      batch_size=16,
      context_len=model.config.context_len,
    ),
  )
  if not args.json:
    errors = report["errors"]
    print(f"wrote {out}")
    for entry in report["folded"]:
      print(f"  {entry['name']}: {entry['formula']}")
    print(
      f"largest logit difference {errors['max_abs_delta_logit_f32']:.3g} in "
      f"float32 at logit scale {errors['logit_scale_f32']:.3g}, "
      f"{errors['max_abs_delta_logit_bf16']:.3g} in bfloat16"
    )
  return {"folded": str(out), **report}


def _generate(args: argparse.Namespace) -> dict[str, Any]:
  from taperjax import api, decode

  if args.max_new < 1:
    raise UserError(f"--max-new={args.max_new} must be 1 or more")
  sampling = decode.Sampling(args.temperature, args.top_k, args.top_p)
  model = api.load(args.model, args.step)
  tokenizer = _need_tokenizer(model)
  prompts = args.prompt or [""]
  ids = api.encode_prompts(model, prompts)
  options = {
    "max_new": args.max_new,
    "gate": args.gate,
    "sampling": sampling,
    "seed": args.seed,
    "window": args.window,
  }
  if len(prompts) == 1 and not args.json:
    return _stream(model, prompts[0], ids[0], options)
  rows = api.generate_ids(model, ids, **options)
  found = [
    {"prompt": prompt, "text": tokenizer.decode(row), "tokens": row}
    for prompt, row in zip(prompts, rows, strict=True)
  ]
  if not args.json:
    print("\n\n".join(f["prompt"] + f["text"] for f in found))
  return found[0] if len(found) == 1 else {"results": found}


def _stream(model, prompt, ids, options) -> dict[str, Any]:
  """Prints the text as it comes."""
  from taperjax import api

  print(prompt, end="", flush=True)
  row, shown = [], ""
  for block in api.stream_ids(model, ids, **options):
    row += block
    # A character may span tokens: decode the whole, print what is new.
    text = model.tokenizer.decode(row)
    if not text.endswith("\ufffd"):
      print(text[len(shown):], end="", flush=True)
      shown = text
  text = model.tokenizer.decode(row)
  print(text[len(shown):])
  return {"prompt": prompt, "text": text, "tokens": row}


def _info(args: argparse.Namespace) -> dict[str, Any]:
  file = args.model.partition(":")[0]
  if file.endswith(".py"):
    result = _config_info(args.model)
  else:
    result = _model_info(args.model, args.step)
  if not args.json:
    for name, value in result.items():
      if name not in ("config", "shapes"):
        print(f"{name}: {value}")
    for name, shape in result["shapes"].items():
      print(f"  {name} {tuple(shape)}")
  return result


def _config_info(argument: str) -> dict[str, Any]:
  """Of a config file, without data, training or files."""
  from taperjax import config as config_lib, state

  path, _, variant = argument.partition(":")
  if not pathlib.Path(path).is_file():
    raise UserError(f"config file {path} does not exist; see configs/")
  sys.path.insert(0, os.getcwd())  # configs import one another
  try:
    get_config = runpy.run_path(path)["get_config"]
    fields = get_config(variant) if variant else get_config()
  except (KeyError, ValueError) as error:
    raise UserError(f"config {argument}: {error}") from error
  finally:
    sys.path.pop(0)
  config = config_lib.parse(fields)
  if not config.model.vocab_size:
    from taperjax.data import tokenizer

    found = tokenizer.load_tokenizer(config.data.tokenizer)
    config = config.with_vocab(found.vocab_size)
  params = state.abstract(config).params
  return {
    "config": config_lib.to_dict(config),
    "variant": config.variant,
    "step": 0,
    "gate": 1.0,
    **_shapes(params),
  }


def _model_info(path: str, step: int | None) -> dict[str, Any]:
  from taperjax import api, config as config_lib, saved

  model = api.load(path, step)
  return {
    "config": model.meta["config"],
    "model": config_lib.to_dict(model.config),
    "variant": model.meta["config"]["variant"],
    "step": model.step,
    "gate": model.gate,
    **_shapes(model.params),
    "c": saved.site_factors(model.config, model.c),
    "scale_target": model.meta.get("scale_target"),
    "commit": model.meta["commit"],
    "versions": model.meta["versions"],
  }


def _shapes(params) -> dict[str, Any]:
  import jax

  from taperjax import model

  total, taper = model.count_params(params)
  shapes = {
    "/".join(part.key for part in path): list(leaf.shape)
    for path, leaf in jax.tree_util.tree_leaves_with_path(params)
  }
  return {"params": total, "params_taper": taper, "shapes": shapes}
