"""The configuration: frozen dataclasses, and the one parse that checks them.

A config file under configs/ gives every field; nothing here has a second
default. Fields that are None there are derived in `parse`, so that they follow
`--config.steps` and the like.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import types
import typing
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any

from taperjax.errors import UserError
from taperjax.gate import CutSteps, TaperSteps, cut_steps

# Table 1 of the paper: (internal norms taper, final norm tapers, scale loss).
# vanilla is the baseline under the name that fine-tuning has for it; fakeln
# cuts all its norms, without a taper, and has a scale loss of its own.
VARIANTS = {
  "baseline": (False, False, False),
  "internal": (True, False, False),
  "internal_aux": (True, False, True),
  "final": (False, True, False),
  "all": (True, True, False),
  "all_aux": (True, True, True),
  "vanilla": (False, False, False),
  "fakeln": (False, False, True),
}
LORA_TARGETS = ("q", "k", "v", "o", "gate", "up", "down")
BIASES = ("q", "k", "v", "o", "gate", "up", "down", "head")
MIN_VOCAB = 300  # SentencePiece: 256 pieces for bytes, and some for text

# Fields that must be above 0, and a value that a message can propose.
_POSITIVE = {
  "steps": 1_000,
  "batch_size": 16,
  "micro_batches": 1,
  "context_len": 512,
  "log_every": 10,
  "model.num_layers": 8,
  "model.embed_dim": 64,
  "model.num_heads": 4,
  "model.num_kv_heads": 4,
  "model.head_dim": 16,
  "model.mlp_dim": 176,
  "model.norm_eps": 1e-6,
  "model.rope_theta": 10_000.0,
  "model.init_std": 0.02,
  "optimizer.learning_rate": 3e-4,
  "optimizer.clip_norm": 1.0,
  "optimizer.eps": 1e-8,
  "data.corpus_stories": 6_000,
  "eval.every": 1_000,
  "eval.batch_size": 16,
  "eval.sample_tokens": 100,
  "eval.max_windows": 128,
  "checkpoint.every": 1_000,
  "lora.alpha": 16.0,
  "mesh.seed": 1,
  "mesh.data": 1,
  "mesh.fsdp": 1,
  "mesh.tensor": 1,
}
# The least and the most that numbers of a new run may be, [U], ours: within
# them float32 makes nothing of a step 0, infinite or 0 / 0.
_LEAST = {
  "optimizer.eps": 1e-16,  # else it divides by what underflowed
  "taper.ema_rate": 1e-6,
}
_MOST = {
  "model.init_std": 1.0,
  "optimizer.learning_rate": 1.0,
  "optimizer.eps": 1.0,
  "optimizer.weight_decay": 10.0,
  "optimizer.b1": 0.99999,  # 1 - b1 must not round to 0
  "optimizer.b2": 0.99999,
  "taper.scale_loss_weight": 1_000.0,
  "fakeln.momentum": 0.99999,
  "lora.alpha": 10_000.0,
}
# The same for fields with other rules.
_EXAMPLES = _POSITIVE | {
  "model.rotary_dim": 16,
  "taper.start": 0.05,
  "taper.end": 1.0,
  "taper.ema_rate": 0.1,
  "taper.scale_loss_weight": 0.1,
  "fakeln.start": 20,
  "fakeln.gap_mlp": 2,
  "fakeln.gap_qk": 2,
  "fakeln.gap_v": 3,
  "fakeln.eot_after": 2,
  "fakeln.position0_after": 10,
  "fakeln.momentum": 0.9,
  "optimizer.final_learning_rate": 0.0,
  "optimizer.warmup": 0.05,
  "optimizer.b1": 0.9,
  "optimizer.b2": 0.95,
  "optimizer.weight_decay": 0.0,
  "data.vocab_size": 10_000,
}


@dataclasses.dataclass(frozen=True)
class RopeScaling:
  """How rotary frequencies are stretched; see `attention.frequencies`."""

  kind: str  # "linear" or "llama3"
  factor: float
  low_freq_factor: float = 1.0  # the rest is of llama3 alone
  high_freq_factor: float = 4.0
  original_context: int = 8_192


@dataclasses.dataclass(frozen=True)
class ModelConfig:
  """Shape of a transformer; all that is needed to run its parameters."""

  num_layers: int
  embed_dim: int
  num_heads: int
  num_kv_heads: int
  head_dim: int
  mlp_dim: int
  mlp: str  # "swiglu", "gelu_tanh" or "gelu"
  positions: str  # "rope" or "learned"
  rope_theta: float
  rotary_dim: int
  norm_eps: float
  biases: tuple[str, ...]  # projections with a bias, names from BIASES
  tied: bool
  init_std: float
  scan_layers: bool
  # Set by `parse` from the fields outside `model`.
  norm: str  # "rms" or "layer"
  # "norm", "taper", "none" (folded), "fake" for all of a FakeLN run, or, of the
  # internal ones, "mixed": see internal_modes
  internal_norm: str
  final_norm: str
  vocab_size: int
  context_len: int
  compute_dtype: str
  rope_scaling: RopeScaling | None = None  # of imported models
  remat: bool = False  # the backward pass computes each block once more
  eot_id: int | None = None  # end of text, in a FakeLN run alone
  internal_modes: tuple[str, ...] = ()  # of the 2 N sites where they are mixed

  @property
  def residual_std(self) -> float:
    return self.init_std / math.sqrt(2 * self.num_layers)

  @property
  def tapered_sites(self) -> list[int]:
    """Indices of the tapered sites among the 2 N + 1."""
    return [i for i, mode in enumerate(self.modes) if mode == "taper"]

  @property
  def modes(self) -> tuple[str, ...]:
    """Mode of each of the 2 N + 1 sites, in the order of `TaperState.c`."""
    internal = self.internal_modes
    if self.internal_norm != "mixed":
      internal = (self.internal_norm,) * (2 * self.num_layers)
    return (*internal, self.final_norm)

  def with_modes(self, modes: Sequence[str]) -> ModelConfig:
    """The same shape with these modes of its 2 N + 1 sites."""
    *internal, final = modes
    mixed = len(set(internal)) > 1
    return self.replace(
      internal_norm="mixed" if mixed else internal[0],
      internal_modes=tuple(internal) if mixed else (),
      final_norm=final,
    )

  def replace(self, **changes) -> ModelConfig:
    return dataclasses.replace(self, **changes)


@dataclasses.dataclass(frozen=True)
class InitConfig:
  checkpoint: str | None  # workdir or checkpoint to start from; None: random


@dataclasses.dataclass(frozen=True)
class LoraConfig:
  rank: int  # 0: off, every parameter trains
  alpha: float  # adapters are scaled by alpha / rank
  targets: tuple[str, ...]  # projections with adapters, names from LORA_TARGETS


@dataclasses.dataclass(frozen=True)
class TaperConfig:
  start: float  # share of the steps at which the taper starts
  end: float  # share of the steps from which the gate is 0
  ema_rate: float  # weight of the new sample
  scale_loss_weight: float  # lambda
  # Ablations; the defaults are the paper's, and those of runs saved before.
  shape: str = "cosine"  # of the gate: "cosine", "linear" or "step"
  calibrate: bool = True  # False: c = 1
  train_gain: bool = True  # False: gamma~ stays as it was copied
  scale_loss_schedule: str = "constant"  # or "taper": lambda (1 - g)
  sites: tuple[str, ...] | None = None  # that taper; None: the variant's


@dataclasses.dataclass(frozen=True)
class FakelnConfig:
  """Hard cuts of variant=fakeln, in steps; see `gate.cut_steps`."""

  start: int  # last step before the first cut
  gap_mlp: int  # between the cuts of MLP norms
  gap_qk: int
  gap_v: int
  eot_after: int  # after the cut of the final norm
  position0_after: int  # after the end of the end-of-text treatment
  momentum: float  # weight of the old running mean


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
  learning_rate: float
  final_learning_rate: float
  warmup: float  # share of the steps
  b1: float
  b2: float
  eps: float
  weight_decay: float
  clip_norm: float


@dataclasses.dataclass(frozen=True)
class DataConfig:
  train: str
  valid: str
  tokenizer: str  # "sentencepiece", "bytes", or a path
  vocab_size: int | None
  folder: str | None  # None: inside the workdir
  corpus_stories: int | None  # of the embedded corpus; None without it


@dataclasses.dataclass(frozen=True)
class EvalConfig:
  every: int  # steps
  batch_size: int
  max_windows: int | None  # None: the whole validation text
  prompt: str
  sample_tokens: int


@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
  every: int  # steps


@dataclasses.dataclass(frozen=True)
class FoldConfig:
  untie: bool


@dataclasses.dataclass(frozen=True)
class MeshConfig:
  """Axes of the devices; their product is the number of devices."""

  seed: int = 1  # splits the seeds
  data: int = 1  # splits the batch
  fsdp: int = 1  # splits the batch, and the parameters
  tensor: int = 1  # splits heads and MLP of each layer


@dataclasses.dataclass(frozen=True)
class Config:
  """A whole run."""

  size: str
  variant: str
  norm: str
  seeds: tuple[int, ...]
  steps: int
  batch_size: int
  micro_batches: int
  context_len: int
  compute_dtype: str
  log_every: int
  model: ModelConfig
  taper: TaperConfig
  optimizer: OptimizerConfig
  data: DataConfig
  eval: EvalConfig
  checkpoint: CheckpointConfig
  fold: FoldConfig
  init: InitConfig = InitConfig(None)  # defaults: runs saved before these were
  lora: LoraConfig = LoraConfig(0, 1.0, ())
  fakeln: FakelnConfig = FakelnConfig(20, 2, 2, 3, 2, 10, 0.9)
  nonfinite: str = "stop"  # at a step that is not finite, or "skip" it
  mesh: MeshConfig = MeshConfig()

  @property
  def tapers(self) -> bool:
    return any(VARIANTS[self.variant][:2])

  @property
  def cuts(self) -> bool:
    return self.variant == "fakeln"

  @property
  def ends_without_norms(self) -> bool:
    """Whether some norms are gone at the end, the gate being 0."""
    return self.tapers or self.cuts

  @property
  def uses_scale_loss(self) -> bool:
    return VARIANTS[self.variant][2]

  @property
  def taper_steps(self) -> TaperSteps | None:
    """k_s and k_e, or None when nothing tapers."""
    if not self.tapers:
      return None
    start = round(self.taper.start * self.steps)
    end = round(self.taper.end * self.steps)
    return TaperSteps(start, end, self.taper.shape)

  @property
  def cut_steps(self) -> CutSteps | None:
    """The hard cuts of a FakeLN run, or None."""
    if not self.cuts:
      return None
    f = self.fakeln
    return cut_steps(
      self.model.num_layers,
      f.start,
      f.gap_mlp,
      f.gap_qk,
      f.gap_v,
      f.eot_after,
      f.position0_after,
    )

  @property
  def warmup_steps(self) -> int:
    return round(self.optimizer.warmup * self.steps)

  def with_vocab(self, vocab_size: int, eot_id: int | None = None) -> Config:
    """The same run once the tokenizer is known.

    A model that comes from a checkpoint keeps its own, maybe padded, size. Only
    FakeLN treats end-of-text tokens in a way of their own.
    """
    model = self.model
    if self.init.checkpoint is None:
      model = model.replace(vocab_size=vocab_size)
    if self.cuts:
      model = model.replace(eot_id=eot_id)
    return dataclasses.replace(self, model=model)


def to_dict(config: Any) -> dict:
  """A dataclass as nested dicts and lists that JSON holds exactly."""
  def plain(value):
    if isinstance(value, dict):
      return {k: plain(v) for k, v in value.items()}
    return list(value) if isinstance(value, tuple) else value

  return plain(dataclasses.asdict(config))


def model_from_dict(fields: Mapping[str, Any]) -> ModelConfig:
  """The inverse of `to_dict` for a saved model configuration.

  Raises:
    UserError: it was not saved by taperjax, or not whole.
  """
  model = _build(ModelConfig, fields, "model.")
  _check_numbers(model, "model.")
  _check_model(model)
  _check_saved_model(model)
  for name in ("vocab_size", "context_len"):
    if (value := getattr(model, name)) < 1:
      raise UserError(
        f"model.{name}={value} must be above 0; fetch the model again"
      )
  return model


def config_from_dict(fields: Mapping[str, Any]) -> Config:
  """The inverse of `to_dict` for a saved run configuration.

  Raises:
    UserError: it was not saved by taperjax, or not whole.
  """
  config = _build(Config, fields, "")
  _check(config)  # without the limits, which may be younger than the run
  _check_saved_model(config.model)
  return config


_SET_BY_PARSE = {
  "norm",
  "internal_norm",
  "final_norm",
  "vocab_size",
  "context_len",
  "compute_dtype",
  "rope_scaling",
  "eot_id",
  "internal_modes",
}


def parse(
  fields: Mapping[str, Any], initial: ModelConfig | None = None
) -> Config:
  """Checks a ConfigDict or nested dict, resolves what is None, builds Config.

  Args:
    fields: as a config file gives them.
    initial: the model in init.checkpoint, which then decides every field of
      `model`; `saved.read_config` opens it.

  Raises:
    UserError: one line naming the field, its value, the rule and the remedy.
  """
  fields = plain(fields)
  hints = typing.get_type_hints(Config)
  _check_names(fields, set(hints), "")
  groups = {k: v for k, v in hints.items() if dataclasses.is_dataclass(v)}
  for group, kind in groups.items():
    _check_group(fields[group], group)
    known = {f.name for f in dataclasses.fields(kind)}
    if kind is ModelConfig:
      known -= _SET_BY_PARSE
      for name in sorted(_SET_BY_PARSE & set(fields[group])):
        raise UserError(
          f"model.{name}={fields[group][name]!r} is set by {name!r} outside "
          "`model`; remove it here"
        )
    _check_names(fields[group], known, group + ".")
  if initial is not None:
    fields = _from_initial(fields, initial)
  model = dict(fields["model"])
  variant = _choice("variant", fields["variant"], tuple(VARIANTS))
  internal, final, _ = VARIANTS[variant]
  model["norm"] = _choice("norm", fields["norm"], ("rms", "layer"))
  model["internal_norm"] = "taper" if internal else "norm"
  model["final_norm"] = "taper" if final else "norm"
  if variant == "fakeln":
    model["internal_norm"] = model["final_norm"] = "fake"
  model["context_len"] = fields["context_len"]
  model["compute_dtype"] = _choice(
    "compute_dtype", fields["compute_dtype"], ("float32", "bfloat16")
  )
  data = dict(fields["data"])
  if initial is None:
    model["vocab_size"] = _vocab_size(data)
    _derive_model(model)
  else:
    model["vocab_size"] = initial.vocab_size
    model["rope_scaling"] = to_dict(initial)["rope_scaling"]
    # The table of learned positions keeps its length in shorter windows.
    model["context_len"] = initial.context_len
  taper = dict(fields["taper"])
  if taper["ema_rate"] is None:
    # [U]: the paper has 0.01 for long warm-ups, 0.1 for those of 10-50 steps.
    start = _typed(taper["start"], float, "taper.start")
    warmup = round(start * _typed(fields["steps"], int, "steps"))
    taper["ema_rate"] = 0.1 if warmup < 300 else 0.01
  fields = {**fields, "model": model, "data": data, "taper": taper}
  for group in ("eval", "checkpoint"):
    if fields[group].get("every", 0) is None:
      every = max(1, min(1000, _typed(fields["steps"], int, "steps") // 5))
      fields[group] = {**fields[group], "every": every}
  config = _build(Config, fields, "")
  _check(config)
  _check_limits(config)
  if config.taper.sites is not None:
    model = config.model.with_modes(_modes(config))
    config = dataclasses.replace(config, model=model)
  return config


def _modes(config: Config) -> list[str]:
  """Modes of the sites where `taper.sites` chooses among the variant's.

  Raises:
    UserError: a name that is no site of this model or does not taper in this
      variant, none at all, or blocks that differ where layers are scanned.
  """
  model, chosen = config.model, config.taper.sites
  names = site_names(model.num_layers)
  kinds = {name: name.rpartition(".")[2] for name in names}
  shown = f"taper.sites={chosen}"
  if not chosen:
    raise UserError(
      f"{shown} with variant={config.variant} leaves nothing to taper; name "
      "some sites, or use variant=baseline"
    )
  for name in chosen:
    if name not in names and name not in kinds.values():
      raise UserError(
        f"{shown} names {name!r}, which is no site; use {names[0]} to "
        f"{names[-2]}, final_norm, or attn_norm and mlp_norm for those of all "
        "blocks"
      )
    found = [n for n in names if name in (n, kinds[n])]
    if not {names.index(n) for n in found} & set(model.tapered_sites):
      raise UserError(
        f"{shown} names {name!r}, which does not taper with variant="
        f"{config.variant}; leave it out or choose another variant"
      )
  modes = [
    "norm" if mode == "taper" and not {name, kinds[name]} & {*chosen} else mode
    for name, mode in zip(names, model.modes, strict=True)
  ]
  pairs = {tuple(modes[i : i + 2]) for i in range(0, len(modes) - 1, 2)}
  if model.scan_layers and len(pairs) > 1:
    raise UserError(
      f"{shown} with model.scan_layers=True: blocks that differ cannot share "
      "one program; name sites of all blocks, or set model.scan_layers=False"
    )
  return modes


def site_names(num_layers: int) -> list[str]:
  """Names of the 2 N + 1 norm sites in the order of `TaperState.c`."""
  names = []
  for layer in range(num_layers):
    names += [f"block_{layer}.attn_norm", f"block_{layer}.mlp_norm"]
  return [*names, "final_norm"]


def _from_initial(fields: dict, initial: ModelConfig) -> dict:
  """Fills what is None from the model that the run starts from.

  Raises:
    UserError: a field differs from that model, or it has no norm to taper.
  """
  path = fields["init"]["checkpoint"]
  for name in ("internal_norm", "final_norm"):
    if (mode := getattr(initial, name)) != "norm":
      raise UserError(
        f"init.checkpoint={path} has {name}={mode}: a run starts from a model "
        "with all its norms; give a baseline or an imported model"
      )
  fields = {**fields, "model": dict(fields["model"])}
  for name in ("scan_layers", "remat"):  # how a model runs, not what it is
    if fields["model"][name] is None:
      fields["model"][name] = False
  groups = [("", "norm", fields), ("", "context_len", fields)]
  groups += [
    ("model.", name, fields["model"])
    for name in fields["model"]
    if name not in ("scan_layers", "remat")
  ]
  for prefix, name, group in groups:
    value, theirs = group[name], getattr(initial, name)
    if value is None:
      group[name] = theirs
      continue
    if isinstance(value, list):
      value = tuple(value)
    shorter = name == "context_len" and isinstance(value, int) and (
      value < theirs
    )
    if value != theirs and not shorter:
      rule = "at most that" if name == "context_len" else "as it is"
      raise UserError(
        f"{prefix}{name}={value!r} differs from the model in init.checkpoint="
        f"{path}, which has {theirs!r}: it must be {rule}; leave it None"
      )
  if fields["data"]["tokenizer"] != "init":
    raise UserError(
      f"data.tokenizer={fields['data']['tokenizer']!r} with init.checkpoint="
      f"{path}: the model reads the ids of its own tokenizer; set it to 'init'"
    )
  return fields


def plain(fields: Any) -> dict:
  """A ConfigDict or a mapping as nested dicts."""
  if hasattr(fields, "to_dict"):
    return fields.to_dict()
  return {
    k: plain(v) if isinstance(v, Mapping) else v for k, v in fields.items()
  }


def _vocab_size(data) -> int:
  """Vocabulary size as far as the config knows it; 0: the tokenizer says."""
  kind = _typed(data["tokenizer"], str, "data.tokenizer")
  size = _typed(data["vocab_size"], int | None, "data.vocab_size")
  if kind == "init":
    raise UserError(
      "data.tokenizer=init is that of init.checkpoint, which is None; set it, "
      "or use sentencepiece, bytes or a path"
    )
  if kind == "sentencepiece":
    if size is None:
      raise UserError(
        "data.vocab_size=None is not enough for data.tokenizer=sentencepiece; "
        "give a number, for example 10000"
      )
    return size
  if size is not None:
    raise UserError(
      f"data.vocab_size={size} has no effect with data.tokenizer={kind}, "
      "which brings its own vocabulary; leave it None"
    )
  return 257 if kind == "bytes" else 0


def _derive_model(model: dict) -> None:
  """Fills the fields of `model` that are None from the others."""
  heads = _typed(model["num_heads"], int, "model.num_heads")
  width = _typed(model["embed_dim"], int, "model.embed_dim")
  _check_positive("model.num_heads", heads)
  if model["num_kv_heads"] is None:
    model["num_kv_heads"] = heads
  if model["head_dim"] is None:
    if width % heads:
      near = sorted({max(heads, width // heads * heads),
                     (width // heads + 1) * heads})
      example = " or ".join(map(str, near))
      raise UserError(
        f"model.embed_dim={width} is not divisible by "
        f"model.num_heads={heads}; use a multiple of {heads}, for example "
        f"{example}"
      )
    model["head_dim"] = width // heads
  if model["mlp_dim"] is None:
    model["mlp_dim"] = mlp_dim(width)
  if model["rotary_dim"] is None:
    model["rotary_dim"] = model["head_dim"]


def mlp_dim(width: int) -> int:
  """SwiGLU hidden width: 8 d / 3 rounded up to a multiple of 8."""
  return -(-8 * width // 24) * 8


def _build(cls, fields: Mapping[str, Any], prefix: str):
  """A dataclass from a mapping; names and types are checked."""
  _check_group(fields, prefix[:-1])
  hints = typing.get_type_hints(cls)
  has_default = {
    f.name
    for f in dataclasses.fields(cls)
    if f.default is not dataclasses.MISSING
  }
  _check_names(fields, set(hints), prefix, has_default)
  return cls(**{
    name: _typed(fields[name], kind, prefix + name)
    for name, kind in hints.items()
    if name in fields
  })


def _check_group(value, name: str) -> None:
  if not isinstance(value, Mapping):
    raise UserError(
      f"{name}={value!r} is not a group of fields; set the fields in it one by "
      "one, as configs/tinystories.py does"
    )


def _check_names(
  fields, known: set[str], prefix: str, optional: Set[str] = frozenset()
) -> None:
  for name in fields:
    if name not in known:
      close = difflib.get_close_matches(name, known, 1, 0.5)
      hint = f"did you mean {prefix}{close[0]}?" if close else (
        "the fields are " + ", ".join(sorted(known))
      )
      raise UserError(f"{prefix}{name} is not a config field; {hint}")
  for name in sorted(known - set(fields) - optional):
    raise UserError(f"{prefix}{name} is missing; add it to the config file")


def _typed(value, kind, name: str):
  if isinstance(kind, types.UnionType):
    if value is None:
      return None
    kind = kind.__args__[0]
  if dataclasses.is_dataclass(kind):
    return _build(kind, value, name + ".")
  if typing.get_origin(kind) is tuple:
    inner = kind.__args__[0]
    if not isinstance(value, list | tuple):
      what, example = {
        int: ("whole numbers", (0,)),
        str: ("texts", ("q", "k")),
      }[inner]
      if isinstance(value, inner) and not isinstance(value, bool):
        example = (value,)
      raise UserError(
        f"{name}={value!r} is not a list of {what}; write {example!r}"
      )
    return tuple(_typed(v, inner, name) for v in value)
  if kind in (str, bool) and isinstance(value, kind):
    return value
  number = isinstance(value, int | float) and not isinstance(value, bool)
  if number and kind is float and not abs(value) < math.inf:
    raise UserError(
      f"{name}={value} is not finite; give a number, for example "
      f"{_example(name, kind, value)}"
    )
  whole = number and (isinstance(value, int) or value.is_integer())
  if whole and kind is int or number and kind is float:
    # A longer integer is no float, and printing it may fail.
    long = kind is int or isinstance(value, int)
    if long and not -(2**63) < value < 2**63:
      raise UserError(
        f"{name} is a number of {int(value).bit_length()} bits; it must be "
        f"below 2^63, for example {_example(name, kind, value)}"
      )
    return kind(value)
  words = {
    int: "a whole number",
    float: "a number",
    str: "text",
    bool: "True or False",
  }[kind]
  raise UserError(
    f"{name}={value!r} is of type {type(value).__name__}; it must be {words}, "
    f"for example {_example(name, kind, value)}"
  )


def _example(name: str, kind, value) -> str:
  """A value of this kind that a message can propose for a field."""
  if kind is str:
    return repr(str(value))
  return repr(_EXAMPLES.get(name, {int: 4, float: 0.1, bool: True}[kind]))


def _choice(name: str, value, choices: tuple[str, ...]) -> str:
  if value not in choices:
    raise UserError(f"{name}={value!r} is not one of {', '.join(choices)}")
  return value


def _check_positive(name: str, value) -> None:
  if not value > 0:
    raise UserError(
      f"{name}={value} must be above 0, for example {_EXAMPLES[name]}"
    )


def _numbers(tree: Any, prefix: str) -> Iterator[tuple[str, int | float]]:
  """Every number of a dataclass, by its name in the config."""
  for field in dataclasses.fields(tree):
    name, value = prefix + field.name, getattr(tree, field.name)
    if dataclasses.is_dataclass(value):
      yield from _numbers(value, name + ".")
    elif isinstance(value, int | float) and not isinstance(value, bool):
      yield name, value


def _check_numbers(tree: Any, prefix: str = "") -> None:
  """What holds for each number alone."""
  for name, value in _numbers(tree, prefix):
    if name in _POSITIVE:
      _check_positive(name, value)
    example = _example(name, type(value), value)
    if isinstance(value, int) and value >= 2**31:  # jax counts in int32
      raise UserError(
        f"{name}={value} must be below 2^31, for example {example}"
      )
    if isinstance(value, float) and 0 < abs(value) < 2**-126:
      raise UserError(
        f"{name}={value} is 0 in float32; use for example {example}"
      )
    if isinstance(value, float) and not abs(value) < 2**127:
      raise UserError(
        f"{name}={value} is too large for float32; use for example {example}"
      )


def _check_limits(config: Config) -> None:
  """`_LEAST` and `_MOST`, after the rules that say more."""
  for name, value in _numbers(config, ""):
    if name == "model.init_std" and config.init.checkpoint is not None:
      continue  # it is the model's, and draws nothing
    low, high = _LEAST.get(name, -math.inf), _MOST.get(name, math.inf)
    if not low <= value <= high:
      rule = f"at least {low:g}" if value < low else f"at most {high:g}"
      raise UserError(
        f"{name}={value} must be {rule}, for example "
        f"{_example(name, type(value), value)}"
      )


def _check(config: Config) -> None:
  """Rules that involve values; each message is one line."""
  model, taper, opt = config.model, config.taper, config.optimizer
  _check_numbers(config.data, "data.")  # model.vocab_size comes from there
  _check_numbers(config)
  for name, value in (
    ("optimizer.weight_decay", opt.weight_decay),
    ("optimizer.final_learning_rate", opt.final_learning_rate),
    ("taper.scale_loss_weight", taper.scale_loss_weight),
  ):
    if value < 0:
      raise UserError(
        f"{name}={value} must not be below 0; use for example "
        f"{_EXAMPLES[name]}"
      )
  for name, value in (
    ("optimizer.warmup", opt.warmup),
    ("taper.start", taper.start),
    ("taper.end", taper.end),
  ):
    if not 0 <= value <= 1:
      raise UserError(
        f"{name}={value} must be between 0 and 1; it is a share of the steps, "
        f"for example {_EXAMPLES[name]}"
      )
  if not 0 < taper.ema_rate <= 1:
    raise UserError(
      f"taper.ema_rate={taper.ema_rate} must be above 0 and at most 1; it is "
      f"the weight of the new sample, for example {_EXAMPLES['taper.ema_rate']}"
    )
  if opt.final_learning_rate > opt.learning_rate:
    raise UserError(
      f"optimizer.final_learning_rate={opt.final_learning_rate} is above "
      f"optimizer.learning_rate={opt.learning_rate}; the rate only falls: use "
      f"at most {opt.learning_rate}"
    )
  for name, value in (("optimizer.b1", opt.b1), ("optimizer.b2", opt.b2)):
    if not 0 <= value < 1:
      raise UserError(
        f"{name}={value} must be at least 0 and below 1, for example "
        f"{_EXAMPLES[name]}"
      )
  _choice("nonfinite", config.nonfinite, ("stop", "skip"))
  if config.nonfinite == "skip" and len(config.seeds) > 1:
    raise UserError(
      f"nonfinite='skip' with seeds={config.seeds}: of several seeds one that "
      "is not finite is frozen and the others go on; set nonfinite='stop', or "
      "give one seed"
    )
  _choice("taper.shape", taper.shape, ("cosine", "linear", "step"))
  schedules = ("constant", "taper")
  _choice("taper.scale_loss_schedule", taper.scale_loss_schedule, schedules)
  if config.cuts:
    for name in (
      "shape", "calibrate", "train_gain", "scale_loss_schedule", "sites"
    ):
      default = TaperConfig.__dataclass_fields__[name].default
      if (value := getattr(taper, name)) != default:
        raise UserError(
          f"taper.{name}={value} has no effect with variant=fakeln, which cuts "
          f"its norms and has no gate; set it to {default!r}"
        )
  _check_model(model)
  _check_data(config.data)
  if config.batch_size % config.micro_batches:
    raise UserError(
      f"batch_size={config.batch_size} is not divisible by "
      f"micro_batches={config.micro_batches}; use a divisor of the batch size"
    )
  if not config.seeds:
    raise UserError("seeds=() is empty; give at least one, for example (0,)")
  if len(set(config.seeds)) < len(config.seeds):
    raise UserError(f"seeds={config.seeds} repeats a seed; name each one once")
  for seed in config.seeds:
    if not 0 <= seed < 2**31:
      raise UserError(
        f"seeds={config.seeds} must lie between 0 and 2^31 - 1, for example "
        "(0,)"
      )
  _check_lora(config)
  _check_fakeln(config)
  _check_mesh(config)
  if not config.tapers:
    return
  if taper.end <= taper.start:
    raise UserError(
      f"taper.end={taper.end} is not after taper.start={taper.start}; the gate "
      "falls from start to end: lower taper.start or raise taper.end"
    )
  steps = config.taper_steps
  if steps.start < 1:
    raise UserError(
      f"taper.start={taper.start} of steps={config.steps} is step "
      f"{steps.start}; calibration needs at least one step before the taper: "
      f"raise taper.start or steps"
    )
  if steps.end <= steps.start:
    raise UserError(
      f"taper.end={taper.end} and taper.start={taper.start} of "
      f"steps={config.steps} are the same step {steps.start}; raise steps"
    )
  if config.uses_scale_loss:
    _check_positive("taper.scale_loss_weight", taper.scale_loss_weight)
  if model.final_norm == "taper" and model.tied and not config.fold.untie:
    raise UserError(
      f"fold.untie=False with variant={config.variant} and model.tied=True: "
      "the final norm folds into the head, which must then be untied from the "
      "embedding; set fold.untie=True"
    )


def _check_model(model: ModelConfig) -> None:
  """Rules of a shape alone, also of one that was saved."""
  if model.rope_theta < 1:  # the angles would grow without bound
    raise UserError(
      f"model.rope_theta={model.rope_theta} must be at least 1, for example "
      f"{_EXAMPLES['model.rope_theta']}"
    )
  _choice("model.mlp", model.mlp, ("swiglu", "gelu_tanh", "gelu"))
  _choice("model.positions", model.positions, ("rope", "learned"))
  for name in model.biases:
    _choice("model.biases", name, BIASES)
    if model.biases.count(name) > 1:
      raise UserError(
        f"model.biases={model.biases} repeats {name!r}; name each projection "
        "once"
      )
  if model.tied and "head" in model.biases:
    raise UserError(
      "model.biases names 'head' with model.tied=True; a tied head has no "
      "bias: remove it or set model.tied=False"
    )
  if model.mlp != "swiglu" and "gate" in model.biases:
    raise UserError(
      f"model.biases names 'gate' with model.mlp={model.mlp}, which has no "
      "gate projection; remove it"
    )
  if model.num_heads % model.num_kv_heads:
    raise UserError(
      f"model.num_kv_heads={model.num_kv_heads} does not divide "
      f"model.num_heads={model.num_heads}; use a divisor of it"
    )
  rope = model.positions == "rope"
  if model.rotary_dim < 0 or rope and (
    model.rotary_dim % 2 or not 0 < model.rotary_dim <= model.head_dim
  ):
    near = max(2, min(model.rotary_dim, model.head_dim) // 2 * 2)
    remedy = f"use {near}"
    if near > model.head_dim:
      remedy = "use a larger head or model.positions=learned"
    raise UserError(
      f"model.rotary_dim={model.rotary_dim} must be even and at most "
      f"model.head_dim={model.head_dim}; {remedy}"
    )


def _check_saved_model(model: ModelConfig) -> None:
  """Rules of what `parse` or a reader sets in a model."""
  _choice("model.norm", model.norm, ("rms", "layer"))
  modes = ("norm", "taper", "none", "fake")
  _choice("model.internal_norm", model.internal_norm, (*modes, "mixed"))
  _choice("model.final_norm", model.final_norm, modes)
  if (model.internal_norm == "fake") != (model.final_norm == "fake"):
    raise UserError(
      f"model.final_norm={model.final_norm!r} does not go with internal_norm="
      f"{model.internal_norm!r}; fetch the model again"
    )
  dtypes = ("float32", "bfloat16")
  _choice("model.compute_dtype", model.compute_dtype, dtypes)
  mixed = model.internal_norm == "mixed"
  if len(model.internal_modes) != (2 * model.num_layers if mixed else 0):
    raise UserError(
      f"model.internal_modes={model.internal_modes} does not name the norms of "
      f"{model.num_layers} layers with internal_norm={model.internal_norm}; "
      "fetch the model again"
    )
  for mode in model.internal_modes:
    _choice("model.internal_modes", mode, modes[:3])
  if (scaling := model.rope_scaling) is not None:
    _choice("model.rope_scaling.kind", scaling.kind, ("linear", "llama3"))
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    if scaling.factor < 1 or scaling.original_context < 1 or not 0 < low < high:
      raise UserError(
        f"model.rope_scaling={scaling} must have a factor and a context of 1 "
        "or more and 0 < low_freq_factor < high_freq_factor; fetch it again"
      )


def _check_lora(config: Config) -> None:
  lora, model = config.lora, config.model
  if lora.rank < 0:
    raise UserError(f"lora.rank={lora.rank} must be 0 (off) or more, such as 8")
  for name in lora.targets:
    _choice("lora.targets", name, LORA_TARGETS)
  if not lora.rank:
    return
  if config.init.checkpoint is None:
    raise UserError(
      f"lora.rank={lora.rank} needs trained weights to adapt; set "
      "init.checkpoint, or lora.rank=0"
    )
  if model.scan_layers:
    raise UserError(
      f"lora.rank={lora.rank} with model.scan_layers=True: adapters are by "
      "layer; set model.scan_layers=False"
    )
  if config.optimizer.weight_decay:
    raise UserError(
      f"optimizer.weight_decay={config.optimizer.weight_decay} with lora.rank="
      f"{lora.rank} decays nothing: the matrices are frozen and adapters and "
      "gains stay out of it; set it to 0"
    )
  _check_positive("lora.alpha", lora.alpha)
  if not lora.targets:
    raise UserError(
      f"lora.targets=() with lora.rank={lora.rank} adapts nothing; name some "
      f"of {', '.join(LORA_TARGETS)}"
    )
  for name in lora.targets:
    if name == "gate" and model.mlp != "swiglu":
      raise UserError(
        f"lora.targets names 'gate' with model.mlp={model.mlp}, which has no "
        "gate projection; remove it"
      )


def _check_fakeln(config: Config) -> None:
  cuts = config.fakeln
  for name, least in (
    ("start", 1),
    ("gap_mlp", 0),
    ("gap_qk", 0),
    ("gap_v", 0),
    ("eot_after", 0),
    ("position0_after", 0),
  ):
    if (value := getattr(cuts, name)) < least:
      raise UserError(
        f"fakeln.{name}={value} must be at least {least}; it counts steps, for "
        f"example {_EXAMPLES['fakeln.' + name]}"
      )
  if not 0 <= cuts.momentum < 1:
    raise UserError(
      f"fakeln.momentum={cuts.momentum} must be at least 0 and below 1; it is "
      f"the weight of the old mean, for example {_EXAMPLES['fakeln.momentum']}"
    )
  if not config.cuts:
    return
  if config.lora.rank:
    raise UserError(
      f"lora.rank={config.lora.rank} with variant=fakeln: the cuts need every "
      "weight to train; set lora.rank=0, or taper with adapters"
    )
  if config.context_len < 2:
    raise UserError(
      f"context_len={config.context_len} with variant=fakeln has no position "
      "but 0, so no norm has an average; use 2 or more"
    )
  end = config.cut_steps.position0
  if end >= config.steps:
    raise UserError(
      f"fakeln.start={cuts.start} with the gaps of {config.model.num_layers} "
      f"layers puts the last cut after step {end}, and steps={config.steps}: "
      f"it must come before the last step; set steps={end + 1} or more, or "
      "lower fakeln.start or the gaps"
    )


def _check_mesh(config: Config) -> None:
  """Whether the axes of the mesh split all evenly."""
  mesh, model = config.mesh, config.model
  rows = mesh.data * mesh.fsdp
  batch = config.batch_size // config.micro_batches
  for value, name, parts, axes in (
    (len(config.seeds), "the number of seeds", mesh.seed, "mesh.seed"),
    (batch, "batch_size / micro_batches", rows, "mesh.data * mesh.fsdp"),
    (config.eval.batch_size, "eval.batch_size", rows, "mesh.data * mesh.fsdp"),
    (model.num_heads, "model.num_heads", mesh.tensor, "mesh.tensor"),
    (model.num_kv_heads, "model.num_kv_heads", mesh.tensor, "mesh.tensor"),
    (model.mlp_dim, "model.mlp_dim", mesh.tensor, "mesh.tensor"),
    (
      model.embed_dim,
      "model.embed_dim",
      mesh.fsdp * mesh.tensor,
      "mesh.fsdp * mesh.tensor",
    ),
  ):
    if value % parts:
      raise UserError(
        f"{axes}={parts} does not divide {name}={value}, which it splits; use "
        f"a divisor of {value}, or a multiple of {parts} there"
      )


def _check_data(data: DataConfig) -> None:
  if data.vocab_size is not None and data.vocab_size < MIN_VOCAB:
    raise UserError(
      f"data.vocab_size={data.vocab_size} must be {MIN_VOCAB} or more, since "
      f"256 pieces are the bytes; for example {_EXAMPLES['data.vocab_size']}"
    )
  parts = {"data.train": data.train, "data.valid": data.valid}
  corpus = [name for name, source in parts.items() if source == "corpus"]
  if corpus and data.corpus_stories is None:
    raise UserError(
      f"data.corpus_stories=None is not enough for {corpus[0]}=corpus; give a "
      f"number, for example {_EXAMPLES['data.corpus_stories']}"
    )
  if not corpus and data.corpus_stories is not None:
    raise UserError(
      f"data.corpus_stories={data.corpus_stories} has no effect with "
      f"data.train={data.train} and data.valid={data.valid}, of which none is "
      "corpus; leave it None"
    )
