"""The report: statistics by hand, the page, and what it must never do."""

from __future__ import annotations

import csv
import html.parser
import io
import json
import math
import re
import shutil

import numpy as np
import pytest

from taperjax import cli, report
from taperjax.errors import UserError
from taperjax.report import page, plots, results
from tests import report_runs, runs

NASTY = "</script><img src=x onerror=alert(1)> & \x00\ud800 end"
VOID = {"meta", "br", "img", "path", "use"}


class Page(html.parser.HTMLParser):
  """Elements, texts and table cells of a page; unclosed ones are kept."""

  def __init__(self, text):
    super().__init__(convert_charrefs=True)
    self.elements, self.open, self.texts = [], [], []
    self.rows = []
    self.feed(text)
    self.close()

  def handle_starttag(self, tag, attributes):
    self.elements.append((tag, dict(attributes)))
    if tag not in VOID:
      self.open.append(tag)
    if tag == "tr":
      self.rows.append([])
    if tag in ("th", "td"):
      self.rows[-1].append("")

  def handle_startendtag(self, tag, attributes):
    self.elements.append((tag, dict(attributes)))

  def handle_endtag(self, tag):
    assert self.open.pop() == tag

  def handle_data(self, data):
    self.texts.append(data)
    if {"th", "td"} & set(self.open):
      self.rows[-1][-1] += data

  @property
  def text(self):
    return " ".join("".join(self.texts).split())

  def all(self, tag):
    return [fields for name, fields in self.elements if name == tag]

  def row(self, first, header):
    """The row that begins with `first` under the table with a header."""
    at = next(i for i, row in enumerate(self.rows) if header in row)
    rows = self.rows[at + 1 :]
    return next(row for row in rows if row[0] == first)


def rendered(*paths):
  """(found, data, page) without figures."""
  found = results.read(paths)
  data = results.to_json(found)
  return found, data, Page(page.render(found, data, {}))


@pytest.fixture(scope="module")
def grid(tmp_path_factory):
  """Six variants with six seeds: an outlier, a diverged and unfinished ones."""
  root = tmp_path_factory.mktemp("grid")
  options = {"records": 500, "model__num_layers": 8}
  for variant in ("baseline", "internal", "final", "all_aux"):
    report_runs.write(
      root / variant, variant, range(6), sample=NASTY, **options
    )
  report_runs.write(
    root / "aux", "internal_aux", range(6), losses={3: 2.3}, **options
  )
  report_runs.write(
    root / "all", "all", range(6), diverged={4: 700}, **options
  )
  report_runs.write(
    root / "slow", "all_aux", (0, 1), stop=600, taper__ema_rate=0.07,
    **options,
  )
  return root


@pytest.fixture(scope="module")
def written(grid, tmp_path_factory):
  """(folder, results, page) of a whole report on the grid."""
  out = tmp_path_factory.mktemp("out") / "report"
  before = {path: path.stat().st_mtime_ns for path in grid.rglob("*")}
  data = report.write(sorted(grid.iterdir()), out)
  assert before == {p: p.stat().st_mtime_ns for p in grid.rglob("*")}
  assert [path.name for path in out.parent.iterdir()] == ["report"]
  return out, data, Page((out / "report.html").read_text(encoding="utf-8"))


def test_mean_and_spread_are_those_of_a_sample():
  """n - 1, as tables of papers have it."""
  found = results.mean_std([1.0, 2.0, 4.0])
  assert found["mean"] == pytest.approx(7 / 3)
  assert found["std"] == pytest.approx(math.sqrt(7 / 3))
  assert results.mean_std([2.0]) == {"mean": 2.0, "std": None, "n": 1}
  assert results.mean_std([]) == {"mean": None, "std": None, "n": 0}


def test_paired_gap_is_students_interval_of_the_differences():
  """By hand: differences 0.1, 0.2, 0.4; t(2) = 4.302653, s = 0.152753."""
  baseline = {0: 2.0, 1: 2.1, 2: 1.9, 5: 100.0}
  losses = {0: 2.1, 1: 2.3, 2: 2.3, 7: -50.0}
  found = results.paired_gap(losses, baseline)
  assert found["seeds"] == [0, 1, 2]
  assert found["nats"] == pytest.approx(0.7 / 3)
  assert found["percent"] == pytest.approx(0.7 / 3 / 2.0 * 100)
  half = 4.302653 * 0.1527525 / math.sqrt(3)
  assert found["low"] == pytest.approx((0.7 / 3 - half) * 50, rel=1e-5)
  assert found["high"] == pytest.approx((0.7 / 3 + half) * 50, rel=1e-5)


def test_one_pair_has_no_interval_and_none_no_gap():
  """An interval of one difference would be made up."""
  found = results.paired_gap({3: 2.2}, {3: 2.0})
  assert (found["low"], found["high"]) == (None, None)
  assert found["percent"] == pytest.approx(10.0)
  assert results.paired_gap({3: 2.2}, {4: 2.0}) is None


