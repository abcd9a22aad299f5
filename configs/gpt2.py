"""Norms out of a pretrained GPT-2, arXiv:2602.10408 (v1), section 5.3, App. D.

  taperjax import gpt2 runs/gpt2-small        # a Hugging Face folder
  python train.py --config configs/gpt2.py:small,internal \
    --config.init.checkpoint=runs/gpt2-small \
    --config.data.train=openwebtext --config.data.valid=valid.jsonl

Argument: SIZE,VARIANT. Sizes small, medium, large, xl. Variants: `internal` and
`all` are the paper's Internal- and All-TaperLN, both with the scale loss
(internal_aux and all_aux elsewhere in this package); `fakeln` is the method of
Baroni et al. (2025), `vanilla` fine-tunes alone. Steps, warm-up, taper and
lambda are the paper's; rate, decay, batch and the gaps of fakeln those of the
configuration that Baroni et al. released, which the paper says it reuses ([U]:
which version of it). Text: .txt, .jsonl or .parquet files, a folder of them, or
one that `datasets` has saved; documents are joined by end-of-text.
micro_batches=512 walks the 2^19 tokens of a step one window at a time.
"""

from ml_collections import config_dict

from configs import llama

# steps, warm-up, taper start and end, lambda: the paper's table in App. D;
# rate, final rate, gaps of fakeln (mlp, qk, v) and its start: Baroni et al.
SIZES = {
  "small": (300, 25, 25, 100, 0.1, 6e-4, 3e-4, (2, 2, 3), 20),
  "medium": (500, 10, 20, 200, 0.1, 6e-4, 3e-4, (2, 2, 3), 20),
  "large": (600, 30, 30, 500, 0.1, 3e-4, 4e-5, (4, 4, 6), 30),
  "xl": (800, 20, 50, 700, 0.01, 1e-4, 2e-5, (4, 4, 6), 50),
}
# Weight of the moving-target loss of fakeln by size.
FAKELN_LAMBDA = {"small": 0.1, "medium": 0.1, "large": 0.03, "xl": 0.01}
VARIANTS = {
  "internal": "internal_aux",
  "all": "all_aux",
  "fakeln": "fakeln",
  "vanilla": "vanilla",
}


def get_config(arg: str = "small,internal") -> config_dict.ConfigDict:
  """Config of "SIZE,VARIANT"."""
  size, _, variant = arg.partition(",")
  variant = variant or "internal"
  for what, value, known in (
    ("size", size, SIZES), ("variant", variant, VARIANTS)
  ):
    if value not in known:
      raise ValueError(
        f"configs/gpt2.py:{arg} names {what} {value!r}; "
        f"use one of {', '.join(known)}"
      )
  steps, warmup, start, end, weight, rate, final_rate, gaps, cut = SIZES[size]
  c = llama.get_config(VARIANTS[variant])
  c.size = f"gpt2-{size}"
  c.steps = steps
  c.batch_size = 512  # windows of 1,024: 2^19 tokens
  c.micro_batches = 64
  c.compute_dtype = "bfloat16"
  c.log_every = 1

  c.taper.start = start / steps
  c.taper.end = end / steps  # then a plateau at gate 0
  c.taper.ema_rate = 0.1  # appendix D
  c.taper.scale_loss_weight = weight

  c.optimizer.learning_rate = rate
  c.optimizer.final_learning_rate = final_rate
  c.optimizer.warmup = warmup / steps
  c.optimizer.b2 = 0.999
  c.optimizer.weight_decay = 0.01

  f = c.fakeln
  f.start = cut  # steps, as all of this group
  f.gap_mlp, f.gap_qk, f.gap_v = gaps
  if variant == "fakeln":
    c.taper.scale_loss_weight = FAKELN_LAMBDA[size]

  c.eval.batch_size = 4  # windows
  c.eval.every = 50  # steps
  c.eval.prompt = "The"
  c.checkpoint.every = 50
  return c
