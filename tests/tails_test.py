"""Every figure against plain NumPy in float64, from logits in full."""

from __future__ import annotations

import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import taperjax
from taperjax import api, evaluation, step, tails
from taperjax.data.tokenizer import ByteTokenizer
from taperjax.errors import UserError
from taperjax.model import Transformer
from taperjax.summary import strict
from tests import tiny

ROWS, L = 27, tiny.M  # 351 positions: more than a chunk, and not a multiple
MODELS = {
  "tied rms": {},
  "gpt2": {
    "norm": "layer", "positions": "learned", "mlp": "gelu_tanh", "tied": False,
    "biases": ("q", "k", "v", "o", "up", "down", "head"),
  },
}


def model(name="tied rms", seed=0, **changes) -> taperjax.Model:
  """At gate 0, with random gains and biases."""
  config = tiny.model_config(**{**MODELS[name], **changes})
  params = tiny.params(config, seed)
  return taperjax.Model(params, config, tiny.c(config), gate=0.0)


def batch(rows=ROWS, seed=2):
  """Windows, and a mask with padding of unequal length."""
  return np.array(tiny.tokens(rows, L + 1, seed)), np.array(tiny.mask(rows, L))


def in_parts(tokens_BL1, mask_BL, size):
  for start in range(0, len(tokens_BL1), size):
    rows = slice(start, start + size)
    yield tokens_BL1[rows], mask_BL[rows]


def log_softmax(z_BLV):
  z_BLV = np.asarray(z_BLV, np.float64)
  z_BLV = z_BLV - z_BLV.max(-1, keepdims=True)
  return z_BLV - np.log(np.exp(z_BLV).sum(-1, keepdims=True))


def stream(of, n, tokens_BL):
  """The residual stream behind block n: a model that ends there."""
  config = of.config.replace(num_layers=n + 1, final_norm="none")
  c_S = jnp.append(of.c[: 2 * n + 2], 0.0)
  return Transformer(config).apply(
    {"params": of.params}, tokens_BL, gate=of.gate, c=c_S, output="hidden"
  )[0]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("gate", [0.0, 0.5])
def test_every_figure_is_that_of_the_logits(name, gate):
  """Padding left out, against a reference with other parameters."""
  scored, other = model(name).replace(gate=gate), model(name, seed=5)
  tokens_BL1, mask_BL = batch()
  found = api.evaluate_tails(
    scored, in_parts(tokens_BL1, mask_BL, 9), reference=other
  )
  keep = mask_BL > 0
  logits = taperjax.apply(scored, tokens_BL1[:, :-1])
  logits_TV = np.asarray(logits, np.float64)[keep]
  logp_TV = log_softmax(logits)[keep]
  logq_TV = log_softmax(taperjax.apply(other, tokens_BL1[:, :-1]))[keep]
  target_T = tokens_BL1[:, 1:][keep]
  p_TV, q_TV = np.exp(logp_TV), np.exp(logq_TV)
  nll_T = -logp_TV[np.arange(len(target_T)), target_T]
  m_TV = np.log((p_TV + q_TV) / 2)
  jsd_T = (p_TV * (logp_TV - m_TV) + q_TV * (logq_TV - m_TV)).sum(-1) / 2
  top_T, right_T = p_TV.max(-1), p_TV.argmax(-1) == target_T
  error = 0.0
  for i in range(15):
    inside = (top_T > i / 15) & (top_T <= (i + 1) / 15)
    if inside.any():
      gap = right_T[inside].mean() - top_T[inside].mean()
      error += inside.mean() * abs(gap)
  want = {
    "loss": nll_T.mean(),
    "tokens": keep.sum(),
    "logit_norm": np.linalg.norm(logits_TV, axis=-1).mean(),
    "median": np.median(nll_T),
    "p99_9": np.percentile(nll_T, 99.9),
    "entropy": -(p_TV * logp_TV).sum(-1).mean(),
    "calibration_error": error,
    "jsd": jsd_T.mean(),
  }
  assert keep.sum() < keep.size
  assert jsd_T.mean() > 0.01
  assert error > 0.01
  for figure, value in want.items():
    assert found[figure] == pytest.approx(value, rel=1e-5, abs=1e-6), figure
  worst = sorted(nll_T, reverse=True)[:10]
  assert [w["nll"] for w in found["worst"]] == pytest.approx(worst, rel=1e-5)
  for w in found["worst"]:
    row, i = w["window"], w["position"]
    assert w["id"] == tokens_BL1[row, i]
    again = -log_softmax(logits)[row, i - 1, w["id"]]
    assert w["nll"] == pytest.approx(again, rel=1e-5)
  largest = found["residuals"]["largest_by_layer"]
  h = [stream(scored, n, tokens_BL1[:, :-1]) for n in range(tiny.N)]
  want = [np.abs(np.asarray(x))[keep].max() for x in h]
  assert largest == pytest.approx(want, rel=1e-5)
  margin = found["residuals"]["float16_margin"]
  assert margin == pytest.approx(65_504 / max(want), rel=1e-5)