def test_outliers_lie_beyond_three_and_a_half_scaled_mads():
  """By hand: median 1.2, MAD 0.1, so 1 MAD scaled is 0.14826."""
  losses = {0: 1.0, 1: 1.1, 2: 1.2, 3: 1.3, 4: 5.0}
  assert results.outliers(losses) == {4: pytest.approx(3.8 / 0.14826)}
  near = {**losses, 4: 1.2 + 3.4 * 0.14826}
  assert results.outliers(near) == {}
  assert results.outliers({**losses, 4: 1.2 + 3.6 * 0.14826}).keys() == {4}
  low = {seed: -loss for seed, loss in losses.items()}
  assert results.outliers(low) == {4: pytest.approx(-3.8 / 0.14826)}


def test_few_seeds_and_equal_losses_mark_no_outlier():
  """Of three one is always far out; a MAD of 0 would mark any difference."""
  assert results.outliers({0: 1.0, 1: 1.1, 2: 9.0}) == {}
  assert results.outliers({0: 1.0, 1: 1.0, 2: 1.0, 3: 9.0}) == {}


def test_bands_are_percentiles_of_the_seeds_that_are_there():
  """Linear between the order statistics: 0.025 * 3 = 0.075 of the way."""
  values_ST = np.array([
    [0.0, 5.0, np.nan], [1.0, np.nan, np.nan], [2.0, np.nan, np.nan],
    [3.0, np.nan, np.nan],
  ])
  mean_T, low_T, high_T = results.band(values_ST)
  np.testing.assert_allclose(mean_T, [1.5, 5.0, np.nan])
  np.testing.assert_allclose(low_T, [0.075, 5.0, np.nan])
  np.testing.assert_allclose(high_T, [2.925, 5.0, np.nan])


def seed_with(points, **changes):
  fields = {
    "seed": 0, "run": "", "status": "finished", "step": 0, "values": {},
    "c": {}, "fold": {}, "sample": None, "curves": {"x": points},
  }
  return results.Seed(**{**fields, **changes})


def test_long_curves_are_averaged_and_short_ones_are_left():
  """A spike must not fall out, as it would where points are picked."""
  seed = seed_with([(k, 100.0 if k == 13 else 1.0) for k in range(1, 25)])
  steps_T, values_ST = results.curve([seed], "x", 6)
  np.testing.assert_allclose(steps_T, [2.5, 6.5, 10.5, 14.5, 18.5, 22.5])
  np.testing.assert_allclose(values_ST, [[1, 1, 1, 25.75, 1, 1]])
  steps_T, values_ST = results.curve([seed], "x", 24)
  assert values_ST[0, 12] == 100.0
  assert len(steps_T) == 24


def test_curves_of_seeds_meet_at_their_steps():
  """A seed that stopped has no value where another goes on."""
  seeds = [seed_with([(2, 1.0), (4, 2.0)]), seed_with([(2, 3.0)])]
  steps_T, values_ST = results.curve(seeds, "x", 9)
  np.testing.assert_array_equal(steps_T, [2, 4])
  np.testing.assert_array_equal(values_ST, [[1, 2], [3, np.nan]])


def test_one_run_of_two_seeds_reads_as_two_runs(tmp_path):
  """Lists by seed and single numbers are two forms of the same."""
  together = report_runs.write(tmp_path / "both", "all_aux", (3, 5))
  alone = [
    report_runs.write(tmp_path / f"{seed}", "all_aux", (seed,))
    for seed in (3, 5)
  ]
  (one,) = results.read([together]).groups
  (two,) = results.read(alone).groups
  assert one.losses == two.losses == {3: 2.043, 5: 2.045}
  for a, b in zip(one.seeds, two.seeds, strict=True):
    assert (a.seed, a.status, a.step) == (b.seed, b.status, b.step)
    assert a.curves.keys() == b.curves.keys()
    assert a.curves["train/gate"] == b.curves["train/gate"]
    assert a.values == b.values
    assert a.fold == b.fold
    assert a.c.keys() == b.c.keys()
    assert len(a.c) == 5
    assert a.sample == b.sample
  assert one.seeds[1].curves["eval/residual_rms/2"]


def test_a_bare_list_of_one_seed_is_by_place(tmp_path):
  """With one seed no list is over seeds."""
  run = report_runs.write(tmp_path / "a", "all", (0,))
  line = {"step": 1000, "kind": "eval", "x": [1.0, None, 3.0]}
  with (run / "metrics.jsonl").open("a") as file:
    file.write(json.dumps(line) + "\n")
  ((seed,),) = [group.seeds for group in results.read([run]).groups]
  assert seed.curves["eval/x/0"] == [(1000, 1.0)]
  assert seed.curves["eval/x/2"] == [(1000, 3.0)]
  assert "eval/x/1" not in seed.curves


