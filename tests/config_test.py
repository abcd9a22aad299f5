"""The one parse: every message, what follows what, and the way to JSON."""

import dataclasses
import json
import subprocess
import sys
import types
import typing

import pytest
from absl import flags
from ml_collections import config_dict, config_flags

import configs.chase
import configs.tinystories
from taperjax import config as config_lib
from taperjax.errors import UserError
from tests import tiny

get_config = configs.tinystories.get_config


def parse(**changes):
  return config_lib.parse(tiny.fields(**changes))


def without(name):
  """The tiny fields without one of them."""
  fields = tiny.fields()
  group = fields
  *parents, last = name.split(".")
  for parent in parents:
    group = group[parent]
  del group[last]
  return fields


# Change, and the whole message: field, value, rule, remedy.
MESSAGES = [
  # Names.
  ({"step": 5}, "step is not a config field; did you mean steps?"),
  (
    {"model__embed_dims": 5},
    "model.embed_dims is not a config field; did you mean model.embed_dim?",
  ),
  (
    {"taper__xyz": 5},
    "taper.xyz is not a config field; the fields are calibrate, ema_rate, end, "
    "scale_loss_schedule, scale_loss_weight, shape, sites, start, train_gain",
  ),
  (
    # The nearest name that may be given, not model.norm, which may not.
    {"model__norms_eps": 1},
    "model.norms_eps is not a config field; did you mean model.norm_eps?",
  ),
  (
    {"model__vocab_size": 5},
    "model.vocab_size=5 is set by 'vocab_size' outside `model`; remove it "
    "here",
  ),
  (
    {"model__norm": "rms"},
    "model.norm='rms' is set by 'norm' outside `model`; remove it here",
  ),
  (
    {"model": 3},
    "model=3 is not a group of fields; set the fields in it one by one, as "
    "configs/tinystories.py does",
  ),
  (
    {"taper": None},
    "taper=None is not a group of fields; set the fields in it one by one, as"
    " configs/tinystories.py does",
  ),
  (
    {"data": "corpus"},
    "data='corpus' is not a group of fields; set the fields in it one by one,"
    " as configs/tinystories.py does",
  ),
  # Types.
  (
    {"steps": "many"},
    "steps='many' is of type str; it must be a whole number, for example 1000",
  ),
  (
    {"steps": 10.5},
    "steps=10.5 is of type float; it must be a whole number, for example 1000",
  ),
  (
    {"steps": float("inf")},
    "steps=inf is of type float; it must be a whole number, for example 1000",
  ),
  (
    {"steps": float("nan")},
    "steps=nan is of type float; it must be a whole number, for example 1000",
  ),
  (
    {"steps": True},
    "steps=True is of type bool; it must be a whole number, for example 1000",
  ),
  (
    {"steps": None},
    "steps=None is of type NoneType; it must be a whole number, for example "
    "1000",
  ),
  (
    # The derived rate needs both first: still the user's field by its name.
    {"steps": "many", "taper__ema_rate": None},
    "steps='many' is of type str; it must be a whole number, for example 1000",
  ),
  (
    {"taper__start": "5%", "taper__ema_rate": None},
    "taper.start='5%' is of type str; it must be a number, for example 0.05",
  ),
  (
    {"data__vocab_size": "10k"},
    "data.vocab_size='10k' is of type str; it must be a whole number, for "
    "example 10000",
  ),
  (
    {"model__tied": "no"},
    "model.tied='no' is of type str; it must be True or False, for example "
    "True",
  ),
  (
    {"model__num_heads": "two"},
    "model.num_heads='two' is of type str; it must be a whole number, for "
    "example 4",
  ),
  (
    {"model__embed_dim": None},
    "model.embed_dim=None is of type NoneType; it must be a whole number, for"
    " example 64",
  ),
  ({"size": 1}, "size=1 is of type int; it must be text, for example '1'"),
  ({"seeds": 0}, "seeds=0 is not a list of whole numbers; write (0,)"),
  (
    {"seeds": ("a",)},
    "seeds='a' is of type str; it must be a whole number, for example 4",
  ),
  (
    {"model__biases": "q"},
    "model.biases='q' is not a list of texts; write ('q',)",
  ),
  (
    {"optimizer__learning_rate": float("nan")},
    "optimizer.learning_rate=nan is not finite; give a number, for example "
    "0.0003",
  ),
  (
    {"optimizer__clip_norm": float("inf")},
    "optimizer.clip_norm=inf is not finite; give a number, for example 1.0",
  ),
  (
    # Neither a float nor a string of digits can be made of it.
    {"steps": 10**5000},
    "steps is a number of 16610 bits; it must be below 2^63, for example 1000",
  ),
  (
    {"steps": 1e300},
    "steps is a number of 997 bits; it must be below 2^63, for example 1000",
  ),
  (
    {"optimizer__learning_rate": 10**400},
    "optimizer.learning_rate is a number of 1329 bits; it must be below 2^63, "
    "for example 0.0003",
  ),
  (
    {"data__tokenizer": 3},
    "data.tokenizer=3 is of type int; it must be text, for example '3'",
  ),
  # Choices.
  (
    {"variant": "internal_taper"},
    "variant='internal_taper' is not one of baseline, internal, "
    "internal_aux, final, all, all_aux, vanilla, fakeln",
  ),
  ({"norm": "batch"}, "norm='batch' is not one of rms, layer"),
  (
    {"compute_dtype": "float16"},
    "compute_dtype='float16' is not one of float32, bfloat16",
  ),
  (
    {"model__mlp": "relu"},
    "model.mlp='relu' is not one of swiglu, gelu_tanh, gelu",
  ),
  (
    {"model__positions": "alibi"},
    "model.positions='alibi' is not one of rope, learned",
  ),
  (
    {"model__biases": ("query",)},
    "model.biases='query' is not one of q, k, v, o, gate, up, down, head",
  ),
  # The shape of the model.
  (
    {"model__embed_dim": 70, "model__num_heads": 16},
    "model.embed_dim=70 is not divisible by model.num_heads=16; use a "
    "multiple of 16, for example 64 or 80",
  ),
  (
    {"model__embed_dim": 5, "model__num_heads": 8},
    "model.embed_dim=5 is not divisible by model.num_heads=8; use a "
    "multiple of 8, for example 8",
  ),
  ({"model__num_heads": 0}, "model.num_heads=0 must be above 0, for example 4"),
  (
    {"model__num_heads": -2},
    "model.num_heads=-2 must be above 0, for example 4",
  ),
  (
    {"model__embed_dim": 0},
    "model.embed_dim=0 must be above 0, for example 64",
  ),
  (
    {"model__num_heads": 4, "model__num_kv_heads": 3},
    "model.num_kv_heads=3 does not divide model.num_heads=4; use a divisor "
    "of it",
  ),
  (
    {"model__num_kv_heads": 0},
    "model.num_kv_heads=0 must be above 0, for example 4",
  ),
  (
    {"model__rotary_dim": 3},
    "model.rotary_dim=3 must be even and at most model.head_dim=4; use 2",
  ),
  (
    {"model__rotary_dim": 6},
    "model.rotary_dim=6 must be even and at most model.head_dim=4; use 4",
  ),
  (
    {"model__embed_dim": 6},
    "model.rotary_dim=3 must be even and at most model.head_dim=3; use 2",
  ),
  (
    {"model__embed_dim": 2},
    "model.rotary_dim=1 must be even and at most model.head_dim=1; use a "
    "larger head or model.positions=learned",
  ),
  (
    {"model__biases": ("q", "k", "q")},
    "model.biases=('q', 'k', 'q') repeats 'q'; name each projection once",
  ),
  (
    {"model__biases": ("head",)},
    "model.biases names 'head' with model.tied=True; a tied head has no "
    "bias: remove it or set model.tied=False",
  ),
  (
    {"model__biases": ("gate",), "model__mlp": "gelu"},
    "model.biases names 'gate' with model.mlp=gelu, which has no gate "
    "projection; remove it",
  ),
  # Ranges.
  ({"steps": 0}, "steps=0 must be above 0, for example 1000"),
  ({"batch_size": 0}, "batch_size=0 must be above 0, for example 16"),
  ({"micro_batches": 0}, "micro_batches=0 must be above 0, for example 1"),
  ({"context_len": -1}, "context_len=-1 must be above 0, for example 512"),
  ({"log_every": 0}, "log_every=0 must be above 0, for example 10"),
  (
    {"model__num_layers": 0},
    "model.num_layers=0 must be above 0, for example 8",
  ),
  ({"model__head_dim": 0}, "model.head_dim=0 must be above 0, for example 16"),
  ({"model__mlp_dim": 0}, "model.mlp_dim=0 must be above 0, for example 176"),
  (
    {"model__norm_eps": 0},
    "model.norm_eps=0.0 must be above 0, for example 1e-06",
  ),
  (
    {"model__rope_theta": 0},
    "model.rope_theta=0.0 must be above 0, for example 10000.0",
  ),
  (
    {"model__init_std": 0},
    "model.init_std=0.0 must be above 0, for example 0.02",
  ),
  (
    {"optimizer__learning_rate": 0},
    "optimizer.learning_rate=0.0 must be above 0, for example 0.0003",
  ),
  (
    {"optimizer__clip_norm": 0},
    "optimizer.clip_norm=0.0 must be above 0, for example 1.0",
  ),
  (
    {"optimizer__eps": 0},
    "optimizer.eps=0.0 must be above 0, for example 1e-08",
  ),
  ({"eval__every": 0}, "eval.every=0 must be above 0, for example 1000"),
  (
    {"eval__batch_size": 0},
    "eval.batch_size=0 must be above 0, for example 16",
  ),
  (
    {"eval__sample_tokens": 0},
    "eval.sample_tokens=0 must be above 0, for example 100",
  ),
  (
    {"eval__max_windows": 0},
    "eval.max_windows=0 must be above 0, for example 128",
  ),
  (
    {"checkpoint__every": 0},
    "checkpoint.every=0 must be above 0, for example 1000",
  ),
  (
    {"data__corpus_stories": 0},
    "data.corpus_stories=0 must be above 0, for example 6000",
  ),
  (
    {"optimizer__weight_decay": -1},
    "optimizer.weight_decay=-1.0 must not be below 0; use for example 0.0",
  ),
  (
    {"optimizer__final_learning_rate": -1},
    "optimizer.final_learning_rate=-1.0 must not be below 0; use for example "
    "0.0",
  ),
  (
    {"optimizer__final_learning_rate": 0.5},
    "optimizer.final_learning_rate=0.5 is above optimizer.learning_rate=0.01;"
    " the rate only falls: use at most 0.01",
  ),
  (
    {"optimizer__b1": 1},
    "optimizer.b1=1.0 must be at least 0 and below 1, for example 0.9",
  ),
  (
    {"optimizer__b2": -0.1},
    "optimizer.b2=-0.1 must be at least 0 and below 1, for example 0.95",
  ),
  (
    {"optimizer__warmup": 5},
    "optimizer.warmup=5.0 must be between 0 and 1; it is a share of the "
    "steps, for example 0.05",
  ),
  (
    {"data__vocab_size": 7},
    "data.vocab_size=7 must be 300 or more, since 256 pieces are the bytes; "
    "for example 10000",
  ),
  (
    {"data__corpus_stories": None},
    "data.corpus_stories=None is not enough for data.train=corpus; give a "
    "number, for example 6000",
  ),
  (
    {"data__corpus_stories": None, "data__train": "a.txt"},
    "data.corpus_stories=None is not enough for data.valid=corpus; give a "
    "number, for example 6000",
  ),
  (
    {"data__train": "a.txt", "data__valid": "b.txt"},
    "data.corpus_stories=20 has no effect with data.train=a.txt and "
    "data.valid=b.txt, of which none is corpus; leave it None",
  ),
  (
    {"data__vocab_size": 299},
    "data.vocab_size=299 must be 300 or more, since 256 pieces are the bytes; "
    "for example 10000",
  ),
  (
    {"data__vocab_size": None},
    "data.vocab_size=None is not enough for data.tokenizer=sentencepiece; "
    "give a number, for example 10000",
  ),
  (
    {"data__tokenizer": "bytes"},
    "data.vocab_size=300 has no effect with data.tokenizer=bytes, which "
    "brings its own vocabulary; leave it None",
  ),
  (
    {"batch_size": 6, "micro_batches": 4},
    "batch_size=6 is not divisible by micro_batches=4; use a divisor of the "
    "batch size",
  ),
  (
    {"seeds": ()},
    "seeds=() is empty; give at least one, for example (0,)",
  ),
  (
    {"seeds": (1, 1)},
    "seeds=(1, 1) repeats a seed; name each one once",
  ),
  (
    {"seeds": (-1,)},
    "seeds=(-1,) must lie between 0 and 2^31 - 1, for example (0,)",
  ),
  (
    {"seeds": (2**31,)},
    "seeds=(2147483648,) must lie between 0 and 2^31 - 1, for example (0,)",
  ),
  # The taper: ranges hold in a baseline, too, which may become another.
  (
    {"variant": "baseline", "taper__end": 1.5},
    "taper.end=1.5 must be between 0 and 1; it is a share of the steps, for "
    "example 1.0",
  ),
  (
    {"variant": "baseline", "taper__scale_loss_weight": -1},
    "taper.scale_loss_weight=-1.0 must not be below 0; use for example 0.1",
  ),
  (
    {"taper__start": -0.1},
    "taper.start=-0.1 must be between 0 and 1; it is a share of the steps, "
    "for example 0.05",
  ),
  (
    {"taper__end": 1.5},
    "taper.end=1.5 must be between 0 and 1; it is a share of the steps, for "
    "example 1.0",
  ),
  (
    {"taper__ema_rate": 2},
    "taper.ema_rate=2.0 must be above 0 and at most 1; it is the weight of "
    "the new sample, for example 0.1",
  ),
  (
    {"taper__ema_rate": 0},
    "taper.ema_rate=0.0 must be above 0 and at most 1; it is the weight of "
    "the new sample, for example 0.1",
  ),
  (
    {"taper__start": 0.8, "taper__end": 0.4},
    "taper.end=0.4 is not after taper.start=0.8; the gate falls from start to"
    " end: lower taper.start or raise taper.end",
  ),
  (
    {"taper__start": 0.0},
    "taper.start=0.0 of steps=10 is step 0; calibration needs at least one "
    "step before the taper: raise taper.start or steps",
  ),
  (
    {"taper__start": 0.41, "taper__end": 0.42},
    "taper.end=0.42 and taper.start=0.41 of steps=10 are the same step 4; "
    "raise steps",
  ),
  (
    {"taper__scale_loss_weight": 0},
    "taper.scale_loss_weight=0.0 must be above 0, for example 0.1",
  ),
  (
    {"fold__untie": False},
    "fold.untie=False with variant=all_aux and model.tied=True: the final "
    "norm folds into the head, which must then be untied from the embedding; "
    "set fold.untie=True",
  ),
]


