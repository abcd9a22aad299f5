"""Tapers the norms of a trained model away by fine-tuning, section 5.3.

  taperjax import SOURCE runs/base
  python train.py --config configs/llama.py:internal_aux \
    --config.init.checkpoint=runs/base \
    --config.data.train=train.txt --config.data.valid=valid.txt

Argument: VARIANT, internal_aux unless given; baseline is plain fine-tuning.
Or SIZE,VARIANT with the shapes of Llama 3.2 1B and Llama 3.1 8B, 1b and 8b:
pre-training from scratch, see `_from_scratch`.

The start is an imported model (`taperjax import`) or a baseline run of our
own: its shape, its tokenizer and its weights. `--config.lora.rank=8` trains
adapters of that rank and the taper gains alone. The paper fine-tunes GPT-2
only; for Llamas rate, steps and taper are [U], ours, found on a model of
260 K parameters.
"""

from ml_collections import config_dict

from configs import tinystories
from taperjax import shapes


def get_config(arg: str = "internal_aux") -> config_dict.ConfigDict:
  """Config of "VARIANT", or of "SIZE" or "SIZE,VARIANT"."""
  size, _, variant = arg.partition(",")
  if size in shapes.LLAMA:
    return _from_scratch(size, variant)
  return _fine_tuning(arg)


def _from_scratch(size: str, variant: str) -> config_dict.ConfigDict:
  """The run of configs/tinystories.py with a public shape, on many devices.

    taperjax plan --config configs/llama.py:8b --mesh data=8,fsdp=8

  Planned, never trained. Shape and context are Meta's; batch and steps are [U],
  ours; all else is the paper's. The vocabulary has Meta's size, but a tokenizer
  of it is trained on data.train, unless data.tokenizer names a tokenizer.json
  (and data.vocab_size=None).
  """
  c = tinystories.get_config(f"1m,{variant}")
  c.size = f"llama-{size}"
  c.steps = 100_000
  c.batch_size = 512  # windows: 4.2 million tokens
  c.context_len = 8_192
  c.compute_dtype = "bfloat16"
  c.model.update(shapes.LLAMA[size])
  c.model.scan_layers = True
  c.model.remat = True
  c.data.vocab_size = shapes.LLAMA_VOCAB
  c.eval.batch_size = c.batch_size  # whatever splits one splits the other
  return c


def _fine_tuning(variant: str) -> config_dict.ConfigDict:
  """Fields that are None are those of the checkpoint."""
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