def test_the_loss_is_that_of_the_plain_evaluation():
  """One number, however it is asked for."""
  scored, (tokens_BL1, mask_BL) = model(), batch()
  plain = evaluation.evaluate(
    step.make_eval_step(scored.config), scored.params,
    [(tokens_BL1, mask_BL)], c=scored.c, gate=0.0,
    id_bytes=np.arange(tiny.V),
  )
  found = tails.evaluate(
    tails.Side(scored.config, 0.0, scored.params, scored.c),
    [(tokens_BL1, mask_BL)], id_bytes=np.arange(tiny.V),
  )
  assert {name: found[name] for name in plain} == pytest.approx(plain, rel=1e-5)


@pytest.mark.parametrize("size", [1, 4])
def test_parts_are_as_good_as_one_batch(size):
  """Windows are numbered through; unequal parts weigh by their tokens."""
  scored, whole = model(), batch(8)
  want = api.evaluate_tails(scored, [whole])
  found = api.evaluate_tails(scored, in_parts(*whole, size))
  assert jax.tree.structure(found) == jax.tree.structure(want)
  for got, wanted in zip(
    jax.tree.leaves(found), jax.tree.leaves(want), strict=True
  ):
    assert got == pytest.approx(wanted, rel=1e-5)


def test_stacked_layers_give_the_same():
  """A run with scan_layers is scored as it was saved."""
  scored = model()
  params = dict(scored.params)
  blocks = [params.pop(f"block_{n}") for n in range(tiny.N)]
  params["blocks"] = jax.tree.map(lambda *x: jnp.stack(x), *blocks)
  config = scored.config.replace(scan_layers=True)
  want = api.evaluate_tails(scored, [batch(4)])
  stacked = scored.replace(params=params, config=config)
  found = api.evaluate_tails(stacked, [batch(4)])
  assert found["residuals"] == want["residuals"]
  assert found["loss"] == pytest.approx(want["loss"], rel=1e-6)


def test_padding_counts_nowhere():
  """Neither what stands there nor how large the stream grows on it."""
  scored = model("gpt2")
  tokens_BL1, mask_BL = batch(6)
  tokens_BL1 = np.maximum(tokens_BL1, 1)
  scored_BL = mask_BL > 0
  want = api.evaluate_tails(scored, [(tokens_BL1, mask_BL)])
  tokens_BL1[:, 1:][~scored_BL] = 0
  table_VD = scored.params["embed"]["embedding"].at[0].set(1e6)
  changed = {**scored.params, "embed": {"embedding": table_VD}}
  found = api.evaluate_tails(
    scored.replace(params=changed), [(tokens_BL1, mask_BL)]
  )
  assert found == want
  none = [(tokens_BL1, np.zeros_like(mask_BL))]
  with pytest.raises(ValueError, match="nothing to evaluate"):
    api.evaluate_tails(scored, none)