def labels(tmp_path, *changes):
  paths = [
    report_runs.write(tmp_path / f"{i}", variant, (i,), records=10, **fields)
    for i, (variant, fields) in enumerate(changes)
  ]
  return [group.label for group in results.read(paths).groups]


def test_places_and_fields_without_effect_make_no_group(tmp_path):
  """The cells of a grid lie in different folders, and are one row."""
  found = labels(
    tmp_path,
    ("all_aux", {"data__folder": "a"}),
    ("all_aux", {"data__folder": "b", "checkpoint__every": 7}),
    ("baseline", {"taper__ema_rate": 0.3, "fakeln__start": 9}),
    ("baseline", {}),
    ("internal", {"taper__scale_loss_weight": 0.7, "fakeln__start": 9}),
    ("internal", {}),
  )
  assert found == ["baseline", "internal", "all_aux"]


def test_labels_tell_size_norm_and_what_differs(tmp_path):
  """Two rows of the same name would be read as one."""
  found = labels(
    tmp_path,
    ("all", {}), ("all", {"taper__ema_rate": 0.3}),
    ("all", {"size": "big", "model__embed_dim": 16, "model__head_dim": 8}),
    ("baseline", {"norm": "layer"}),
  )
  assert found == [
    "tiny baseline, layer norm",
    "tiny all, rms norm (ema_rate 0.1)", "tiny all, rms norm (ema_rate 0.3)",
    "big all, rms norm",
  ]


def test_labels_never_repeat(tmp_path):
  """Even where more fields differ than a label holds."""
  found = labels(tmp_path, *(
    ("all", {"log_every": 5, "batch_size": 5, "context_len": 9,
             "optimizer__eps": eps})
    for eps in (1e-6, 1e-7, 1e-8)
  ), ("all", {}))
  assert len(set(found)) == 4
  assert "all (batch_size 5, context_len 9, log_every 5 and 2 more) #3" in found


def test_the_baseline_of_a_row_differs_in_the_variant_alone(tmp_path):
  """A gap to a baseline of another rate would say nothing of the taper."""
  paths = [
    report_runs.write(tmp_path / name, variant, (0,), records=10, **fields)
    for name, variant, fields in (
      ("a", "baseline", {}),
      ("b", "baseline", {"optimizer__learning_rate": 0.03}),
      ("c", "all_aux", {"taper__ema_rate": 0.3, "eval__every": 3}),
      ("d", "all_aux", {"batch_size": 2}),
      ("e", "fakeln", {}),
    )
  ]
  groups = results.read(paths).groups
  found = {
    group.runs[0].path[-1]: results.baseline_of(group, groups)
    for group in groups
  }
  assert found["c"].runs[0].path.endswith("a")
  assert found["e"].runs[0].path.endswith("a")
  assert found["b"].runs[0].path.endswith("b")
  assert found["d"] is None


def test_table_has_means_gaps_and_the_marks_of_seeds(written):
  """Exact: seed s has a loss of END + 0.001 s; see report_runs."""
  _, data, found = written
  row = found.row("all_aux (ema_rate 0.1)", "Loss")
  assert row[1] == "2.0425 \u00b1 0.0019"
  assert row[2] == "+2.00+2.00 to +2.00"
  assert row[3] == "6"
  assert found.row("baseline", "Loss")[2] == "baseline"
  groups = {group["label"]: group for group in data["groups"]}
  assert groups["all"]["gap"]["seeds"] == [0, 1, 2, 3, 5]
  assert groups["all"]["gap"]["percent"] == pytest.approx(
    0.08 / (2.0 + 0.011 / 5) * 100
  )


def test_outlier_seeds_are_shown_and_counted(written):
  """The paper dropped one; here the reader sees it and the mean with it."""
  _, data, found = written
  losses = [2.02, 2.021, 2.022, 2.3, 2.024, 2.025]
  mean, spread = np.mean(losses), np.std(losses, ddof=1)
  cell = found.row("internal_aux", "Loss")[1]
  assert re.fullmatch(rf"{mean:.4f} ± {spread:.4f}\d", cell)
  without = np.delete(losses, 3)
  assert (
    f"Without it: {without.mean():.4f} ± {without.std(ddof=1):.4f}."
    in found.text
  )
  assert "internal_aux: seed 3 is an outlier, 2.3000, +" in found.text
  group = next(g for g in data["groups"] if g["variant"] == "internal_aux")
  marks = [seed["outlier_mads"] is not None for seed in group["seeds"]]
  assert marks == [False, False, False, True, False, False]


