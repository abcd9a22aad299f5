"""Loss without each norm: against eval, against the tapered model at gate 0."""

from __future__ import annotations

import json

import jax
import numpy as np
import pytest

import taperjax
from taperjax import api, cli, losses, model, probing, saved
from taperjax.config import site_names
from taperjax.data import windows
from taperjax.data.tokenizer import ByteTokenizer
from taperjax.errors import UserError
from taperjax.summary import strict
from tests import tiny

L = tiny.M
STREAM = np.asarray(tiny.tokens(1, 20 * L + 5))[0]  # 21 windows, one short
SITES = site_names(tiny.N)
KINDS = {"rms": tiny.model_config(), "layer": tiny.gpt2_config()}


def made(kind="rms", internal="norm", final="norm", gate=1.0, **changes):
  """A model with random gains, and c where something tapers."""
  config = KINDS[kind].replace(
    internal_norm=internal, final_norm=final, **changes
  )
  return taperjax.Model(tiny.params(config), config, tiny.c(config), gate=gate)


def with_all_tapered(of):
  """The same model before calibration, with every norm about to taper."""
  config = of.config.replace(internal_norm="taper", final_norm="taper")
  params = model.add_tapers(of.params, config)
  return of.replace(params=params, config=config, gate=1.0)


def batches(tokens):
  return windows.eval_batches(tokens, batch_size=4, context_len=L)


@pytest.fixture(scope="module", params=KINDS)
def probed(request):
  """(model, first half, second half, what was found)."""
  of = made(request.param)
  first, second = STREAM[: 10 * L + 1], STREAM[10 * L :]
  return of, first, second, api.probe(of, STREAM, batch_size=4)


def test_none_replaced_is_eval_to_the_bit(probed):
  """The norms that stand are the norms of the model, not near them."""
  of, first, second, found = probed
  want = api.evaluate(of, second, batch_size=4)
  assert found["loss"] == want["loss"]
  assert found["tokens"] == want["tokens"] == len(second) - 1
  assert found["calibration_tokens"] == len(first) - 1


def test_factors_are_those_of_calibrate(probed):
  """Closed form over all tokens of the first half, norms in place."""
  of, first, _, found = probed
  before = with_all_tapered(of)
  pairs = [(tokens[:, :-1], mask) for tokens, mask in batches(first)]
  want = dict(zip(SITES, api.calibrate(before, pairs).c, strict=True))
  got = {site["site"]: site["c"] for site in found["sites"]}
  assert got == pytest.approx(want, rel=1e-6)
  assert len(set(got.values())) == len(SITES)


def test_all_replaced_is_the_tapered_model_at_gate_0(probed):
  """And each alone is the model of which only this norm is a fixed map."""
  of, _, second, found = probed
  c_S = np.zeros(len(SITES), np.float32)
  for site in found["sites"]:
    c_S[SITES.index(site["site"])] = site["c"]
  zero = with_all_tapered(of).replace(c=c_S, gate=0.0)
  want = api.evaluate(zero, second, batch_size=4)["loss"]
  last = found["cumulative"][-1]
  assert last["loss"] == pytest.approx(want, rel=1e-6)
  assert abs(last["increase"]) > 1e-3  # the fixed maps are not the norms
  params = model.add_tapers(of.params, config := zero.config.replace(
    internal_norm="norm"
  ))
  alone = of.replace(params=params, config=config, c=c_S, gate=0.0)
  want = api.evaluate(alone, second, batch_size=4)["loss"]
  [final] = [s for s in found["sites"] if s["site"] == "final_norm"]
  assert final["loss"] == pytest.approx(want, rel=1e-6)


def test_sites_come_by_increase_and_go_in_that_order(probed):
  """The first removed is the first of the sites, at the same loss."""
  *_, found = probed
  sites, steps = found["sites"], found["cumulative"]
  assert sorted(site["site"] for site in sites) == sorted(SITES)
  assert [site["rank"] for site in sites] == [1, 2, 3, 4, 5]
  assert [s["increase"] for s in sites] == sorted(s["increase"] for s in sites)
  assert [step["removed"] for step in steps] == [1, 2, 3, 4, 5]
  assert [s["site"] for s in steps] == [s["site"] for s in sites]
  assert steps[0]["loss"] == sites[0]["loss"]
  for row in (*sites, *steps):
    assert row["increase"] == row["loss"] - found["loss"]
  assert len({row["loss"] for row in (*sites, *steps)}) == 2 * len(SITES) - 1


