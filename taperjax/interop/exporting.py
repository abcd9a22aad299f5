"""`taperjax export`: writes a model for another program, and reads it back.

Nothing is left behind unless the target's own reader gives our logits.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import pathlib
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

import taperjax
from taperjax import decode, folding, model as model_lib, ranges, saved
from taperjax.config import ModelConfig
from taperjax.data import files
from taperjax.errors import UserError
from taperjax.interop import (
  bare,
  card,
  gguf_files,
  gpt2,
  hf_files,
  llama,
  remote_code as remote_code_lib,
  stablehlo,
  stock,
  tokenizer_files,
  transformer_lens,
  verify,
)
from taperjax.summary import commit, strict, write_json


class Failed(UserError):
  """An export that its reader, or a bound, turned down."""


REPORT = "verification.json"  # marks a folder as an export of ours
GREEDY_TOKENS = 64


@dataclasses.dataclass(frozen=True)
class Reference:
  """A model and what its exports are held against, computed once on demand.

  Attributes:
    model: a baseline, an imported model, a tapered one at gate 0, or a folded
      one (which stock formats refuse).
    tokens_BL: ids of real text to compare on, 300 positions or more.
    text: where they are from, for the report.
  """

  model: saved.Model
  tokens_BL: np.ndarray
  text: str

  @functools.cached_property
  def logits_BLV(self) -> np.ndarray:
    """Of our model in float32."""
    model = self.model
    return verify.our_logits(
      model.params, model.c, model.config, self.tokens_BL
    )

  @functools.cached_property
  def source(self) -> dict[str, Any] | None:
    """How far an import is from its files, see `_compare_source`."""
    return _compare_source(self)

  @functools.cached_property
  def prompts(self) -> list[list[int]]:
    """Three of unequal length, from the text."""
    longest = min(24, self.model.config.context_len - 1)
    rows = len(self.tokens_BL)
    return [
      self.tokens_BL[i % rows, : max(1, longest - 7 * i)].tolist()
      for i in range(3)
    ]

  @property
  def count(self) -> int:
    """How many ids are to follow each prompt."""
    room = self.model.config.context_len - max(map(len, self.prompts))
    return min(GREEDY_TOKENS, room)

  @functools.cached_property
  def greedy(self) -> list[list[int]]:
    """How our model continues the prompts, in float32."""
    model = self.model
    params, config = model_lib.unstack_layers(model.params, model.config)
    return decode.generate(
      params,
      config.replace(compute_dtype="float32"),
      self.prompts,
      max_new=self.count,
      gate=0.0 if model.tapered else 1.0,
      c=model.c,
      stop_ids=(model.tokenizer.eos_id,),
    )


@dataclasses.dataclass(frozen=True)
class Form:
  """What a format holds of a model: its weights in the target's terms."""

  params: dict
  config: ModelConfig
  name: str  # "plain", "folded", "huge_eps" or "ballast"
  info: dict[str, Any]


def form_of(model: saved.Model, to: str, dtype: str, remote_code: bool) -> Form:
  """The weights and the shape to write.

  Raises:
    UserError: a gate above 0, or a format that cannot hold the model.
  """
  if model.tapered and model.gate != 0.0:
    raise UserError(
      f"gate={model.gate:.4g} at step {model.step}: an export holds the model "
      "at gate 0 alone; finish the run, then export"
    )
  if model.config.internal_norm == "mixed" and to not in (
    "stablehlo", "safetensors"
  ):
    raise UserError(
      "internal_norm=mixed: some of the internal norms taper and some do not "
      f"(taper.sites), which {to} has no place for; export to stablehlo or "
      "safetensors"
    )
  if to == "gguf" or to == "hf" and not remote_code:
    params, config, info = stock.stock_form(
      model.params, model.c, model.config, dtype=dtype
    )
    return Form(params, config, info["form"], info)
  params, config = model_lib.unstack_layers(model.params, model.config)
  name = "plain"
  if model.tapered:
    params, config = folding.fold(params, model.c, config)
  if "none" in config.modes:
    name = "folded"
  return Form(params, config, name, {})


