"""Memory of a GPT-2 train step by compiling it ahead of time, without a run.

  python -m tests.memory SIZE [VARIANT] [--micro-batch=WINDOWS] [--whole-logits]

Prints what XLA's compiler plans for the step with the most branches (taper
phase) of configs/gpt2.py at the shapes of GPT-2, layers scanned and recomputed.
The plan is that of the backend it runs on: on a CPU bfloat16 products are
widened and attention is another program, so it stands in for a GPU, no more.
With --whole-logits the cross-entropy holds all logits at once, for comparison.
"""

from __future__ import annotations

import argparse
import contextlib

import jax

from configs import gpt2
from taperjax import config as config_lib, planning
from tests import cross_entropy

# Layers, width, heads of the released models.
SHAPES = {
  "small": (12, 768, 12),
  "medium": (24, 1024, 16),
  "large": (36, 1280, 20),
  "xl": (48, 1600, 25),
}
GIB = 2**30


def model_config(size: str) -> config_lib.ModelConfig:
  layers, width, heads = SHAPES[size]
  return config_lib.ModelConfig(
    num_layers=layers, embed_dim=width, num_heads=heads, num_kv_heads=heads,
    head_dim=width // heads, mlp_dim=4 * width, mlp="gelu_tanh",
    positions="learned", rope_theta=1e4, rotary_dim=width // heads,
    norm_eps=1e-5, biases=("q", "k", "v", "o", "up", "down"), tied=True,
    init_std=0.02, scan_layers=False, norm="layer", internal_norm="norm",
    final_norm="norm", vocab_size=50_257, context_len=1024,
    compute_dtype="float32",
  )


def plan(size: str, variant: str, windows: int) -> dict[str, float]:
  """Bytes of one device by the compiler's memory analysis."""
  fields = gpt2.get_config(f"{size},{variant}")
  fields.init.checkpoint = "imported"
  fields.micro_batches = fields.batch_size // windows
  fields.model.scan_layers = True
  fields.model.remat = True
  config = config_lib.parse(fields, model_config(size))
  parts = planning.memory(*planning.compile_step(config, None, as_here=True))
  temporary = parts.pop("temporary")
  held = sum(parts.values())
  return {"state": held, "temporary": temporary, "total": held + temporary}


def main() -> None:
  parser = argparse.ArgumentParser()
  parser.add_argument("size", choices=SHAPES)
  parser.add_argument("variant", nargs="?", default="all")
  parser.add_argument("--micro-batch", type=int, default=8)
  parser.add_argument("--whole-logits", action="store_true")
  args = parser.parse_args()
  logits = contextlib.nullcontext()
  if args.whole_logits:
    logits = cross_entropy.whole_logits()
  with logits:
    found = plan(args.size, args.variant, args.micro_batch)
  line = ", ".join(f"{name} {x / GIB:.1f} GiB" for name, x in found.items())
  print(
    f"gpt2:{args.size},{args.variant}, {args.micro_batch} x 1,024 tokens at a "
    f"time, {jax.devices()[0].device_kind}: {line}"
  )


if __name__ == "__main__":
  main()