@pytest.mark.parametrize(
  "changes, message", MESSAGES, ids=[m.split(" ")[0] for _, m in MESSAGES]
)
def test_each_mistake_gets_its_one_line(changes, message):
  """Word for word: a message that is wrong, or crashes, is a bug."""
  with pytest.raises(UserError) as error:
    parse(**changes)
  assert str(error.value) == message
  assert "\n" not in message


def settable(kind=config_lib.Config, prefix=""):
  """(name, type) of every field that a config file gives."""
  for name, inner in typing.get_type_hints(kind).items():
    if kind is config_lib.ModelConfig and name in config_lib._SET_BY_PARSE:
      continue
    if dataclasses.is_dataclass(inner):
      yield from settable(inner, f"{name}.")
    else:
      yield prefix + name, inner


# Texts that may be anything: names, paths, which are looked up later, a prompt.
FREE = {
  "size", "data.train", "data.valid", "data.tokenizer", "data.folder",
  "eval.prompt", "init.checkpoint",
}
# What no field of this kind may be: below and beyond its range.
OUTSIDE = {
  int: (-1, 2**31, 10**30),
  float: (-1.0, 1e-40, 1e39, 1e300),
  bool: ("yes", 1),
  str: ("no such",),
}


@pytest.mark.parametrize("name, kind", list(settable()))
def test_every_field_has_a_range(name, kind):
  """A field without a rule would take a value that breaks a run later."""
  if name in FREE:
    return
  many = typing.get_origin(kind) is tuple
  one = next((k for k in typing.get_args(kind) if k is not types.NoneType),
             kind)
  if typing.get_origin(one) is tuple:  # or None
    many, one = True, typing.get_args(one)[0]
  for value in OUTSIDE[one]:
    change = {name.replace(".", "__"): (value,) if many else value}
    with pytest.raises(UserError) as error:
      parse(**change)
    assert name in str(error.value), value
  if not many:  # the names of a group agree with what the walk found
    with pytest.raises(UserError, match=rf"^{name} is missing"):
      config_lib.parse(without(name))