def _write(
  folder: pathlib.Path,
  form: Form,
  model: saved.Model,
  to: str,
  dtype: str,
  remote_code: bool,
  weights: str,
) -> None:
  """The files of a format, without tokenizer and report."""
  folder.mkdir(parents=True)
  args = (folder, form.params, form.config)
  if to == "safetensors":
    bare.write(*args, dtype=dtype)
  elif to == "stablehlo":
    stablehlo.write(*args, dtype=dtype, weights=weights)
  elif to == "transformer-lens":
    transformer_lens.write(*args, dtype=dtype)
  elif to == "gguf":
    gguf_files.write(
      folder / "model.gguf",
      form.params,
      form.config,
      model.tokenizer,
      dtype=dtype,
      name="taperjax",
    )
  else:
    ids = {"bos_token_id": None, "eos_token_id": None}
    if model.tokenizer is not None:
      ids = tokenizer_files.special_ids(model.tokenizer)
    if remote_code:
      remote_code_lib.write(*args, dtype=dtype, special_ids=ids)
    else:
      layout = llama if form.config.norm == "rms" else gpt2
      tensors, hf_config = layout.to_hf(form.params, form.config)
      hf_files.write_folder(folder, tensors, {**hf_config, **ids}, dtype)
    write_json(folder / "generation_config.json", {**ids, "do_sample": False})


def _write_tokenizer(folder: pathlib.Path, model: saved.Model) -> None:
  definition = tokenizer_files.to_tokenizer_json(model.tokenizer)
  (folder / "tokenizer.json").write_bytes(definition)
  config = tokenizer_files.tokenizer_config(model.tokenizer)
  config["model_max_length"] = model.config.context_len
  write_json(folder / "tokenizer_config.json", config)


def _reader(to: str, remote_code: bool) -> Callable[..., Any]:
  if to == "hf":
    return lambda *args: verify.hf_logits(*args, remote_code=remote_code)
  return {
    "transformer-lens": verify.transformer_lens_logits,
    "stablehlo": verify.stablehlo_logits,
    "safetensors": verify.safetensors_logits,
    "gguf": verify.gguf_logits,
  }[to]


def export(
  reference: Reference,
  to: str,
  out: pathlib.Path,
  *,
  dtype: str = "bfloat16",
  remote_code: bool = False,
  weights: str = "arguments",
  log: Callable[[str], object] = lambda line: None,
) -> dict[str, Any]:
  """Writes `out` whole and verified, or not at all.

  Args:
    reference: the model, and what its export is held against.
    to: "hf", "transformer-lens", "stablehlo", "safetensors" or "gguf".
    out: a new folder, or an earlier export, which is replaced.
    dtype: of the file: float32, bfloat16 or float16, cast once from float32.
    remote_code: of hf: a modeling file of ours in place of the stock class.
    weights: of stablehlo: "arguments" or "constants".
    log: takes lines on what is waited for.

  Returns:
    The report, as in out/verification.json.

  Raises:
    UserError: a format that cannot hold the model, or an error above its bound.
  """
  model, tokens_BL = reference.model, reference.tokens_BL
  if tokens_BL.size < verify.MIN_POSITIONS:
    raise UserError(
      f"data={reference.text} gives {tokens_BL.size} positions, but a "
      f"comparison needs {verify.MIN_POSITIONS}; give a longer text"
    )
  out = _check_out(out)
  form = form_of(model, to, dtype, remote_code)
  exact_form = form if dtype == "float32" else form_of(
    model, to, "float32", remote_code
  )
  options = (remote_code, weights)
  with contextlib.ExitStack() as stack:
    raise_noted = stack.enter_context(files.noted_signals())
    part = stack.enter_context(files.whole_folder(out, "the export"))
    check = part.with_name(f"{part.name}-float32")
    stack.callback(shutil.rmtree, check, ignore_errors=True)
    report = _report(reference, form, to, dtype, remote_code, weights)
    log(f"writing {to} in float32, and reading it back")
    _write(check, exact_form, model, to, "float32", *options)
    report["float32"] = _compare(
      check, to, remote_code, exact_form, reference
    )
    raise_noted()  # the reader was imported here
    if dtype != "float32":
      log(f"writing {to} in {dtype}, and reading it back")
      _write(part, form, model, to, dtype, *options)
      report["stored"] = _compare(
        part, to, remote_code, form, reference, dtype
      )
    else:
      check.rename(part)
      report["stored"] = report["float32"]
    whole = part if dtype == "float32" else check
    if to == "transformer-lens":
      report["attribution"] = _compare_attribution(whole, reference)
    report["source"] = reference.source
    raise_noted()
    if model.tokenizer is not None:
      if to != "gguf":
        _write_tokenizer(part, model)
      if to == "hf":
        report["tokenizer"] = _compare_ids(part, reference, remote_code)
        report["greedy"] = _compare_greedy(whole, reference, remote_code)
    report["residuals"] = _residuals(form, tokens_BL)
    (part / "README.md").write_text(card.text(report), encoding="utf-8")
    report["files"] = sorted(path.name for path in part.iterdir())
    write_json(part / REPORT, strict(report))
    raise_noted()
  return strict(report)


