"""Models on disk: open any checkpoint, write a folded one."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import numpy as np

from taperjax import (
  checkpoint,
  config as config_lib,
  fakeln,
  folding,
  lora,
  model as model_lib,
  workdir as workdir_lib,
)
from taperjax.data import files, tokenizer as tokenizer_lib, tokens
from taperjax.errors import UserError
from taperjax.summary import commit, say, strict, versions, write_json

# One of these files lies in every workdir: of a run, or of an import.
_RUN_FILES = ("config.json", "import.json")


@dataclasses.dataclass(frozen=True, repr=False)
class Model:
  """A model and all that is needed to use it.

  Attributes:
    params: parameter tree, float32.
    config: its shape; modes "none" where norms are folded.
    c: calibrated factors by site, (S,); zeros before calibration. In the
      middle of a FakeLN run (3 N + 1, 3), see `fakeln.FakeState`.
    gate: gate of the tapered norms; without effect where none is tapered.
    tokenizer: or None for a model that was made in memory without one.
    step: optimizer steps done.
    meta: what was saved beside it: configuration, seed, versions, commit.
    folder: the checkpoint folder, or None.
  """

  params: dict
  config: config_lib.ModelConfig
  c: jax.Array | np.ndarray
  gate: float
  tokenizer: tokenizer_lib.Tokenizer | None = None
  step: int = 0
  meta: dict[str, Any] = dataclasses.field(default_factory=dict)
  folder: pathlib.Path | None = None

  def __repr__(self) -> str:
    size = model_lib.count_params(self.params)[0]
    return (
      f"Model({size:,} parameters, step {self.step}, internal norms "
      f"{self.config.internal_norm!r}, final norm {self.config.final_norm!r}, "
      f"gate {self.gate:g})"
    )

  @property
  def tapered(self) -> bool:
    return bool(self.config.tapered_sites) or self.cutting

  @property
  def cutting(self) -> bool:
    """Whether this is the middle of a FakeLN run."""
    return self.config.internal_norm == "fake"

  @property
  def calibrated(self) -> bool:
    """Whether g = 0 exists: every tapered site has its factor."""
    c_S = np.asarray(self.c)
    sites = self.config.tapered_sites  # none in the middle of a FakeLN run
    return bool(sites) and bool(np.all(c_S[sites] > 0))

  def replace(self, **changes) -> Model:
    return dataclasses.replace(self, **changes)


def load(
  path: str | os.PathLike[str],
  step: int | str | None = None,
  seed: int | None = None,
) -> Model:
  """Opens a workdir, a folder of checkpoints, or one step in it.

  Args:
    path: a workdir (its training checkpoints), WORKDIR/checkpoints,
      WORKDIR/folded, or one of these with a step at the end.
    step: the latest unless told; "best" is that of the lowest validation loss
      (of a tapered run only steps at gate 0 compete). A FakeLN run whose cuts
      are all made is opened as a tapered model at gate 0.
    seed: which one of a run with several seeds.

  Raises:
    UserError: no checkpoint or seed there, or a damaged one.
  """
  best = step == "best"
  folder, step = _find(pathlib.Path(path), None if best else step)
  if best:
    step = checkpoint.Checkpoints(folder, read_only=True).best_step()
    if step is None:
      raise UserError(
        f"step=best: no checkpoint in {folder} competes, for none is at the "
        "final gate; leave --step out for the latest"
      )
  folder = folder.resolve()  # its parents hold what belongs to it
  step, tree, meta = checkpoint.load_arrays(folder, step)
  where = f"checkpoint {folder / str(step)}"
  _check_meta(meta, where)
  for name in ("params", "taper"):
    if not isinstance(tree[name], dict):
      raise UserError(
        f"{where}: {name} must be a tree of arrays, not one; fetch it again"
      )
  tree, meta = _of_seed(tree, meta, seed, path)
  params, c = tree["params"], tree["taper"].get("c")
  model_config = config_lib.model_from_dict(meta["model"])
  adapters = None
  if lora.BRANCH in params:
    adapters = config_lib.config_from_dict(meta.get("config", {})).lora
  _check_arrays(params, c, model_config, adapters, where)
  if adapters is not None:
    params = lora.merge(params, adapters)
  if model_config.internal_norm == "fake" and meta["gate"] == 0.0:
    params, c, model_config = fakeln.to_taper(params, c, model_config)
  return Model(
    params=params,
    config=model_config,
    c=c,
    gate=meta["gate"],
    tokenizer=_tokenizer(folder, meta),
    step=step,
    meta=meta,
    folder=folder,
  )


def _check_meta(meta: dict[str, Any], where: str) -> None:
  """Raises unless all that is read from it has its kind."""
  many, run = "diverged" in meta, "config" in meta
  kinds = {
    "model": dict,
    "gate": (int, float),
    "seed": list if many else int,
    "data_hashes": dict,
    "source": dict,
    "valid_tokens": str,
    "diverged": list,
    "config": dict,
  }
  for name, kind in kinds.items():
    needed = name in ("model", "gate", "seed") or run and name in (
      "data_hashes", "valid_tokens"
    )
    if (needed or name in meta) and not isinstance(meta.get(name), kind):
      told = "a number" if name == "gate" else kind.__name__
      raise UserError(
        f"{where}: {name}={meta.get(name)!r} in its meta must be {told}; fetch "
        "it again"
      )
  if not 0 <= meta["gate"] <= 1:
    raise UserError(
      f"{where}: gate={meta['gate']!r} must be from 0 to 1; fetch it again"
    )
  if many and len(meta["seed"]) != len(meta["diverged"]):
    raise UserError(
      f"{where}: seed={meta['seed']!r} and diverged={meta['diverged']!r} must "
      "be of one length; fetch it again"
    )
  if run:
    config_lib.config_from_dict(meta["config"])
    if "valid" not in meta["data_hashes"]:
      raise UserError(
        f"{where}: data_hashes in its meta must name valid; fetch it again"
      )


def _check_arrays(
  params: dict,
  c: np.ndarray | None,
  config: config_lib.ModelConfig,
  adapters: config_lib.LoraConfig | None,
  where: str,
) -> None:
  """Raises unless they are those of the model, and finite.

  Raises:
    UserError: an array that is missing, of another shape, or more than there
      should be; a number that is not finite.
  """

  def make():
    made = model_lib.init_params(config, jax.random.key(0))
    if adapters is not None:
      key = jax.random.key(0)
      made = {**made, lora.BRANCH: lora.init(made, adapters, key)}
    return made

  found = _by_name(params)
  if not config.scan_layers and config.num_layers > len(found):
    raise UserError(  # before so many layers are thought of
      f"{where} has {len(found)} arrays for model.num_layers="
      f"{config.num_layers}; fetch it again"
    )
  want = _by_name(jax.eval_shape(make))
  sites = (2 * config.num_layers + 1,)
  if config.internal_norm == "fake":
    sites = (3 * config.num_layers + 1, 3)
  want["c"], found["c"] = jax.ShapeDtypeStruct(sites, np.float32), c
  for name in sorted(found.keys() | want.keys()):
    shapes = [
      f"{leaf.dtype}{list(leaf.shape)}" if hasattr(leaf, "shape") else "nothing"
      for leaf in (found.get(name), want.get(name))
    ]
    if shapes[0] != shapes[1]:
      raise UserError(
        f"{where}: array {name} is {shapes[0]}, against {shapes[1]} by its "
        "model; fetch it again"
      )
    if not np.isfinite(found[name]).all():
      raise UserError(
        f"{where}: array {name} holds numbers that are not finite; take an "
        "earlier step, or fetch it again"
      )


def _by_name(tree: dict) -> dict[str, Any]:
  return {
    jax.tree_util.keystr(path, simple=True, separator="/"): leaf
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
  }


def seeds(
  path: str | os.PathLike[str], step: int | str | None = None
) -> dict[int, int] | None:
  """Seeds of a run that has several, with the step where one diverged or 0."""
  folder, step = _find(pathlib.Path(path), None if step == "best" else step)
  checkpoints = checkpoint.Checkpoints(folder, read_only=True)
  step = checkpoints.latest_step() if step is None else step
  meta = checkpoints.meta(step)
  _check_meta(meta, f"checkpoint {folder / str(step)}")
  if "diverged" not in meta:
    return None
  return dict(zip(meta["seed"], meta["diverged"], strict=True))


def seed_meta(meta: dict[str, Any], i: int) -> dict[str, Any]:
  """What is saved beside several seeds, as for the i-th of them alone."""
  one = {name: value for name, value in meta.items() if name != "diverged"}
  for name in ("seed", "scale_target"):
    if isinstance(meta[name], list):
      one[name] = meta[name][i]
  return one


def _of_seed(
  tree: dict[str, Any], meta: dict[str, Any], seed: int | None, path: Any
) -> tuple[dict[str, Any], dict[str, Any]]:
  """The arrays and the meta of one seed.

  Raises:
    UserError: no such seed, one that diverged, or none is named of several.
  """
  if "diverged" not in meta:
    if seed is not None and ("source" in meta or seed != meta["seed"]):
      there = "no seed" if "source" in meta else f"seed {meta['seed']} alone"
      raise UserError(f"seed={seed}: {path} holds {there}; leave it out")
    return tree, meta
  there = ", ".join(map(str, meta["seed"]))
  if seed is None:
    raise UserError(
      f"{path} holds the seeds {there}; name one with --seed (of generate: "
      "--model-seed)"
    )
  if seed not in meta["seed"]:
    raise UserError(f"seed={seed} is not in {path}; use one of {there}")
  if any(x.shape[:1] != (len(meta["seed"]),) for x in jax.tree.leaves(tree)):
    raise UserError(
      f"{path} holds arrays of other seeds than {there}; fetch it again"
    )
  i = meta["seed"].index(seed)
  if meta["diverged"][i]:
    raise UserError(
      f"seed={seed} in {path} diverged at step {meta['diverged'][i]}; use "
      f"another of {there}"
    )
  return jax.tree.map(lambda leaf_S: leaf_S[i], tree), seed_meta(meta, i)


def read_config(fields: Mapping[str, Any]) -> config_lib.Config:
  """`config.parse`, with the model that init.checkpoint names.

  Raises:
    UserError: as `config.parse` and `load`.
  """
  initial = None
  group = config_lib.plain(fields).get("init")
  path = group.get("checkpoint") if isinstance(group, Mapping) else None
  if isinstance(path, str):
    folder, step = _find(pathlib.Path(path), None)
    checkpoints = checkpoint.Checkpoints(folder, read_only=True)
    if step is None:
      step = checkpoints.latest_step()
    meta = checkpoints.meta(step)
    _check_meta(meta, f"checkpoint {folder / str(step)}")
    if "diverged" in meta:
      raise UserError(
        f"init.checkpoint={path} holds {len(meta['seed'])} seeds; start from a "
        "run of one seed"
      )
    initial = config_lib.model_from_dict(meta["model"])
  return config_lib.parse(fields, initial)


def _find(
  path: pathlib.Path, step: int | None
) -> tuple[pathlib.Path, int | None]:
  """The folder of checkpoints that `path` means, and the step."""

  def holds_steps(folder):
    return folder.is_dir() and any(
      p.name.isdecimal() and p.is_dir() for p in folder.iterdir()
    )

  if not path.exists():
    raise UserError(
      f"{path} does not exist; give the workdir of a run, for example runs/a"
    )
  for folder in (path / "checkpoints", path):
    if holds_steps(folder):
      return folder, step
  if path.name.isdecimal() and not _is_workdir(path):
    if step not in (None, int(path.name)):
      raise UserError(f"{path} is one step, not step {step}; give one of them")
    return path.parent, int(path.name)
  if seeds := sorted(p.name for p in path.glob("seed_*") if holds_steps(p)):
    raise UserError(
      f"{path} holds one folded model for each seed; give {path / seeds[0]}"
    )
  raise UserError(
    f"{path} holds no checkpoint; train first, or give the workdir of a run"
  )


def _is_workdir(folder: pathlib.Path) -> bool:
  return any((folder / name).is_file() for name in _RUN_FILES)


def workdir_of(folder: pathlib.Path) -> pathlib.Path | None:
  """The run or import that a checkpoint folder belongs to, if there is one."""
  for parent in (folder, *folder.parents[:2]):
    if _is_workdir(parent):
      return parent
  return None


def check_outside_runs(out: pathlib.Path, own: str = "") -> None:
  """Raises where a new folder would lie among the files of a run.

  Args:
    out: absolute, links resolved.
    own: the name that it may have in a workdir.
  """
  for inner, outer in zip((out, *out.parents), out.parents, strict=False):
    taken = _is_workdir(outer) and inner.name in workdir_lib.RESULTS
    of_seed = inner == out.parent and re.fullmatch(r"seed_\d+", out.name)
    if inner.name == own and (inner == out or of_seed):
      taken = False
    if inner.name.isdecimal():  # a step, where checkpoints lie alone too
      steps = outer.glob("[0-9]*/_CHECKPOINT_METADATA")
      taken = taken or any(True for _ in steps)
    if taken:
      raise UserError(
        f"--out={out} lies among the files of the model in {outer}; choose "
        "another folder"
      )


def look_out(
  out: pathlib.Path, own: str = ""
) -> tuple[pathlib.Path, list[str]]:
  """(--out with links resolved, the names that are there).

  Raises:
    UserError: it lies among the files of a run, or cannot be read.
  """
  try:
    out = out.resolve()
    check_outside_runs(out, own)
    return out, sorted(path.name for path in out.iterdir())
  except FileNotFoundError:
    return out, []
  except (OSError, RuntimeError) as error:
    raise UserError(
      f"--out={out} cannot be used ({error}); choose another folder"
    ) from error


def tokenizer_folder(path: str | os.PathLike[str]) -> pathlib.Path:
  """Where the tokenizer of a checkpoint is saved.

  Raises:
    UserError: it has none.
  """
  folder = _find(pathlib.Path(path), None)[0].resolve()
  for parent in (folder, folder.parent):
    if (parent / "tokenizer").is_dir():
      return parent / "tokenizer"
  raise UserError(
    f"{path} has no tokenizer beside it; keep tokenizer/ with the checkpoints"
  )


def _tokenizer(
  folder: pathlib.Path, meta: dict[str, Any]
) -> tokenizer_lib.Tokenizer | None:
  """The tokenizer beside a checkpoint, if it is the one it was trained with."""
  for parent in (folder, folder.parent):
    path = parent / "tokenizer"
    if path.is_dir():
      found = tokenizer_lib.load_tokenizer(path)
      told = meta.get("data_hashes", {}).get("tokenizer", found.fingerprint)
      size = meta["model"]["vocab_size"]
      # Embeddings of an imported model may have more rows than it has tokens.
      if found.fingerprint != told or found.vocab_size > size:
        raise UserError(
          f"tokenizer {path} with vocabulary {found.vocab_size:,} is not the "
          f"one that the model in {folder} was trained with (vocabulary "
          f"{size:,}); put that one back"
        )
      return found
  return None


def site_factors(
  config: config_lib.ModelConfig, c_S: jax.Array
) -> list[dict[str, Any]]:
  """c by tapered site, with names, in the order of the model."""
  names = config_lib.site_names(config.num_layers)
  c_S = np.asarray(c_S)
  return [
    {"site": names[i], "c": float(c_S[i])} for i in config.tapered_sites
  ]


def valid_tokens(model: Model) -> tokens.Stream:
  """Validation ids of the run that a checkpoint belongs to, the very same.

  Raises:
    UserError: the checkpoint lies in no workdir, or the token file is missing
      or another one.
  """
  if "source" in model.meta and "valid_tokens" not in model.meta:
    raise UserError(
      f"{model.folder} is an imported model, which has no validation text; "
      "give --data FILE"
    )
  workdir = None if model.folder is None else workdir_of(model.folder)
  if workdir is None:
    raise UserError(
      f"{model.folder} lies in no workdir, so its validation text is not "
      "known; give --data FILE"
    )
  path = workdir / model.meta["valid_tokens"]
  found, reason = tokens.open_tokens(path.parent, path.stem)
  if not found:
    raise UserError(
      f"tokens={path} cannot be used: {reason or 'there is no such file'}; put "
      "the file back, or give --data FILE"
    )
  if found.hashes != model.meta["data_hashes"]["valid"]:
    raise UserError(
      f"tokens={path} are not those that the run was validated on; put these "
      "back, or give --data FILE"
    )
  return found.tokens


def write_folded(
  folder: pathlib.Path,
  model: Model,
  make_batches: Callable[[], Iterable[tuple[np.ndarray, np.ndarray]]],
) -> tuple[dict[str, Any], Model]:
  """Folds, compares on one batch, and writes `folder` whole or not at all.

  Args:
    folder: replaced if it is there.
    model: tapered, at gate 0.
    make_batches: called after the checks; only its first batch is used.

  Returns:
    The report (as in folder/fold.json), and the folded model.

  Raises:
    UserError: the model cannot be folded, or the folder holds something else.
  """
  end = _taper_end(model)
  folding.check_foldable(model.gate, model.step, model.config, end)
  folder = _folded_folder(folder)
  params, config = folding.fold(model.params, model.c, model.config)
  tokens_BL1, mask_BL = next(iter(make_batches()))
  errors = folding.compare(
    model.params, model.c, model.config, params, config, tokens_BL1, mask_BL
  )
  report = {
    # A model that has diverged may leave float32; JSON has no infinity.
    "errors": strict(errors),
    "compared_tokens": int(mask_BL.sum()),
    "folded": folding.folded_tensors(model.config),
    "params": model_lib.count_params(model.params)[0],
    "params_folded": model_lib.count_params(params)[0],
    "step": model.step,
  }
  with files.whole_folder(folder, "the folded model") as part:
    part.mkdir(parents=True)
    with contextlib.closing(checkpoint.Checkpoints(part, log=say)) as saved:
      saved.save(
        model.step,
        {"params": params, "taper": {"c": np.asarray(model.c)}},
        model.meta | {"model": config_lib.to_dict(config)},
      )
      saved.wait()
    if model.tokenizer is not None:
      model.tokenizer.save(part / "tokenizer")
    write_json(part / "fold.json", report)
  return report, model.replace(params=params, config=config, folder=folder)


def write_imported(
  workdir: pathlib.Path, model: Model, notes: Iterable[str] = ()
) -> dict[str, Any]:
  """Writes checkpoints/0, tokenizer/ and import.json, whole or not at all.

  Args:
    workdir: from `workdir.open_workdir`, locked, without a run in it.
    model: as a reader in `interop` gives it, with meta["source"].
    notes: for import.json, beside those of the reader.

  Returns:
    What import.json holds.

  Raises:
    UserError: the folder is in use, or cannot be written.
  """
  workdir_lib.check_unused(workdir)
  source = model.meta["source"]
  shapes = {
    "/".join(part.key for part in path): list(leaf.shape)
    for path, leaf in jax.tree_util.tree_leaves_with_path(model.params)
  }
  report = {
    **source,
    "model": config_lib.to_dict(model.config),
    "params": model_lib.count_params(model.params)[0],
    "shapes": shapes,
    "notes": [*source.get("notes", ()), *notes],
  }
  tokenizer = model.tokenizer
  hashes = {} if tokenizer is None else {"tokenizer": tokenizer.fingerprint}
  meta = {
    "model": report["model"],
    "step": 0,
    "gate": model.gate,  # 0 of a file whose norms are gone
    "scale_target": 0.0,
    "seed": 0,
    "source": source,
    "data_hashes": hashes,
    "commit": commit(),
    "versions": versions(),
  }
  tree = {"params": model.params, "taper": {"c": np.asarray(model.c)}}
  part = workdir / f"import.part-{os.getpid()}"
  try:
    part.mkdir()
    folder = part / "checkpoints"
    with (
      files.noted_signals() as raise_noted,
      contextlib.closing(checkpoint.Checkpoints(folder, log=say)) as saved,
    ):
      saved.save(0, tree, meta, copy=False)
      saved.wait()
      raise_noted()
    if tokenizer is not None:
      tokenizer.save(part / "tokenizer")
    write_json(part / "import.json", report)
    # Of an import that was killed here; the checkpoints come last.
    shutil.rmtree(workdir / "tokenizer", ignore_errors=True)
    for name in ("tokenizer", "import.json", "checkpoints"):
      if (part / name).exists():
        (part / name).rename(workdir / name)
  except OSError as error:
    raise UserError(
      f"the imported model cannot be written to {workdir} ({error.strerror}); "
      "make room, or choose a writable folder"
    ) from error
  finally:
    shutil.rmtree(part, ignore_errors=True)
  return report


def _folded_folder(folder: pathlib.Path) -> pathlib.Path:
  """Where to write, links resolved; raises unless it is free or folded."""
  folder, there = look_out(folder, own="folded")
  known = ("fold.json", "tokenizer")
  if other := [n for n in there if n not in known and not n.isdecimal()]:
    raise UserError(
      f"--out={folder} holds {min(other)!r}, so it is no folded model; choose "
      "another folder"
    )
  if there and "fold.json" not in there:
    raise UserError(
      f"--out={folder} holds no fold.json, so it is no folded model; choose "
      "another folder"
    )
  return folder


def _taper_end(model: Model) -> int | None:
  """First step with gate 0 of the run, if the checkpoint knows its run."""
  if "config" not in model.meta:
    return None
  config = config_lib.config_from_dict(model.meta["config"])
  return config.taper_steps.end if config.taper_steps else None