def test_the_walk_over_the_fields_sees_them():
  names = {name for name, _ in settable()}
  assert len(names) > 70 and names >= FREE
  assert {"steps", "model.norm_eps", "fakeln.gap_v", "mesh.tensor"} <= names


@pytest.mark.parametrize(
  "name, value, rule",
  [
    ("model__rope_theta", 0.5, "must be at least 1, for example 10000.0"),
    ("optimizer__eps", 1e-30, "must be at least 1e-16, for example 1e-08"),
    ("optimizer__learning_rate", 3, "must be at most 1, for example 0.0003"),
    ("optimizer__b2", 1 - 1e-9, "must be at most 0.99999, for example 0.95"),
    ("taper__ema_rate", 1e-9, "must be at least 1e-06, for example 0.1"),
    ("model__norm_eps", 1e-300, "is 0 in float32; use for example 1e-06"),
    ("optimizer__clip_norm", 1e39, "is too large for float32; use for example"),
    ("data__vocab_size", 2**31, "must be below 2^31, for example 10000"),
  ],
)
def test_numbers_that_float32_would_lose_are_refused(name, value, rule):
  """They would be 0, infinite, or 0 / 0 somewhere in the first step."""
  with pytest.raises(UserError) as error:
    parse(**{name: value})
  text = f"{name.replace('__', '.')}={value if value > 2**30 else float(value)}"
  assert str(error.value).startswith(f"{text} {rule}")


