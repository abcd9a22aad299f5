"""The Python interface on tiny models: same numbers, clear refusals."""

from __future__ import annotations

import copy

import flax.linen as nn
import jax
import numpy as np
import pytest

import taperjax
from taperjax import api, decode, model as model_lib, norms
from taperjax.data import tokenizer
from taperjax.errors import UserError
from tests import runs, tiny


def make(tapered=True, **changes) -> taperjax.Model:
  """Random gains and biases, no factors yet, gate 1."""
  if not tapered:
    changes |= {"internal_norm": "norm", "final_norm": "norm"}
  config = tiny.model_config(**changes)
  sites = 2 * config.num_layers + 1
  return taperjax.Model(
    tiny.params(config), config, np.zeros(sites, np.float32), gate=1.0
  )


def batches():
  """Two batches, the second with other padding."""
  return [
    (np.asarray(tiny.tokens(seed=seed)), np.asarray(tiny.mask()) * (seed > 1))
    for seed in (2, 3)
  ]


def bytes_model() -> taperjax.Model:
  """A model that text can go through."""
  return make(vocab_size=257).replace(tokenizer=tokenizer.ByteTokenizer())


@pytest.fixture(scope="module")
def calibrated():
  return taperjax.calibrate(make(), batches())


def test_package_gives_every_documented_name():
  """`taperjax.fold` is the function, whatever modules were imported."""
  for name in taperjax.__all__:
    assert getattr(taperjax, name) is getattr(api, name)
    assert getattr(taperjax, name).__doc__
    assert name in dir(taperjax)
  assert set(taperjax.__all__) == set(api.__all__)
  with pytest.raises(AttributeError, match="no attribute 'trane'"):
    taperjax.trane  # noqa: B018


@pytest.mark.parametrize("norm", ["rms", "layer"])
def test_calibrate_takes_exact_means_over_all_tokens(norm):
  """Eq. 4 and 7 written out in numpy, on the streams that the norms read."""
  model = make(norm=norm)
  num, den, scales, weights = [], [], [], []
  for tokens_BL, mask_BL in batches():
    streams = []

    def keep(call, args, kwargs, context, streams=streams):
      if isinstance(context.module, norms.Norm):
        name = "/".join(context.module.path)
        streams.append((name, np.asarray(args[0], np.float64)))
      return call(*args, **kwargs)

    with nn.intercept_methods(keep):
      model_lib.Transformer(model.config).apply(
        {"params": model.params}, tokens_BL, gate=1.0
      )
    assert len(streams) == tiny.S
    rows = []
    for name, h_BLD in streams:
      node = model.params
      for part in name.split("/"):
        node = node[part]
      if norm == "layer":
        h_BLD = h_BLD - h_BLD.mean(-1, keepdims=True)
      r_BL = np.sqrt((h_BLD**2).mean(-1) + model.config.norm_eps)
      square_BL = ((h_BLD * np.asarray(node["scale"])) ** 2).sum(-1)
      rows.append(((mask_BL * square_BL / r_BL).sum(),
                   (mask_BL * square_BL).sum()))
    num.append([row[0] for row in rows])
    den.append([row[1] for row in rows])
    scales.append((mask_BL * r_BL).sum())  # the last stream is s(h)'s
    weights.append(mask_BL.sum())
  found = taperjax.calibrate(model, batches())
  # float32 sums of 21 tokens each.
  np.testing.assert_allclose(
    found.c, np.sum(num, 0) / np.sum(den, 0), rtol=1e-5
  )
  np.testing.assert_allclose(
    found.meta["scale_target"], sum(scales) / sum(weights), rtol=1e-5
  )
  assert found.gate == 0.0
  assert found.calibrated
  site = found.params["block_1"]["mlp_norm"]
  np.testing.assert_array_equal(site["taper_scale"], site["scale"])


def test_init_calibrate_and_fold_is_one_function(calibrated):
  """The README's path for somebody's own parameters."""
  model = taperjax.init(tiny.model_config(), seed=3)
  assert model.gate == 1.0
  assert not model.calibrated
  model = taperjax.calibrate(model, batches())
  folded = taperjax.fold(model)
  for one, other in ((model, folded), (calibrated, taperjax.fold(calibrated))):
    want = np.asarray(taperjax.apply(one, tiny.tokens()))
    got = np.asarray(taperjax.apply(other, tiny.tokens()))
    bound = 1e-5 * max(1.0, np.abs(want).max())
    assert np.abs(got - want).max() <= bound
    assert np.abs(want).max() > 1e-3  # not a comparison of zeros
  assert not folded.tapered
  assert "final_norm" not in folded.params