def test_diverged_seeds_are_listed_and_the_others_counted(written):
  """A row of 5 seeds must say that there were 6."""
  _, data, found = written
  assert re.fullmatch(r"5 of 6\d", found.row("all", "Loss")[3])
  assert "all: seed 4 diverged at step 700" in found.text
  group = next(g for g in data["groups"] if g["variant"] == "all")
  assert group["valid_loss"]["n"] == 5
  assert [s["status"] for s in group["seeds"]].count("diverged") == 1
  assert group["seeds"][4]["step"] == 700


def test_unfinished_runs_are_shown_and_not_counted(written):
  """A loss half way is no result."""
  _, data, found = written
  row = found.row("all_aux (ema_rate 0.07)", "Loss")
  assert row[1] == "\u2013"
  assert re.fullmatch(r"0 of 2\d", row[3])
  assert (
    "all_aux (ema_rate 0.07): seeds 0, 1, unfinished, at step 600 of 1,000"
    in found.text
  )
  assert "35 finished, 2 unfinished, 1 diverged" in found.text


def test_a_single_seed_that_diverged_is_told_apart(tmp_path):
  """Its run stopped with a record of what was not finite, and no summary."""
  run = report_runs.write(tmp_path / "a", "all", (0,), stop=600)
  with (run / "metrics.jsonl").open("a") as file:
    file.write('{"step": 611, "kind": "nonfinite", "loss": null}\n')
  (group,) = results.read([run]).groups
  assert (group.seeds[0].status, group.seeds[0].step) == ("diverged", 611)


def test_a_seed_that_diverged_in_an_unfinished_run_is_told_apart(tmp_path):
  """There is no summary yet: its losses are null, and the others are not."""
  run = report_runs.write(
    tmp_path / "a", "all", (0, 1, 2), stop=600, diverged={1: 400}
  )
  (group,) = results.read([run]).groups
  assert [(s.status, s.step) for s in group.seeds] == [
    ("unfinished", 600), ("diverged", 400), ("unfinished", 600)
  ]


def test_a_repeated_seed_counts_once(tmp_path):
  """The run that got furthest; the other one is told."""
  report_runs.write(tmp_path / "a", "all", (0, 1), stop=600)
  report_runs.write(tmp_path / "b", "all", (1,))
  _, data, found = rendered(tmp_path / "a", tmp_path / "b")
  (group,) = data["groups"]
  assert [s["status"] for s in group["seeds"]] == ["unfinished", "finished"]
  assert len(group["repeats"]) == 1
  assert "seed 1 of all once more in" in found.text
  assert found.row("all", "Loss")[1] == "2.0810"


def test_one_seed_has_no_interval_and_says_so(tmp_path):
  """With one seed a gap is one number."""
  report_runs.write(tmp_path / "a", "all", (0,), records=10)
  report_runs.write(tmp_path / "b", "baseline", (0,), records=10)
  _, _, found = rendered(tmp_path / "a", tmp_path / "b")
  assert found.row("all", "Loss")[1:] == [
    "2.0800", "+4.00one seed: no interval", "1"
  ]


PAPER = {
  "size": "1m", "steps": 500_000, "batch_size": 16, "context_len": 512,
  "norm": "rms", "model__num_layers": 8, "model__num_heads": 16,
  "model__num_kv_heads": 16, "model__head_dim": 4, "model__rotary_dim": 4,
  "model__embed_dim": 64, "data__tokenizer": "sentencepiece",
  "data__vocab_size": 10_000, "optimizer__learning_rate": 3e-4,
  "optimizer__final_learning_rate": 0.0, "optimizer__warmup": 0.05,
  "taper__start": 0.05, "taper__end": 1.0, "taper__ema_rate": 0.01,
}


def test_papers_numbers_stand_where_the_run_is_the_papers(tmp_path):
  """In columns of their own, named so."""
  for variant in ("baseline", "all_aux", "internal"):
    report_runs.write(tmp_path / variant, variant, (0,), records=10, **PAPER)
  _, data, found = rendered(*tmp_path.iterdir())
  row = found.row("all_aux", "Paper: loss")
  assert row[4:] == ["2.1930 \u00b1 0.0035", "+1.82"]
  assert found.row("baseline", "Paper: loss")[4:] == [
    "2.1538 \u00b1 0.0025", ""
  ]
  assert found.row("internal", "Paper: loss")[4:] == ["\u2013", "\u2013"]
  assert "arXiv:2602.10408" in found.text
  assert found.row("all_aux", "Loss")[1] == "2.0400"  # ours, not the paper's