@pytest.mark.parametrize(
  "changes, message",
  [
    ({"num_heads": 0}, "model.num_heads=0 must be above 0"),
    ({"mlp": "x"}, "model.mlp='x' is not one of"),
    ({"norm": "batch"}, "model.norm='batch' is not one of"),
    ({"internal_norm": "../x"}, "model.internal_norm='../x' is not one of"),
    ({"compute_dtype": "object"}, "model.compute_dtype='object' is not one of"),
    ({"vocab_size": 0}, "model.vocab_size=0 must be above 0"),
    ({"context_len": 2**40}, "context_len=1099511627776 must be below 2\\^31"),
    ({"internal_norm": "mixed"}, r"model.internal_modes=\(\) does not name"),
    (
      {"rope_scaling": {"kind": "linear", "factor": 0.0}},
      "must have a factor and a context of 1 or more",
    ),
  ],
)
def test_a_saved_model_is_checked_like_any_other(changes, message):
  """It may come from anywhere; shapes and choices must hold before its use."""
  fields = config_lib.to_dict(tiny.model_config())
  with pytest.raises(UserError, match=message):
    config_lib.model_from_dict({**fields, **changes})


@pytest.mark.parametrize(
  "name", ["steps", "model", "model.num_heads", "taper.start", "taper.ema_rate",
           "data.tokenizer", "data.vocab_size", "optimizer.b1", "fold.untie"]
)
def test_a_missing_field_is_named(name):
  """There is no second default, also not for fields that others need."""
  with pytest.raises(
    UserError, match=rf"^{name} is missing; add it to the config file$"
  ):
    config_lib.parse(without(name))


