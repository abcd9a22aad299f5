"""The table of docs/plan.md, as Markdown: plans of the two Llamas.

  python -m tests.plan_table

Each row is one `taperjax plan`, in a process of its own; a minute or so each.
"""

from __future__ import annotations

import json
import subprocess
import sys

# Size, mesh, micro-batches, device.
ROWS = (
  ("1b", "fsdp=8", 64, "h100"),
  ("1b", "data=8,fsdp=8", 8, "h100"),
  ("1b", "data=64,fsdp=8", 1, "h100"),
  ("8b", "fsdp=8", 64, "h100"),
  ("8b", "data=8,fsdp=8", 8, "h100"),
  ("8b", "data=64,fsdp=8", 1, "h100"),
  ("8b", "fsdp=8", 32, "h100"),
  ("8b", "data=64,fsdp=2,tensor=4", 4, "h100"),
  ("8b", "data=64,fsdp=8,tensor=4", 1, "h100"),
  ("8b", "fsdp=64", 8, "v5p"),
)
HEAD = (
  "model", "mesh", "micro-batches", "device", "state, GB", "temporary, GB",
  "of usable", "PFLOPs, model", "compiled", "sent, GB", "step, s", "MFU",
  "compile, s",
)


def plan(size: str, mesh: str, micro_batches: int, device: str) -> dict:
  """The JSON of the command."""
  code = "from taperjax.cli import main; main()"
  done = subprocess.run(
    [
      sys.executable, "-c", code, "plan",
      "--config", f"configs/llama.py:{size}", "--mesh", mesh,
      "--device", device, f"--config.micro_batches={micro_batches}", "--json",
    ],
    check=True, stdout=subprocess.PIPE, text=True,
  )
  return json.loads(done.stdout)


def cells(found: dict) -> list[str]:
  memory, seconds = found["memory"], found["seconds"]
  sent = sum(kind["bytes"] for kind in found["collectives"].values())
  kept = memory["total"] - memory["temporary"]
  share = f"{memory['total'] / memory['usable']:.0%}"
  return [
    f"{found['devices']:,} {found['device']}",
    f"{kept / 1e9:.2f}",
    f"{memory['temporary'] / 1e9:.1f}",
    share if memory["fits"] else f"{share}, does not fit",
    f"{found['flops']['model'] / 1e15:,.0f}",
    f"{found['flops']['device'] * found['devices'] / 1e15:,.0f}",
    f"{sent / 1e9:,.0f}",
    f"{seconds['step_overlapped']:.3g} to {seconds['step']:.3g}",
    f"{found['mfu_overlapped']:.0%} to {found['mfu']:.0%}",
    f"{found['compile_s']:.0f}",
  ]


def main() -> None:
  print("| " + " | ".join(HEAD) + " |")
  print("| " + " | ".join("---" for _ in HEAD) + " |")
  for size, mesh, micro_batches, device in ROWS:
    found = cells(plan(size, mesh, micro_batches, device))
    row = [size, mesh, str(micro_batches), *found]
    print("| " + " | ".join(row) + " |", flush=True)


if __name__ == "__main__":
  main()