@pytest.mark.parametrize("changes", [
  {"steps": 1_000},
  {"context_len": 128},
  {"batch_size": 8},
  {"model__num_layers": 4},
  {"model__embed_dim": 128, "model__head_dim": 8, "model__rotary_dim": 8},
  {"data__vocab_size": 4_000},
  {"norm": "layer"},
  {"size": "3m"},
  {"variant": "all"},
  {"model__tied": False},
  {"model__positions": "learned"},
  {"eval__max_windows": 8},
  {"optimizer__clip_norm": 9.0},
  {"optimizer__b2": 0.999},
  {"optimizer__weight_decay": 0.1},
  {"optimizer__learning_rate": 1e-3},
  {"taper__end": 0.5},
  {"taper__scale_loss_weight": 0.5},
], ids=lambda fields: next(iter(fields)))
def test_no_number_of_the_paper_beside_another_run(changes):
  """A run of 1,000 steps beside a loss after 500,000 would mislead."""
  fields = {**PAPER, **changes}
  variant = fields.pop("variant", "all_aux")
  assert results.paper_row(report_runs.config("all_aux", (0,), **PAPER))
  config = report_runs.config(variant, (0,), **fields)
  assert results.paper_row(config) is None


def test_a_short_run_shows_no_column_of_the_paper(written):
  """Its numbers stand nowhere on the page."""
  _, data, found = written
  assert not any("Paper" in cell for row in found.rows for cell in row)
  assert all(group["paper"] is None for group in data["groups"])
  for loss, *_ in results.PAPER.values():
    assert f"{loss:.4f}" not in found.text
  assert len(results.PAPER) == 12


def test_page_is_whole_and_needs_nothing(written):
  """No network, no script, one file; tables and figures for every reader."""
  out, _, found = written
  assert found.open == []
  tags = {tag for tag, _ in found.elements}
  assert not tags & {"script", "img", "link", "iframe", "object", "style:"}
  policy = next(m["content"] for m in found.all("meta")
                if m.get("http-equiv") == "Content-Security-Policy")
  assert policy.startswith("default-src 'none'")
  ids = [fields["id"] for _, fields in found.elements if "id" in fields]
  assert len(ids) == len(set(ids)) > 50
  for tag, fields in found.elements:
    for name in ("href", "src", "xlink:href"):
      if (value := fields.get(name)) is None:
        continue
      if value.startswith("#"):
        assert value[1:] in ids, value
      else:
        assert (out / value).is_file(), (tag, value)
    assert not any(name.startswith("on") for name in fields)
  assert len(found.all("caption")) == len(found.all("table")) >= 8
  figures = found.all("svg")
  assert len(figures) == len(list((out / "figures").glob("*.svg"))) >= 20
  for fields in figures:
    assert fields["role"] == "img"
    assert len(fields["aria-label"]) > 40
  text = (out / "report.html").read_text()
  assert "http" not in re.sub(
    r'http-equiv|xmlns(:xlink)?="http://www.w3.org/[^"]+"', "", text
  )
  assert 'name="viewport"' in text
  assert "prefers-color-scheme:dark" in text


def test_page_of_six_variants_and_seeds_is_small(written):
  """It must open on a phone; curves are averaged, and it says so."""
  out, _, found = written
  assert (out / "report.html").stat().st_size < 3e6
  assert "Averaged over neighbouring records to at most" in found.text
  assert plots.MOST_POINTS <= 400


def test_text_of_files_cannot_break_the_page(written):
  """A sample is what a model says: anything."""
  out, _, found = written
  text = (out / "report.html").read_text()
  assert "</script" not in text
  assert "<img" not in text
  shown = "</script><img src=x onerror=alert(1)> & \ufffd? end"
  assert found.text.count(shown) >= 4


def test_names_of_files_and_sizes_are_escaped(tmp_path, monkeypatch):
  """Labels go into the page, into figures, and into attributes."""
  monkeypatch.setattr(plots, "CURVES", plots.CURVES[:1])
  size = "<b>$x_1$\"'&"
  run = report_runs.write(
    tmp_path / "<i>'\"&", "all", (0,), records=10, size=size
  )
  other = report_runs.write(tmp_path / "b", "baseline", (0,), records=10)
  out = tmp_path / "out"
  report.write([run, other], out)
  found = Page((out / "report.html").read_text())
  assert found.open == []
  assert not found.all("b") and not found.all("i")
  assert f"{size} all" in found.text
  assert f"{size} all" in found.all("svg")[0]["aria-label"]


def test_a_spike_of_the_loss_does_not_flatten_the_curves(
  tmp_path, monkeypatch
):
  """One record of 20,000 nats: the axis ends near the others, and says so."""
  monkeypatch.setattr(plots, "CURVES", plots.CURVES[:1])
  run = report_runs.write(tmp_path / "a", "all", (0,), records=50)
  path = run / "metrics.jsonl"
  lines = [json.loads(x) for x in path.read_text().splitlines()]
  at = next(x for x in lines if x["step"] == 700 and x["kind"] == "train")
  at["loss"] = 20_000.0
  path.write_text("".join(json.dumps(x) + "\n" for x in lines))
  limits, save = [], plots._save

  def spy(figure, *rest):
    limits.append(figure.axes[0].get_ylim())
    return save(figure, *rest)

  monkeypatch.setattr(plots, "_save", spy)
  report.write([run], tmp_path / "out")
  text = (tmp_path / "out" / "report.html").read_text()
  assert "The axis ends below the largest value, 20k." in text
  bottom, top = limits[0]
  assert 0 < bottom < top < 20  # matplotlib's own bottom would be -998