def test_stories_are_for_the_embedded_corpus_alone():
  """One of the two texts is enough to need them."""
  files = {"data__train": "a.txt", "data__valid": "b.txt"}
  assert parse(**files, data__corpus_stories=None).data.corpus_stories is None
  assert parse(data__train="a.txt").data.corpus_stories == 20


def test_a_baseline_does_not_care_about_the_taper():
  """All other settings are identical between the variants of one size."""
  config = tiny.config(
    variant="baseline", taper__start=0.0, fold__untie=False
  )
  assert config.taper_steps is None and not config.uses_scale_loss
  tiny.config(variant="internal", taper__scale_loss_weight=0)
  tiny.config(variant="internal", fold__untie=False)  # the head stays
  tiny.config(fold__untie=False, model__tied=False)


def test_fields_left_none_follow_the_others():
  """Heads, widths and the vocabulary are derived, never defaulted."""
  model = tiny.config(
    model__embed_dim=64, model__num_heads=16, model__mlp_dim=None
  ).model
  assert (model.num_kv_heads, model.head_dim, model.rotary_dim) == (16, 4, 4)
  assert model.mlp_dim == 176
  assert tiny.config(model__head_dim=6).model.rotary_dim == 6
  assert parse().model.vocab_size == 300
  free = parse(data__tokenizer="bytes", data__vocab_size=None)
  assert free.model.vocab_size == 257
  path = parse(data__tokenizer="a/tokenizer.json", data__vocab_size=None)
  assert path.model.vocab_size == 0
  assert path.with_vocab(500).model.vocab_size == 500


