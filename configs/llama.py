"""Tapers the norms of a trained model away by fine-tuning, section 5.3.

  taperjax import SOURCE runs/base
  python train.py --config configs/llama.py:internal_aux \
    --config.init.checkpoint=runs/base \
    --config.data.train=train.txt --config.data.valid=valid.txt

Argument: VARIANT, internal_aux unless given; baseline is plain fine-tuning.
The start is an imported model (`taperjax import`) or a baseline run of our
own: its shape, its tokenizer and its weights. `--config.lora.rank=8` trains
adapters of that rank and the taper gains alone. The paper fine-tunes GPT-2
only; for Llamas rate, steps and taper are [U], ours, found on a model of
260 K parameters.
"""

from ml_collections import config_dict

from configs import tinystories


def get_config(variant: str = "internal_aux") -> config_dict.ConfigDict:
  """Fine-tuning; fields that are None are those of the checkpoint."""
  c = tinystories.get_config(f"1m,{variant}")
  c.size = "llama"
  c.norm = config_dict.placeholder(str)
  c.steps = 600
  c.context_len = config_dict.placeholder(int)  # None: the checkpoint's

  kinds = {name: type(value) for name, value in c.model.items()}
  ints = ("num_kv_heads", "head_dim", "mlp_dim", "rotary_dim")
  kinds.update(dict.fromkeys(ints, int))
  c.model = config_dict.ConfigDict(
    {name: config_dict.placeholder(kind) for name, kind in kinds.items()}
  )

  c.taper.start = 0.1  # share of the steps
  c.taper.end = 0.6

  c.optimizer.learning_rate = 5e-4
  c.optimizer.final_learning_rate = 5e-5
  c.optimizer.warmup = 0.05

  c.data.tokenizer = "init"
  c.data.vocab_size = config_dict.placeholder(int)
  return c