def colours(text):
  """{variable: (light, dark)} of a page."""
  light, dark = re.search(
    r":root\{(.*?)\}@media\(prefers-color-scheme:dark\)\{:root\{(.*?)\}", text
  ).groups()
  pairs = [dict(re.findall(r"--([\w-]+):(#\w+)", part))
           for part in (light, dark)]
  assert pairs[0].keys() == pairs[1].keys()
  return {name: tuple(pair[name] for pair in pairs) for name in pairs[0]}


def contrast(a, b):
  """WCAG 2 contrast ratio of two hex colours."""
  def luminance(colour):
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    parts = [x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4
             for x in parts]
    return sum(w * x for w, x in zip((0.2126, 0.7152, 0.0722), parts,
                                     strict=True))

  high, low = sorted((luminance(a), luminance(b)), reverse=True)
  return (high + 0.05) / (low + 0.05)


def test_every_colour_can_be_seen_in_light_and_in_dark(written):
  """Figures must follow the page into the dark: 4.5 for text, 3 for lines."""
  out, _, _ = written
  text = (out / "report.html").read_text()
  found = colours(text)
  used = set(re.findall(r"var\(--([\w-]+)\)", text))
  assert used <= found.keys()
  assert {"text", "grid", "baseline", "all-aux", "outward"} <= used
  for name, pair in found.items():
    for i in (0, 1):
      ratio = contrast(pair[i], found["page"][i])
      least = {"text": 7.0, "quiet": 4.5, "link": 4.5}.get(name, 3.0)
      if name not in ("page", "grid", "paper"):
        assert ratio >= least, (name, pair[i], ratio)
  lights = [pair[0] for pair in found.values()]
  assert len(set(lights)) == len(lights)  # or one would become another
  body = text[text.index("<main>"):]
  literal = set(re.findall(r"(?:fill|stroke): (#\w+)", body))
  assert not literal


def test_each_variant_has_its_colour_in_every_report(written):
  """A reader compares two reports."""
  names = {v.replace("_", "-") for v in report_runs.END}
  assert names <= plots.COLOURS.keys()
  assert len({plots.COLOURS[name] for name in names}) == len(names)


def test_two_groups_of_a_variant_differ_in_their_dashes(grid):
  """They share the variant's colour."""
  groups = results.read(sorted(grid.iterdir())).groups
  found = [
    style for group, style in zip(groups, plots.styles(groups), strict=True)
    if group.config["variant"] == "all_aux"
  ]
  assert found[0]["color"] == found[1]["color"] == plots.COLOURS["all-aux"][0]
  assert found[0]["linestyle"] != found[1]["linestyle"]


def test_the_outward_pull_is_told_in_words(written):
  """Signs: the reader must see what grows the logits, and what opposes it."""
  _, _, found = written
  header = "A step moves h"
  final = found.row("final", header)
  assert final[1] == "outward"
  assert final[2].startswith("\u22123.") and final[3] == "0"
  assert float(final[8]) > 5
  assert found.row("baseline", header)[1] == "neither way"
  held = found.row("all_aux (ema_rate 0.1)", header)
  assert held[2].startswith("\u22120.") and held[3].startswith("+0.")
  assert float(held[8]) < 1.5
  assert "below 0 the step pushes h outward and |h| grows" in found.text
  alt = [f["aria-label"] for f in found.all("svg")]
  assert any("radial gradient of the cross-entropy -3." in a for a in alt)


def test_runs_without_the_new_metrics_leave_sections_out(tmp_path):
  """Runs made before they were logged; a line says so."""
  run = report_runs.write(tmp_path / "a", "all", (0,), anchor=False, records=10)
  _, data, found = rendered(run)
  assert data["groups"][0]["radial"] is None
  assert "No run here has the metrics radial_ce and radial_scale" in found.text
  assert "eval/residual_rms/N" in found.text


def test_every_figure_has_its_files(written):
  """PNG and SVG beside the page, and nothing that is not listed."""
  out, data, _ = written
  names = {path.stem for path in (out / "figures").iterdir()}
  assert {spec.name for spec in plots.CURVES} <= names
  assert {"c", "residual_rms", "anchor_0", "anchor_6"} <= names
  for name in names:
    png = (out / "figures" / f"{name}.png").read_bytes()
    assert png.startswith(b"\x89PNG")
  files = {p.relative_to(out).as_posix() for p in out.rglob("*") if p.is_file()}
  assert files == set(data["files"])