@pytest.mark.parametrize(
  "width, expected", [(64, 176), (128, 344), (256, 688), (512, 1368)]
)
def test_swiglu_width_is_eight_thirds_rounded_up_to_eight(width, expected):
  """The parameter counts of the paper rest on it."""
  assert config_lib.mlp_dim(width) == expected


@pytest.mark.parametrize(
  "steps, start, end, warmup, rate",
  [
    (1_000, 50, 1_000, 50, 0.1),
    (5_980, 299, 5_980, 299, 0.1),
    (6_000, 300, 6_000, 300, 0.01),
    (1_000_000, 50_000, 1_000_000, 50_000, 0.01),
  ],
)
def test_what_is_derived_follows_the_steps(steps, start, end, warmup, rate):
  """--config.steps alone must move taper, warm-up and the average's rate."""
  fields = get_config("1m,all")
  fields.steps = steps
  config = config_lib.parse(fields)
  assert config.taper_steps == config_lib.TaperSteps(start, end)
  assert config.warmup_steps == warmup
  assert config.taper.ema_rate == rate


def test_whole_floats_are_integers_and_integers_are_floats():
  """10.0 steps and a rate of 1 are what they say; types come out exact."""
  config = tiny.config(
    steps=20.0, optimizer__learning_rate=1, model__num_heads=2.0,
    seeds=[3.0], model__biases=["q"],
  )
  assert config.steps == 20 and type(config.steps) is int
  assert type(config.optimizer.learning_rate) is float
  assert type(config.model.head_dim) is int and config.model.head_dim == 4
  assert config.seeds == (3,) and config.model.biases == ("q",)


@pytest.mark.parametrize("norm", ["rms", "layer"])
@pytest.mark.parametrize("variant", config_lib.VARIANTS)
def test_a_config_survives_json_exactly(variant, norm):
  """A checkpoint holds it; a resumed run compares it with its own."""
  config = tiny.config(
    variant=variant, norm=norm, optimizer__learning_rate=0.1 + 0.2,
    model__biases=("q", "up"), eval__max_windows=None,
  )
  text = json.dumps(config_lib.to_dict(config), allow_nan=False)
  assert config_lib.config_from_dict(json.loads(text)) == config
  text = json.dumps(config_lib.to_dict(config.model))
  assert config_lib.model_from_dict(json.loads(text)) == config.model


def test_a_saved_model_with_a_foreign_field_is_refused():
  """A newer format must not be read halfway."""
  fields = config_lib.to_dict(tiny.model_config())
  with pytest.raises(UserError, match=r"model\.window is not a config field"):
    config_lib.model_from_dict({**fields, "window": 5})


def test_configs_can_be_compared_and_cached():
  """jit takes them as static arguments."""
  assert hash(tiny.config()) == hash(tiny.config())
  assert tiny.config() == tiny.config() != tiny.config(steps=20)


@pytest.mark.parametrize("size", configs.tinystories.WIDTHS)
def test_the_tinystories_file_parses_for_every_variant_and_norm(size):
  """Table 1 and 5; what is not the variant is the same in all of them."""
  for norm in ("rms", "layer"):
    seen = []
    for variant, (internal, final, aux) in config_lib.VARIANTS.items():
      fields = get_config(f"{size},{variant}")
      fields.norm = norm
      config = config_lib.parse(fields)
      plain = "fake" if variant == "fakeln" else "norm"
      name = {True: "taper", False: plain}
      assert config.model.internal_norm == name[internal]
      assert config.model.final_norm == name[final]
      assert config.model.norm == norm
      assert config.uses_scale_loss == aux
      assert config.tapers == (internal or final)
      rest = config_lib.to_dict(config)
      for group, field in (
        (rest, "variant"), (rest["model"], "internal_norm"),
        (rest["model"], "final_norm"),
      ):
        del group[field]
      seen.append(rest)
    assert seen == [seen[0]] * 8