def test_ties_go_to_the_lowest_id_and_to_the_earlier_token():
  """All logits 0: id 0 is predicted, and every token is the worst."""
  scored = model()
  table_VD = jnp.zeros_like(scored.params["embed"]["embedding"])
  scored = scored.replace(
    params={**scored.params, "embed": {"embedding": table_VD}}
  )
  tokens_BL1, mask_BL = batch(6)
  tokens_BL1[:3, 1:] = 0
  found = api.evaluate_tails(scored, in_parts(tokens_BL1, mask_BL, 2))
  share = np.mean(tokens_BL1[:, 1:][mask_BL > 0] == 0)
  assert share > 0.3
  assert found["calibration_error"] == pytest.approx(share - 1 / tiny.V)
  for name in ("loss", "median", "p99_9", "entropy"):
    assert found[name] == pytest.approx(math.log(tiny.V), rel=1e-6)
  first = np.argwhere(mask_BL)[:10] + [0, 1]
  assert [[w["window"], w["position"]] for w in found["worst"]] == (
    first.tolist()
  )


def test_calibration_error_by_hand():
  """A probability of 1 is in the last bin, an edge in the one below it."""
  top = np.array([1.0, 1.0, 0.5, 0.49, 1 / 15, 0.01])
  right = np.array([1.0, 0.0, 1.0, 0.0, 0.0, 1.0])
  bins = [(2 - 1) / 2 * 2, abs(1 - 0.99), abs(1 - 1 / 15 - 0.01)]
  assert tails.calibration_error(top, right) == pytest.approx(sum(bins) / 6)
  assert math.isnan(tails.calibration_error(np.array([math.nan]), right[:1]))


def test_divergence_is_0_to_itself_and_log_2_at_most():
  """Between predictions that share nothing, in either direction."""
  scored = model("gpt2")

  def shifted(sign):
    bias_V = sign * jnp.where(jnp.arange(tiny.V) % 2, 300.0, -300.0)
    head = {**scored.params["head"], "bias": bias_V}
    return scored.replace(params={**scored.params, "head": head})

  def jsd(a, b):
    return api.evaluate_tails(a, [batch(4)], reference=b)["jsd"]

  assert jsd(scored, scored) == 0.0
  assert jsd(shifted(1), shifted(-1)) == pytest.approx(math.log(2), rel=1e-5)
  other = model("gpt2", seed=5)
  assert jsd(scored, other) == pytest.approx(jsd(other, scored), rel=1e-5)


@pytest.mark.parametrize("kind", ["one window", "all"])
def test_a_diverged_model_has_null_figures(kind):
  """JSON has no infinity; the median still stands where one window is lost.

  One token spoils its window: attention weighs a later NaN by 0, which is NaN.
  """
  scored = model("gpt2")
  tokens_BL1, mask_BL = batch(6)
  tokens_BL1, mask_BL = np.maximum(tokens_BL1, 1), np.ones_like(mask_BL)
  table_VD = scored.params["embed"]["embedding"]
  if kind == "all":
    table_VD = table_VD * jnp.nan
  else:
    table_VD = table_VD.at[0].set(3e38)
    tokens_BL1[2, L - 1] = 0
  scored = scored.replace(
    params={**scored.params, "embed": {"embedding": table_VD}}
  )
  found = strict(
    api.evaluate_tails(scored, [(tokens_BL1, mask_BL)], reference=scored)
  )
  json.dumps(found, allow_nan=False)
  for name in ("loss", "entropy", "calibration_error", "jsd"):
    assert found[name] is None
  assert (found["median"] is None) == (kind == "all")
  assert None in found["residuals"]["largest_by_layer"]
  assert [w["nll"] for w in found["worst"]] == [None] * 10
  window = 2 if kind == "one window" else 0
  assert [(w["window"], w["position"]) for w in found["worst"]] == [
    (window, i) for i in range(1, 11)
  ]