def test_one_program_serves_all_sites_and_subsets(monkeypatch):
  """Two passes for each site would else compile for minutes."""
  traced, real = [], losses.token_cross_entropy
  monkeypatch.setattr(
    losses, "token_cross_entropy",
    lambda *arguments: traced.append(1) or real(*arguments),
  )
  of = made(mlp_dim=36)  # a shape of no other test
  before = probing._sums._cache_size()
  found = api.probe(of, STREAM, batch_size=4)
  assert len(found["cumulative"]) == len(SITES)
  assert len(traced) == 1
  assert probing._sums._cache_size() == before + 1


def test_norms_that_are_gone_are_not_probed():
  """Of an internal taper the final norm is left, unfolded and folded alike."""
  zero = made(internal="taper", gate=0.0)
  tapered = api.probe(zero, STREAM, batch_size=4)
  folded = api.probe(api.fold(zero), STREAM, batch_size=4)
  for found in (tapered, folded):
    assert [site["site"] for site in found["sites"]] == ["final_norm"]
    assert len(found["cumulative"]) == 1
  assert tapered["sites"][0]["c"] == pytest.approx(folded["sites"][0]["c"])
  for row, other in zip(
    jax.tree.leaves(tapered), jax.tree.leaves(folded), strict=True
  ):
    assert row == other or row == pytest.approx(other, rel=1e-5)
  want = api.evaluate(zero, STREAM[10 * L :], batch_size=4)["loss"]
  assert tapered["loss"] == pytest.approx(want, rel=1e-6)
  final = made(final="taper", gate=0.0)
  found = api.probe(final, STREAM, batch_size=4)
  assert sorted(site["site"] for site in found["sites"]) == SITES[:-1]


def test_before_its_taper_every_norm_stands():
  """gamma~ at gate 1 is no part of the model; stacked layers are the same."""
  plain = made()
  want = api.probe(plain, STREAM, batch_size=4)
  tapered = with_all_tapered(plain)
  noise = jax.tree_util.tree_map_with_path(
    lambda path, x: x + 1 if path[-1].key == "taper_scale" else x,
    tapered.params,
  )
  assert api.probe(tapered.replace(params=noise), STREAM, batch_size=4) == want
  stacked = plain.replace(
    params=model.stack_layers(plain.params, plain.config),
    config=plain.config.replace(scan_layers=True),
  )
  found = api.probe(stacked, STREAM, batch_size=4)
  assert found["loss"] == pytest.approx(want["loss"], rel=1e-6)
  assert [s["site"] for s in found["sites"]] == [
    s["site"] for s in want["sites"]
  ]


def test_another_text_to_calibrate_on():
  """Then all of the first is scored."""
  of = made()
  other = np.asarray(tiny.tokens(1, 40, seed=9))[0]
  found = api.probe(
    of, STREAM, calibration_tokens=other, batch_size=4, max_windows=6
  )
  want = api.evaluate(of, STREAM, batch_size=4, max_windows=6)
  assert (found["loss"], found["tokens"]) == (want["loss"], 6 * L)
  assert found["calibration_tokens"] == 39
  capped = api.probe(of, STREAM, batch_size=4, max_windows=5)
  assert capped["calibration_tokens"] == 2 * L
  assert capped["tokens"] == 3 * L


def test_a_loss_that_is_not_finite_is_null_and_last(tmp_path):
  """A fixed map has no bound: one token that c was not fitted to is enough."""
  of = made(tied=False)
  params = jax.tree.map(np.array, of.params)
  params["embed"]["embedding"][0] *= 1e10
  mlp = params["block_1"]["mlp"]  # about 1e20 within, behind a norm
  for name, factor in (("gate", 1e10), ("up", 1e10), ("down", 1e-20)):
    mlp[name]["kernel"] *= factor
  stream = np.maximum(STREAM, 1)
  stream[-20] = 0
  found = api.probe(of.replace(params=params), stream, batch_size=4)
  told = strict(found)
  json.dumps(told, allow_nan=False)
  *others, last = told["sites"]
  assert (last["site"], last["loss"]) == ("block_1.mlp_norm", None)
  assert None not in [site["loss"] for site in others]
  assert told["cumulative"][-1]["increase"] is None
  probing.plot(found, "diverged", tmp_path)
  assert "not finite" in (tmp_path / "probe.svg").read_text()