def _report(reference, form, to, dtype, remote_code, weights):
  model, config = reference.model, reference.model.config
  return {
    "format": to,
    "form": form.name,
    "remote_code": remote_code,
    "weights": weights if to == "stablehlo" else None,
    "dtype": dtype,
    "norm": config.norm,
    "internal_norm": config.internal_norm,
    "final_norm": config.final_norm,
    "sites": saved.site_factors(config, model.c),
    "step": model.step,
    "params": model_lib.count_params(form.params)[0],
    "text": reference.text,
    "positions": int(reference.tokens_BL.size),
    "notes": form.info.get("notes", []),
    "imported_from": model.meta.get("source", {}).get("format"),
    "model_commit": model.meta.get("commit"),
    "commit": commit(),
    "taperjax": taperjax.__version__,
  }


def _read(reader: Callable[..., Any], *args) -> Any:
  """What a reader of `verify` gives.

  Raises:
    UserError: it fails, in whatever way.
    verify.Missing: it is not there.
  """
  try:
    return reader(*args)
  except (verify.Missing, UserError, MemoryError):
    raise
  except Exception as error:  # of other people's programs: any type
    reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
    raise Failed(
      f"the model cannot be read back ({reason}); nothing was written: try "
      "another format or version of the reader, --debug shows the whole error"
    ) from error


def _compare(
  folder, to, remote_code, form, reference, dtype="float32"
) -> dict[str, Any]:
  """Errors of a written export against our float32 model, within the bound."""
  reader = _reader(to, remote_code)
  try:
    got_BLV, reader = _read(reader, folder, reference.tokens_BL)
  except verify.Missing as missing:
    return {"reader": None, "reason": str(missing)}
  errors = verify.compare(reference.logits_BLV, got_BLV)
  if dtype == "float32":
    name = "max_abs_delta_logit"
    most = verify.bound(errors, form.name, form.config.norm)
  else:
    name, most = "kl", verify.STORED_KL_BOUND
  if not errors[name] <= most:  # a NaN is no pass
    raise Failed(
      f"{name}={errors[name]:.3g} of the {to} export in {dtype}, read by "
      f"{reader}, is above its bound {most:.3g}; nothing was written: this "
      "model does not survive that format or dtype, try float32 or another "
      "format"
    )
  return {"reader": reader, "dtype": dtype, **errors, "bound": {name: most}}


def _compare_source(reference: Reference) -> dict[str, Any] | None:
  """Of an untouched import: our model against its files in their own reader.

  A file without norms is read as a tapered model; one that was calibrated
  since has a scale_target.
  """
  model = reference.model
  changed = model.step != 0 or model.meta.get("scale_target")
  if "source" not in model.meta or changed:
    return None
  try:
    got_BLV, reader = _read(
      verify.source_logits, model, reference.tokens_BL
    )
  except verify.Missing as missing:
    return {"reader": None, "reason": str(missing)}
  errors = verify.compare(got_BLV, reference.logits_BLV)
  most = verify.bound(errors, "plain", model.config.norm)
  if not errors["max_abs_delta_logit"] <= most:
    raise Failed(
      f"max_abs_delta_logit={errors['max_abs_delta_logit']:.3g} between the "
      f"imported model and its source, read by {reader}, is above "
      f"{most:.3g}; nothing was written: import the source again"
    )
  return {
    "reader": reader, **errors, "bound": {"max_abs_delta_logit": most}
  }