def test_fold_errors_are_those_of_the_worst_seed(written):
  """The least agreement, and the largest error."""
  _, data, found = written
  row = found.row("final", "Divergence, nats")
  assert row[1] == "6e-06"
  assert row[4] == "95.00%"
  speed = found.row("final", "Folded / unfolded")
  assert speed[1:5] == ["1,000", "1,100", "1.10", "1"]


def test_json_and_csv_hold_what_the_page_shows(written):
  """For scripts: strict JSON, and one row for each group and seed."""
  out, data, _ = written
  saved = json.loads(
    (out / "results.json").read_text(),
    parse_constant=lambda name: pytest.fail(name),
  )
  assert saved == json.loads(json.dumps(data))
  rows = list(csv.DictReader(io.StringIO((out / "results.csv").read_text())))
  assert len(rows) == sum(len(g["seeds"]) for g in data["groups"]) == 38
  row = next(r for r in rows if r["group"] == "final" and r["seed"] == "2")
  assert float(row["valid_loss"]) == 2.062
  assert (row["status"], row["steps"], row["step"]) == (
    "finished", "1000", "1000"
  )
  assert float(row["max_abs_delta_logit_f32"]) == 3e-6


@pytest.mark.parametrize("name, content, told", [
  ("metrics.jsonl", None, "metrics.jsonl cannot be read"),
  ("metrics.jsonl", b'{"step": 1}\n{"step": 2}\n', "metrics.jsonl line 1"),
  ("metrics.jsonl", b"\xff\xfe\n\x00\n", "metrics.jsonl line 1"),
  ("summary.json", b"{", "summary.json cannot be read"),
  ("summary.json", b"[]", "summary.json cannot be read"),
  ("summary.json", b"{}", "summary.json does not fit config.json"),
  ("summary.json", b'{"seed": [0, 1], "steps": 1000, "valid_loss": "x"}',
   "summary.json has no valid_loss of seed 0"),
], ids=str)
def test_damaged_files_are_told_and_the_rest_is_shown(
  tmp_path, name, content, told
):
  """One line names the file."""
  run = report_runs.write(tmp_path / "a", "all", (0, 1), records=10)
  report_runs.write(tmp_path / "b", "baseline", (0, 1), records=10)
  path = run / name
  path.unlink()
  if content is not None:
    path.write_bytes(content)
  _, data, found = rendered(run, tmp_path / "b")
  assert told in found.text
  assert str(path) in found.text
  (line,) = data["damage"]
  assert "\n" not in line
  assert found.row("baseline", "Loss")[1].startswith("2.0005")
  if name == "summary.json":
    assert "seeds 0, 1, damaged, read to step 1,000" in found.text
  else:
    assert found.row("all", "Loss")[1].startswith("2.0805")


@pytest.mark.parametrize("content", [None, b"{", b"{}", b"\xff"])
def test_what_is_no_run_is_passed_over_with_a_line(tmp_path, content):
  """`runs/*` holds other things too, a report among them."""
  report_runs.write(tmp_path / "a", "all", (0,), records=10)
  other = tmp_path / "other"
  other.mkdir()
  if content is not None:
    (other / "config.json").write_bytes(content)
  _, data, found = rendered(tmp_path / "a", other)
  (line,) = data["passed_over"]
  assert str(other) in line and line in found.text
  with pytest.raises(UserError, match="there is no run to report: .*other"):
    results.read([other])


def test_a_path_that_is_not_there_is_a_mistake():
  """Most likely a typing error."""
  with pytest.raises(UserError, match="run runz/a does not exist; give a"):
    results.read(["runz/a"])


def test_odd_values_in_files_never_stop_a_report(tmp_path):
  """Valid JSON of the wrong types, as another program might leave it."""
  odd = [None, "x", [], [1], [1, 2], {}, {"a": 1}, True, -1e308, 10**400,
         [[1]], [None, None]]
  run = report_runs.write(tmp_path / "a", "all", (0, 1), records=10)
  whole = json.loads((run / "summary.json").read_text())
  lines = (run / "metrics.jsonl").read_text().splitlines()
  kept = {"seed", "steps", "valid_loss"}
  seen = 0
  for name in whole.keys() - kept:
    for value in odd:
      (run / "summary.json").write_text(json.dumps(whole | {name: value}))
      rendered(run)
      seen += 1
  (run / "summary.json").unlink()
  for value in odd:
    records = [json.loads(line) for line in lines]
    for record in records[3:]:
      record |= {n: value for n in record if n not in ("step", "kind")}
    (run / "metrics.jsonl").write_text(
      "".join(json.dumps(record) + "\n" for record in records)
    )
    rendered(run)
    seen += 1
  assert seen > 150