def test_apply_uses_the_own_gate_unless_told(calibrated):
  """Gate 1 is the normalized model, bit for bit."""
  plain = calibrated.replace(
    config=calibrated.config.replace(internal_norm="norm", final_norm="norm")
  )
  tokens = tiny.tokens()
  one = np.asarray(taperjax.apply(calibrated, tokens, gate=1.0))
  np.testing.assert_array_equal(one, taperjax.apply(plain, tokens))
  zero = np.asarray(taperjax.apply(calibrated, tokens))
  np.testing.assert_array_equal(zero, taperjax.apply(calibrated, tokens, 0.0))
  half = np.asarray(taperjax.apply(calibrated, tokens, 0.5))
  again = taperjax.apply(calibrated.replace(gate=0.5), tokens)
  np.testing.assert_array_equal(half, again)
  assert np.abs(half - one).max() > 1e-3
  assert np.abs(half - zero).max() > 1e-3


def test_no_function_changes_its_arguments(calibrated):
  """A Model may be used again after every call."""
  model = make()
  before = copy.deepcopy(jax.device_get(model.params))
  given = batches()
  taperjax.calibrate(model, given)
  taperjax.apply(model, given[0][0])
  taperjax.fold(calibrated)
  taperjax.evaluate(model, np.arange(30) % tiny.V, batch_size=2)
  jax.tree.map(np.testing.assert_array_equal, before, dict(model.params))
  assert not model.calibrated
  assert model.gate == 1.0
  assert model.meta == {}
  assert "final_norm" in calibrated.params


def test_evaluate_is_the_mean_loss_of_apply(calibrated):
  """Every token but the first once, whatever the windows are."""
  tokens = np.random.default_rng(0).integers(0, tiny.V, 2 * tiny.M + 5)
  found = taperjax.evaluate(calibrated, tokens, batch_size=2)
  losses, norms_ = [], []
  for start in range(0, len(tokens) - 1, tiny.M):
    window = tokens[start : start + tiny.M + 1]
    logits = np.asarray(
      taperjax.apply(calibrated, window[None, :-1]), np.float64
    )[0]
    shifted = logits - logits.max(-1, keepdims=True)
    log_p = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    losses += list(-log_p[np.arange(len(log_p)), window[1:]])
    norms_ += list(np.linalg.norm(logits, axis=-1))
  assert found["tokens"] == len(losses) == len(tokens) - 1
  assert found["loss"] == pytest.approx(np.mean(losses), rel=1e-5)
  assert found["logit_norm"] == pytest.approx(np.mean(norms_), rel=1e-5)
  assert found["bits_per_byte"] is None
  first = taperjax.evaluate(calibrated, tokens, batch_size=2, max_windows=1)
  assert first["loss"] == pytest.approx(np.mean(losses[: tiny.M]), rel=1e-5)


def test_generate_is_greedy_apply_and_streams_the_same():
  """Texts in, continuations out; a stream gives the very same ids."""
  model = bytes_model()
  [text] = taperjax.generate(model, ["ab"], max_new=5)
  ids = list(b"ab")
  for _ in range(5):
    logits = taperjax.apply(model, np.array([ids]))
    ids.append(int(np.argmax(logits[0, -1])))
  assert 256 not in ids  # or the text would end there
  assert text == model.tokenizer.decode(ids[2:])
  options = {"max_new": 5, "sampling": decode.Sampling()}
  [row] = api.generate_ids(model, [list(b"ab")], **options)
  blocks = list(api.stream_ids(model, list(b"ab"), **options))
  assert sum(blocks, []) == row == ids[2:]


def test_load_opens_what_a_run_wrote(tmp_path_factory):
  """The unfolded and the folded model of one run are the same function."""
  workdir = runs.tapered(runs.shared_root(tmp_path_factory))
  model, folded = taperjax.load(workdir), taperjax.load(workdir / "folded")
  assert (model.gate, model.step) == (0.0, runs.STEPS)
  assert model.tapered
  assert not folded.tapered
  tokens = np.frombuffer(b"Once upon a time", np.uint8)[None].astype(np.int32)
  want = np.asarray(taperjax.apply(model, tokens))
  got = np.asarray(taperjax.apply(folded, tokens))
  assert np.abs(got - want).max() <= 1e-5 * max(1.0, np.abs(want).max())
  again = taperjax.apply(taperjax.fold(model), tokens)
  np.testing.assert_array_equal(again, got)