def _compare_attribution(folder, reference) -> dict[str, Any]:
  """The parts of the stream sum to the logits, as a linear path must."""
  want_BLV = reference.logits_BLV
  try:
    found = _read(
      verify.attribution, folder, reference.tokens_BL, want_BLV
    )
  except verify.Missing as missing:
    return {"reader": None, "reason": str(missing)}
  most = verify.BOUND * max(1.0, float(np.mean(want_BLV.std(axis=-1))))
  if not found["attribution_error"] <= most:
    raise Failed(
      f"attribution_error={found['attribution_error']:.3g}: the parts of the "
      f"stream do not sum to the logits within {most:.3g}; nothing was "
      "written: the stream of this model is too large for float32"
    )
  return {**found, "bound": {"attribution_error": most}}


def _compare_ids(folder, reference, remote_code) -> dict[str, Any]:
  """AutoTokenizer gives the ids that training saw."""
  tokenizer = reference.model.tokenizer
  texts = [tokenizer.decode(row_L) for row_L in reference.tokens_BL]
  texts += ["", " two  blanks\nand a line", "caf\u00e9 \u2581 \U0001f600"]
  try:
    found = _read(verify.hf_token_ids, folder, texts, remote_code)
  except verify.Missing as missing:
    return {"reader": None, "reason": str(missing)}
  bos = [tokenizer.bos_id] if tokenizer.adds_bos else []
  for text, ids in zip(texts, found, strict=True):
    if ids != bos + tokenizer.encode(text):
      raise Failed(
        f"AutoTokenizer gives other ids than the model was trained on for the "
        f"text {text[:40]!r}; nothing was written: this tokenizer cannot be "
        "exported, export to safetensors"
      )
  return {"reader": verify.version("transformers"), "texts": len(texts),
          "same_ids": True, "adds_bos": bool(bos)}


def _compare_greedy(folder, reference, remote_code) -> dict[str, Any]:
  """Three unequal prompts, continued by transformers and by us in float32."""
  model, prompts, count = reference.model, reference.prompts, reference.count
  eos = model.tokenizer.eos_id
  try:
    found = _read(
      verify.hf_greedy, folder, prompts, count, eos, remote_code
    )
  except verify.Missing as missing:
    return {"reader": None, "reason": str(missing)}
  ours = reference.greedy
  report = {"reader": verify.version("transformers"), "tokens": count,
            "same_ids": found == ours}
  for prompt, a, b in zip(prompts, ours, found, strict=True):
    if a != b:
      gap, most = _gap(model, prompt, a, b, eos)
      report["largest_tie"] = max(gap, report.get("largest_tie", 0.0))
      if not gap <= most:
        raise Failed(
          f"generate of transformers continues a prompt otherwise than we do, "
          f"where our logits of the two tokens differ by {gap:.3g}, above "
          f"{most:.3g}; nothing was written: try another format"
        )
  return report


def _gap(model, prompt, ours, theirs, eos) -> tuple[float, float]:
  """(our logits' difference where two rows part, twice the bound of one)."""
  ours, theirs = [*ours, eos], [*theirs, eos]
  same = 0
  while ours[same] == theirs[same]:
    same += 1
  row_BL = np.asarray([prompt + ours[:same]])
  logits_V = verify.our_logits(
    model.params, model.c, model.config, row_BL
  )[0, -1]
  gap = abs(float(logits_V[ours[same]] - logits_V[theirs[same]]))
  return gap, 2 * verify.BOUND * max(1.0, float(logits_V.std()))


