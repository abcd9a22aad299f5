"""The table of one model stripped in several ways, as Markdown.

  python -m tests.strip_table BASE VANILLA RUN... --data valid.txt other.txt

BASE is the model that all runs start from, VANILLA the run that only
fine-tuned; all runs must have seen the same tokens. For each run and text: mean
loss, median, 99.9th percentile, worst token, and the divergence from BASE. The
spike is the largest excess of a step's training loss over that of VANILLA at
the same step. Back within 2 percent: tokens of training until the norms are
gone and the validation loss is, from there on, at most 1.02 times that of
VANILLA at the same step.
"""

from __future__ import annotations

import argparse
import json
import pathlib

from taperjax import api, cli, metrics
from tests import runs


def evaluated(path: str, base: str, texts: list[str]) -> list[dict]:
  """Results of `taperjax eval --json`, one for each text."""
  _, out, _ = runs.quiet(
    lambda: cli.main(
      ["eval", path, "--json", "--reference", base, "--max-windows", "64",
       "--data", *texts]
    )
  )
  return json.loads(out)["results"]


def by_step(path: str, kind: str, name: str) -> dict[int, float]:
  records = metrics.read_metrics(pathlib.Path(path) / "metrics.jsonl")
  return {r["step"]: r[name] for r in records if r["kind"] == kind}


def spike(path: str, vanilla: str) -> tuple[float, int]:
  """(excess in nats, step)."""
  ours, theirs = (by_step(p, "train", "loss") for p in (path, vanilla))
  assert ours.keys() == theirs.keys(), "log_every and steps must be the same"
  return max((ours[k] - theirs[k], k) for k in ours)


def tokens_back(path: str, vanilla: str) -> int | None:
  """Tokens until the run is within 2 percent of VANILLA for good."""
  ours, theirs = (by_step(p, "eval", "valid_loss") for p in (path, vanilla))
  gates = by_step(path, "eval", "gate")
  reached = None
  for k in sorted(ours):
    good = gates[k] == 0.0 and ours[k] <= 1.02 * theirs[k]
    reached = (reached or k) if good else None
  if reached is None:
    return None
  config = api.load(path).meta["config"]
  return reached * config["batch_size"] * config["context_len"]


def main() -> None:
  parser = argparse.ArgumentParser()
  parser.add_argument("base")
  parser.add_argument("vanilla")
  parser.add_argument("runs", nargs="+")
  parser.add_argument("--data", nargs="+", required=True)
  args = parser.parse_args()
  names = [pathlib.Path(text).stem for text in args.data]
  print("| run | spike (step) | tokens to come back | " + " | ".join(
    f"{name}: loss | median | p99.9 | worst | JSD" for name in names
  ) + " |")
  print("| --- " * (3 + 5 * len(names)) + "|")
  for path in (args.base, args.vanilla, *args.runs):
    cells = ["", ""]
    if path not in (args.base, args.vanilla):
      excess, step = spike(path, args.vanilla)
      back = tokens_back(path, args.vanilla)
      cells = [f"{excess:+.3f} ({step})",
               "not reached" if back is None else f"{back:,}"]
    for found in evaluated(path, args.base, args.data):
      cells += [
        f"{found['loss']:.4f}", f"{found['median']:.3f}",
        f"{found['p99_9']:.2f}", f"{found['worst'][0]['nll']:.2f}",
        f"{found['jsd']:.4f}",
      ]
    name = pathlib.Path(path).name
    print(f"| {name} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
  main()