def test_the_tinystories_file_names_the_sizes():
  """And the authors' default is the variant that one gets."""
  assert get_config("3m").variant == "internal_aux"
  with pytest.raises(ValueError, match="size '2m'; use one of 1m, 3m, 9m, 30m"):
    get_config("2m,all")


def test_the_chase_file_parses_and_varies_the_variant_alone():
  """Its table compares logit norms: nothing else may differ."""
  seen = []
  for variant in config_lib.VARIANTS:
    config = config_lib.parse(configs.chase.get_config(variant))
    assert config.variant == variant
    rest = config_lib.to_dict(config)
    for group, field in (
      (rest, "variant"), (rest["model"], "internal_norm"),
      (rest["model"], "final_norm"),
    ):
      del group[field]
    seen.append(rest)
  assert seen == [seen[0]] * len(config_lib.VARIANTS)
  default = config_lib.parse(configs.chase.get_config())
  assert default.variant == "final" and default.data.train == "alphabet"
  assert default.optimizer.final_learning_rate > 0  # else the chase ends
  steps = default.taper_steps
  assert default.warmup_steps <= steps.start < steps.end < default.steps


def override(monkeypatch, *arguments):
  """The config as train.py sees it after these command-line flags."""
  monkeypatch.chdir(configs.tinystories.__file__.rsplit("/configs/", 1)[0])
  # The flags of the fields are made from what the command line mentions.
  monkeypatch.setattr(sys, "argv", ["train.py", *arguments])
  values = flags.FlagValues()
  holder = config_flags.DEFINE_config_file(
    "config", "configs/tinystories.py:1m,all", flag_values=values
  )
  values(sys.argv)
  return config_lib.parse(holder.value)


# ml_collections loads config files through a deprecated call.
@pytest.mark.filterwarnings("ignore:the load_module:DeprecationWarning")
def test_command_line_overrides_keep_their_types(monkeypatch):
  """Placeholders take numbers, tuples stay tuples, whole floats are steps."""
  config = override(
    monkeypatch,
    "--config.steps=2000",
    "--config.seeds=(7,)",
    "--config.optimizer.learning_rate=1",
    "--config.model.num_kv_heads=4",
    "--config.model.biases=('q', 'k')",
    "--config.taper.ema_rate=0.5",
    "--config.data.train=here.txt",
    "--config.eval.max_windows=12",
    "--config.norm=layer",
    "--config.model.tied=false",
  )
  assert config.steps == 2_000 and config.taper_steps.start == 100
  assert config.seeds == (7,) and config.optimizer.learning_rate == 1.0
  assert config.model.num_kv_heads == 4
  assert config.model.biases == ("q", "k")
  assert config.taper.ema_rate == 0.5
  assert config.data.train == "here.txt"
  assert config.eval.max_windows == 12
  assert config.model.norm == "layer" and config.model.tied is False


def test_a_locked_config_dict_is_read_like_a_dict():
  """parse does not write into what it is given."""
  fields = config_dict.ConfigDict(tiny.fields()).lock()
  before = fields.to_json()
  assert config_lib.parse(fields) == parse()
  assert fields.to_json() == before


def test_a_wrong_config_is_found_before_jax_makes_an_array():
  """The one line comes at once; jax needs a second only to be loaded."""
  code = (
    "import configs.tinystories as t, taperjax.config as c, jax._src.xla_bridge"
    " as b\n"
    "f = t.get_config('1m,all'); f.model.num_heads = 7\n"
    "try: c.parse(f)\n"
    "except ValueError as e: print(e, bool(b._backends))\n"
  )
  out = subprocess.run(
    [sys.executable, "-c", code], capture_output=True, text=True, check=True
  ).stdout
  assert out.startswith("model.embed_dim=64 is not divisible by")
  assert out.endswith(" False\n")