def small(tmp_path):
  return report_runs.write(tmp_path / "a", "all", (0,), records=10)


@pytest.fixture
def undrawn(monkeypatch):
  """Without figures, which take seconds."""
  monkeypatch.setattr(plots, "draw", lambda groups, folder: {})


def test_an_earlier_report_is_replaced(tmp_path, undrawn):
  """And an empty folder is filled."""
  out = tmp_path / "out"
  out.mkdir()
  run = small(tmp_path)
  report.write([run], out)
  shutil.rmtree(run)
  run = report_runs.write(tmp_path / "b", "baseline", (0,), records=10)
  report.write([run], out)
  assert "baseline" in (out / "report.html").read_text()
  assert {p.name for p in tmp_path.iterdir()} == {"out", "b"}


def test_files_of_others_are_never_replaced(tmp_path, undrawn):
  """Neither a folder of something else, nor what was put in a report."""
  run = small(tmp_path)
  out = tmp_path / "out"
  out.mkdir()
  (out / "notes.txt").write_text("mine")
  with pytest.raises(UserError, match="--out=.*holds 'notes.txt' and no .*rep"):
    report.write([run], out)
  (out / "results.json").write_text('{"files": ["notes.txt"]}')
  with pytest.raises(UserError, match="no results.json of a report"):
    report.write([run], out)
  shutil.rmtree(out)
  report.write([run], out)
  (out / "figures" / "mine").mkdir()
  with pytest.raises(UserError, match="holds 'figures/mine', which that"):
    report.write([run], out)
  assert (out / "figures" / "mine").is_dir()
  (tmp_path / "file").write_text("mine")
  with pytest.raises(UserError, match="cannot be used .*choose another"):
    report.write([run], tmp_path / "file")


def test_a_report_stays_out_of_the_files_of_a_run(tmp_path, undrawn):
  """It must not end up in what a resumed run cleans."""
  run = small(tmp_path)
  for name in ("checkpoints", "folded"):
    with pytest.raises(UserError, match="lies among the files of the model"):
      report.write([run], run / name)
  with pytest.raises(UserError, match="holds 'config.json' and no"):
    report.write([run], run)


def test_a_report_is_whole_or_not_there(tmp_path, undrawn, monkeypatch):
  """A fault half way leaves the earlier one, and no other file."""
  run, out = small(tmp_path), tmp_path / "out"
  report.write([run], out)
  before = {p: p.read_bytes() for p in out.rglob("*") if p.is_file()}

  def broken(*args):
    raise RuntimeError("half way")

  monkeypatch.setattr(page, "render", broken)
  with pytest.raises(RuntimeError):
    report.write([run], out)
  assert before == {p: p.read_bytes() for p in out.rglob("*") if p.is_file()}
  with pytest.raises(RuntimeError):
    report.write([run], tmp_path / "new" / "out")
  assert {p.name for p in tmp_path.iterdir()} == {"a", "out"}


def test_command_prints_where_the_page_is_or_json(tmp_path, undrawn, capsys):
  """What is passed over goes to standard error."""
  run, out = small(tmp_path), tmp_path / "out"
  other = tmp_path / "notes.txt"
  other.write_text("")
  arguments = ["report", str(run), str(other), "--out", str(out)]
  cli.main(arguments)
  printed = capsys.readouterr()
  assert printed.out == f"wrote {out / 'report.html'}\n"
  assert printed.err.count("\n") == 1
  assert f"{other} holds no config.json" in printed.err
  cli.main([*arguments, "--json"])
  found = json.loads(capsys.readouterr().out)
  assert found["groups"][0]["label"] == "all"
  with pytest.raises(SystemExit) as stop:
    cli.main(["report", str(other), "--out", str(out)])
  assert stop.value.code == 2
  assert capsys.readouterr().err.startswith(
    "taperjax report: error: there is no run to report"
  )


def test_real_runs_are_read_as_they_are(tmp_path_factory):
  """The contract with the loop: names of metrics, summary and configuration."""
  root = runs.shared_root(tmp_path_factory)
  paths = [runs.baseline(root), runs.tapered(root)]
  found, data, shown = rendered(*paths)
  assert data["damage"] == data["passed_over"] == []
  seeds = [group.seeds[0] for group in found.groups]
  for seed, path in zip(seeds, paths, strict=True):
    summary = json.loads((path / "summary.json").read_text())
    assert seed.status == "finished"
    assert seed.loss == summary["valid_loss"]
    assert seed.sample
    for spec in plots.CURVES:
      assert spec.key in seed.curves, spec.key
  assert len(seeds[1].c) == 5
  assert seeds[1].fold["top1_f32"] > 0
  assert shown.row("all_aux", "Divergence, nats")
  assert results.items(seeds, "eval/residual_rms")