def test_worst_tokens_have_their_text():
  """What stands before, and nothing for an id that stands for no text."""
  tokenizer = ByteTokenizer()
  scored = model(vocab_size=260).replace(tokenizer=tokenizer)
  ids = np.array([[*b"a cat sat", 256, *b"b\xc3\xa9", 258]])
  mask_BL = np.ones((1, ids.shape[1] - 1))
  found = api.evaluate_tails(scored, [(ids, mask_BL)])["worst"]
  assert len(found) == 10
  texts = {w["position"]: (w["before"], w["token"]) for w in found}
  want = {
    1: ("a", " "), 2: ("a ", "c"), 8: ("a cat sa", "t"), 9: ("a cat sat", ""),
    10: ("a cat sat", "b"), 12: ("a cat satb\ufffd", "\ufffd"),
    13: ("a cat satb\u00e9", ""),
  }
  shared = texts.keys() & want.keys()
  assert len(shared) > 4
  for position in shared:
    assert texts[position] == want[position]
  long = np.array([[*b"0123456789" * 9]])
  scored = model(vocab_size=260, context_len=90).replace(tokenizer=tokenizer)
  mask_BL = np.arange(89)[None] == 88
  [last] = api.evaluate_tails(scored, [(long, mask_BL)])["worst"]
  assert (last["before"], last["token"]) == ("9" + "0123456789" * 3
                                             + "012345678", "9")


def test_one_program_for_each_shape_and_nothing_of_vocabulary_size():
  """Texts share it; per token a few floats come back from the device."""
  scored = model(mlp_dim=36)  # a shape of no other test
  before = tails._figures._cache_size()
  for seed in (2, 3):
    api.evaluate_tails(scored, in_parts(*batch(6, seed), 2))
  assert tails._figures._cache_size() == before + 1
  tokens_BL1, mask_BL = batch(2)
  found, largest_N = tails._figures(
    ((scored.config, 0.0),), ((scored.params, scored.c),), tokens_BL1, mask_BL
  )
  assert {x.shape for x in found.values()} == {mask_BL.shape}
  assert {x.dtype for x in found.values()} == {np.dtype(np.float32)}
  assert largest_N.shape == (tiny.N,)


@pytest.mark.parametrize(
  "losses, want",
  [
    ([5.0, 3.0, 4.5, 2.0, 3.0], (1.5, 3, 4.5, 3.0)),
    ([5.0, 3.0, 2.0, 3.5, 3.6], (1.6, 5, 3.6, 2.0)),
    ([5.0, 3.0, 2.0], (0.0, 1, 5.0, 5.0)),
    ([], None),
  ],
)
def test_spike_is_the_largest_rise_above_the_lowest_before(losses, want):
  """Not max minus min: a loss starts high and falls."""
  records = [
    {"kind": "train", "step": k, "loss": loss}
    for k, loss in enumerate(losses, 1)
  ]
  records += [
    {"kind": "eval", "step": 2, "loss": 99.0},
    {"kind": "train", "step": 9, "loss": 99.0},
    {"kind": "nonfinite", "step": 5, "loss": None},
  ]
  found = tails.train_spike(records, last_step=8)
  if want is None:
    assert found is None
  else:
    assert list(found) == ["rise", "step", "loss", "lowest_before"]
    assert tuple(found.values()) == pytest.approx(want)


def test_a_reference_must_read_the_same_ids():
  """Probabilities of other tokens, or of positions it has not, mean nothing."""
  scored = model()
  wide = model(vocab_size=40)
  with pytest.raises(UserError, match="vocabulary 40 has not the tokenizer"):
    api.evaluate_tails(scored, [batch(2)], reference=wide)
  first, second = ByteTokenizer(), ByteTokenizer(b"other")
  with pytest.raises(UserError, match="reads the same ids"):
    api.evaluate_tails(
      model(vocab_size=260).replace(tokenizer=first), [batch(2)],
      reference=model(vocab_size=260).replace(tokenizer=second),
    )
  short = model("gpt2", context_len=5)
  with pytest.raises(UserError, match="context_len=5, but the windows hold 13"):
    api.evaluate_tails(scored, [batch(2)], reference=short)