def error_cases():
  """name: (call, message)."""
  ones = np.ones((tiny.B, tiny.L), np.float32)
  plain, cold = make(tapered=False), make()
  return {
    "no taper to calibrate": (
      lambda _: taperjax.calibrate(plain, batches()),
      "nothing to calibrate: no norm of this model is tapered; set",
    ),
    "no tokens to calibrate on": (
      lambda _: taperjax.calibrate(cold, []),
      "nothing to calibrate on: the batches hold no token",
    ),
    "only padding to calibrate on": (
      lambda _: taperjax.calibrate(cold, [(tiny.tokens(), 0 * ones)]),
      "nothing to calibrate on",
    ),
    "windows with targets": (
      lambda _: taperjax.calibrate(cold, [(tiny.tokens(tiny.B, 8), ones)]),
      r"tokens of shape \(3, 8\) and mask of shape \(3, 7\) differ",
    ),
    "calibrated before": (
      lambda model: taperjax.calibrate(model, batches()),
      "gate=0: this model is past its taper start, .* calibrate one at gate 1",
    ),
    "other vocabulary to calibrate on": (
      lambda _: taperjax.calibrate(cold, [(tiny.tokens() + 9, ones)]),
      "do not fit vocabulary 31; use the model's own tokenizer",
    ),
    "fold at gate 1": (
      lambda _: taperjax.fold(cold),
      "gate=1 at step 0, but folding needs gate 0; finish the run",
    ),
    "fold nothing": (
      lambda _: taperjax.fold(plain),
      "nothing is tapered, so nothing can be folded; train a tapered variant",
    ),
    "fold twice": (
      lambda model: taperjax.fold(taperjax.fold(model)),
      "this model is folded already; use it as it is",
    ),
    "gate before calibration": (
      lambda _: taperjax.apply(cold, tiny.tokens(), gate=0.5),
      r"gate=0.5 does not exist before calibration \(this model is at step 0\)",
    ),
    "gate out of range": (
      lambda model: taperjax.apply(model, tiny.tokens(), gate=1.5),
      "gate=1.5 is not between 0 and 1",
    ),
    "no ids": (
      lambda model: taperjax.apply(model, tiny.tokens() * 1.5),
      "tokens of dtype float.* are no ids; give whole numbers",
    ),
    "negative weights": (
      lambda model: taperjax.calibrate(
        model.replace(gate=1.0),
        [(tiny.tokens(), -np.ones(tiny.tokens().shape))],
      ),
      "a mask holds numbers that are negative or not finite",
    ),
    "one row without a batch": (
      lambda model: taperjax.apply(model, tiny.tokens()[0]),
      r"tokens of shape \(7,\) are not \(batch, length\) with length from 1",
    ),
    "too long": (
      lambda model: taperjax.apply(model, tiny.tokens(1, tiny.M + 1)),
      r"tokens of shape \(1, 14\) are not .* context_len=13",
    ),
    "other vocabulary": (
      lambda model: taperjax.apply(model, tiny.tokens() + tiny.V),
      "do not fit vocabulary 31",
    ),
    "other vocabulary to score": (
      lambda model: taperjax.evaluate(model, np.full(20, 200)),
      "token ids from 0 to 200 do not fit vocabulary 31",
    ),
    "text without a tokenizer": (
      lambda model: taperjax.generate(model, ["Once"]),
      "this model has no tokenizer; use generate_ids with ids",
    ),
    "past the context": (
      lambda _: taperjax.generate(bytes_model(), ["Once"], max_new=10),
      "prompt 0 of 4 tokens and max_new=10 exceed context_len=13",
    ),
    "no such run": (
      lambda _: taperjax.load("runs/none"),
      "runs/none does not exist; give the workdir of a run",
    ),
  }


@pytest.mark.parametrize("name", error_cases())
def test_mistake_is_a_user_error_that_says_what_to_do(calibrated, name):
  """An unhelpful message is a bug; a silent clamp of an id is a worse one."""
  call, message = error_cases()[name]
  with pytest.raises(UserError, match=message) as error:
    call(calibrated)
  assert "\n" not in str(error.value)
