"""The page in an exported folder: what it is, how exact, and how to load it."""

from __future__ import annotations

from typing import Any

FORMS = {
  "plain": "The norms are as they were trained.",
  "folded": (
    "The removed norms are folded into the matrices behind them: neither the "
    "graph nor the file has them."
  ),
  "huge_eps": (
    "The class cannot leave its norms out, so eps is 2^40 and each gain is "
    "c gamma~ 2^20: next to eps the statistic vanishes, and what a norm "
    "computes is the fixed map. Holds while the variance of the stream stays "
    "below 65,536; never load it in float16 or with another eps, and do not "
    "fine-tune it with weight decay."
  ),
  "ballast": (
    "The internal norms are folded. The class cannot leave them out, so the "
    "residual stream has extra coordinates with a large constant, beside which "
    "its scale vanishes; the last MLP takes the constant off before the real "
    "final norm."
  ),
}
LOADING = {
  "hf": """```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained(FOLDER{trust}, dtype="auto")
tokenizer = AutoTokenizer.from_pretrained(FOLDER{trust})
```""",
  "transformer-lens": """```python
import sys

sys.path.append("FOLDER")
from load_taperjax import load

model = load("FOLDER")
```""",
  "stablehlo": "`python runner.py FOLDER 32 5,7,9` continues token ids.",
  "safetensors": "`model.json` names every tensor and the forward pass.",
  "gguf": "`llama-cli -m model.gguf -p \"Once upon a time\"`",
}


def text(report: dict[str, Any]) -> str:
  """Markdown of a report of `exporting.export`."""
  loading = LOADING[report["format"]].replace(
    "{trust}", ", trust_remote_code=True" if report["remote_code"] else ""
  )
  rows = []
  for label, name in (
    ("float32 file", "float32"),
    (f"this file, {report['dtype']}", "stored"),
    ("import against its source", "source"),
  ):
    errors = report.get(name)
    if errors is None:
      continue
    if errors["reader"] is None:
      rows.append(f"| {label} | not compared: {errors['reason']} | | | | |")
      continue
    rows.append(
      f"| {label} | {errors['reader']} | {errors['max_abs_delta_logit']:.2g} "
      f"| {errors['mean_abs_delta_logit']:.2g} | {errors['kl']:.2g} "
      f"| {errors['top1']:.2%} |"
    )
  kind = "RMSNorm" if report["norm"] == "rms" else "LayerNorm"
  gone = {
    ("norm", "norm"): f"every {kind} in place (nothing tapered)",
    ("taper", "norm"): f"internal {kind}s removed, the final one real",
    ("norm", "taper"): f"the final {kind} removed, the internal ones real",
    ("taper", "taper"): f"every {kind} removed",
    ("mixed", "norm"): f"some internal {kind}s removed, the others real",
    ("mixed", "taper"): f"some internal {kind}s and the final one removed",
  }
  modes = tuple(
    "taper" if mode == "none" else mode
    for mode in (report["internal_norm"], report["final_norm"])
  )
  margin = report["residuals"]["float16_margin"]
  logits = report["float32"].get("logit_std")
  scale = "" if logits is None else (
    f" The logits of a position have a standard deviation of {logits:.3g}."
  )
  sites = "".join(
    f"| {site['site']} | {site['c']:.6g} |\n" for site in report["sites"]
  )
  factors = f"\n| norm | c |\n| --- | --- |\n{sites}" if sites else ""
  notes = "".join(f"- {note}\n" for note in report["notes"])
  method = "" if modes == ("norm", "norm") else (
    "Method: gated normalization removal, arXiv:2602.10408; T(h; g) goes from "
    "a norm\nto c h gamma~ while g falls from 1 to 0, here 0.\n"
  )
  made = report["model_commit"] or "unknown"
  commit = report["commit"] or "unknown"
  return f"""# A transformer with {gone[modes]}

Written by taperjax {report["taperjax"]}, commit {commit};
the model is from step {report['step']:,}, commit {made}.
{method}
{FORMS[report['form']]}

{loading}

{report['params']:,} parameters. Logits against the model that was exported, in
float32, on {report['positions']:,} positions of {report['text']}:

| what | reader | max difference | mean | KL (nats) | same top token |
| --- | --- | --- | --- | --- | --- |
{chr(10).join(rows)}
{scale}
Float16 holds 65,504, which is {margin:.3g} times the largest number in the
residual stream there. All figures are in `verification.json`.
{factors}{notes}"""