def _residuals(form: Form, tokens_BL) -> dict[str, Any]:
  """Of the written form: a ballast counts, and folding changes nothing here."""
  sites = 2 * form.config.num_layers + 1
  largest = ranges.largest_residuals(
    form.params, np.zeros(sites, np.float32), 1.0, form.config, tokens_BL
  )
  return {
    "largest_by_layer": largest,
    "float16_margin": ranges.float16_margin(largest),
  }


def _check_out(out: pathlib.Path) -> pathlib.Path:
  """Where to write, links resolved; raises unless it is free or an export."""
  out, there = saved.look_out(out)
  if there and REPORT not in there:
    raise UserError(
      f"--out={out} holds {there[0]!r} and no {REPORT}, so it is no export "
      "of ours; choose another folder"
    )
  if there:
    known = hf_files.read_json(out / REPORT).get("files")
    known = known if isinstance(known, list) else []
    if other := [name for name in there if name not in (*known, REPORT)]:
      raise UserError(
        f"--out={out} holds {min(other)!r}, which that export did not write; "
        "take it away, or choose another folder"
      )
  return out


# Columns of the matrix: label, format, remote code.
COLUMNS = (
  ("hf", "hf", False),
  ("hf --remote-code", "hf", True),
  ("transformer-lens", "transformer-lens", False),
  ("stablehlo", "stablehlo", False),
  ("safetensors", "safetensors", False),
  ("gguf", "gguf", False),
)


def check_matrix(out: pathlib.Path) -> None:
  """Raises unless a matrix may be written there: a new or an empty folder."""
  out, there = saved.look_out(out)
  if there:
    raise UserError(
      f"--out={out} holds {there[0]!r} already, and a matrix has a folder of "
      "its own; choose a new one"
    )


def matrix(
  name: str,
  reference: Reference,
  out: pathlib.Path,
  *,
  dtype: str,
  log: Callable[[str], object],
) -> Iterator[dict[str, Any]]:
  """Every format of one model, in folders under `out`, one after another.

  Yields:
    A dict for each format: model, format, and the report, or why it was
    `refused` (the format cannot hold the model) or has `failed` its checks.
  """
  for label, to, remote_code in COLUMNS:
    row = {"model": name, "format": label}
    log(f"{name}: {label}")
    try:
      row["report"] = export(
        reference,
        to,
        out / name / label.replace(" --", "-"),
        dtype=dtype,
        remote_code=remote_code,
      )
    except UserError as error:
      row["failed" if isinstance(error, Failed) else "refused"] = str(error)
    yield row


def matrix_lines(rows: list[dict[str, Any]]) -> list[str]:
  """A Markdown table of `matrix`, refusals as notes below."""
  dtypes = {r["report"]["dtype"] for r in rows if "report" in r}
  lines = [
    "| model | format | form | reader | max \\|delta logit\\|, float32 | KL, "
    f"{' or '.join(sorted(dtypes))} | same top token | same greedy ids | "
    "against the source |",
    "| --- " * 9 + "|",
  ]
  notes = {}
  for row in rows:
    start = f"| {row['model']} | {row['format']} |"
    if fate := {"refused", "failed"} & row.keys():
      (fate,) = fate
      number = notes.setdefault(row[fate], len(notes) + 1)
      lines.append(f"{start} {fate} ({number}) |" + " |" * 6)
      continue
    report = row["report"]
    exact, kept = report["float32"], report["stored"]
    if exact["reader"] is None:
      lines.append(f"{start} {report['form']} | {exact['reason']} |" + " |" * 5)
      continue
    greedy, source = report.get("greedy") or {}, report["source"] or {}
    same = {True: "yes", False: "no", None: ""}[greedy.get("same_ids")]
    error = source.get("max_abs_delta_logit")
    lines.append(
      f"{start} {report['form']} | {exact['reader']} | "
      f"{exact['max_abs_delta_logit']:.1e} | {kept['kl']:.1e} | "
      f"{kept['top1']:.2%} | {same} | "
      + ("" if error is None else f"{error:.1e}") + " |"
    )
  lines += ["", *(f"({i}) {note}" for note, i in notes.items())]
  return lines