@pytest.mark.parametrize(
  "changes, message",
  [
    ({"internal": "taper", "final": "taper", "gate": 0.0}, "no norm is left"),
    ({"internal": "none", "final": "none"}, "no norm is left to probe"),
    ({"internal": "taper", "gate": 0.4}, "gate=0.4: .* between norms"),
    ({"internal": "fake", "final": "fake"}, "middle of a FakeLN run"),
  ],
)
def test_models_without_norms_or_between_are_refused(changes, message):
  """In one line, before a text is read."""
  with pytest.raises(UserError, match=message):
    api.probe(made(**changes), STREAM)


@pytest.mark.parametrize("length, most", [(L + 1, None), (0, None), (99, 1)])
def test_a_text_needs_two_windows(length, most):
  """One to calibrate on, one to score."""
  with pytest.raises(UserError, match="fewer than two windows of 13"):
    api.probe(made(), STREAM[:length], max_windows=most)
  first, second = probing.halves(STREAM[: L + 2], L, None)
  assert (len(first), len(second)) == (L + 1, 2)
  assert first[-1] == second[0]


@pytest.fixture(scope="module")
def imported(tmp_path_factory):
  """A workdir as `taperjax import` makes it."""
  workdir = tmp_path_factory.mktemp("imported") / "model"
  workdir.mkdir()
  of = made(vocab_size=260).replace(
    tokenizer=ByteTokenizer(), meta={"source": {"format": "test"}}
  )
  saved.write_imported(workdir, of)
  (workdir.parent / "a.txt").write_text("Once a cat sat. " * 9)
  (workdir.parent / "b.txt").write_text("A dog! " * 20)
  return workdir


def run(capsys, *arguments):
  cli.main(list(map(str, ("probe", *arguments))))
  return capsys.readouterr()


def test_command_prints_json_table_and_plot(imported, tmp_path, capsys):
  """What the README promises to scripts, and a table of 80 columns."""
  a, b = (imported.parent / f"{name}.txt" for name in "ab")
  out = tmp_path / "probe"
  arguments = (imported, "--data", a, b, "--batch-size", 4)
  printed = run(capsys, *arguments, "--json", "--out", out)
  found = json.loads(printed.out)
  assert list(found) == [
    "model", "step", "data", "calibration_data", "loss", "tokens",
    "calibration_tokens", "sites", "cumulative",
  ]
  assert list(found["sites"][0]) == ["rank", "site", "c", "loss", "increase"]
  assert list(found["cumulative"][0]) == ["removed", "site", "loss", "increase"]
  assert found["data"] == [str(a), str(b)]
  assert json.loads((out / "probe.json").read_text()) == found
  assert (out / "probe.png").read_bytes().startswith(b"\x89PNG")
  assert (out / "probe.svg").read_text().startswith("<?xml")
  assert sorted(path.name for path in out.iterdir()) == [
    "probe.json", "probe.png", "probe.svg"
  ]
  assert "step " in printed.err  # progress
  ids = [cli._stream_of(path, ByteTokenizer()) for path in (a, b)]
  want = api.probe(saved.load(imported), np.concatenate(ids), batch_size=4)
  assert {name: found[name] for name in want} == want
  table = run(capsys, *arguments, "--calibrate", b).out
  assert max(map(len, table.splitlines()[1:])) <= 80
  assert "c from " + str(b) in table
  for site in SITES:
    assert site in table


@pytest.mark.parametrize(
  "arguments, message",
  [
    ((), "an imported model, which has no validation text; give --data FILE"),
    (("--data", "nowhere.txt"), "nowhere.txt"),
    (("--data", "{short}"), "fewer than two windows of 13"),
    (("--data", "{text}", "--max-windows", "0"), "--max-windows=0 must be 1"),
    (("--data", "{text}", "--out", "{model}/checkpoints/x"), "lies among"),
    (("--data", "{text}", "--out", "{text}"), "cannot be used"),
  ],
)
def test_mistakes_are_one_line(imported, tmp_path, capsys, arguments, message):
  """With exit code 2, and nothing on standard output."""
  (tmp_path / "short.txt").write_text("a cat")
  places = {
    "short": tmp_path / "short.txt", "text": imported.parent / "a.txt",
    "model": imported,
  }
  with pytest.raises(SystemExit) as stop:
    run(capsys, imported, *(a.format(**places) for a in arguments))
  out, err = capsys.readouterr()
  assert (stop.value.code, out) == (2, "")
  [line] = err.splitlines()
  assert line.startswith("taperjax probe: error: ")
  assert message in line
