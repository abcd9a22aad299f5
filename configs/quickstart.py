"""The quickstart: a small story model that loses its norms in minutes.

  python train.py --config configs/quickstart.py

Two idle CPU cores, 1 min 47 s; validation loss 0.737 nats per token at
gate 0 and folded (commit 7a5a04f1, jax 0.10.2). No download: it trains on
stories from a grammar in this package. Width, rate, vocabulary, steps and the
place of the taper were set by measurement, so that at least 80 percent of the
sentences parse (`python -m tests.story_quality WORKDIR`). The paper's taper,
from 5 percent of the steps to the last one, calibrates too early here: after 20
steps the residual stream is a third of what it becomes, and the loss of a few
batches rose above 200 as the gate closed. Argument: VARIANT, all_aux unless
given.
"""

from ml_collections import config_dict

from configs import tinystories


def get_config(variant: str = "all_aux") -> config_dict.ConfigDict:
  """A short run on the embedded corpus; other fields as in tinystories."""
  c = tinystories.get_config(f"1m,{variant}")
  c.size = "quickstart"
  c.steps = 450
  c.batch_size = 16  # windows
  c.context_len = 128  # tokens

  c.model.num_layers = 4
  c.model.embed_dim = 128
  c.model.num_heads = 4

  c.taper.start = 0.25  # share of the steps
  c.taper.end = 0.75  # the last quarter trains without a norm

  c.optimizer.learning_rate = 4e-3  # the paper's 3e-4 learns little so soon

  c.data.train = "corpus"
  c.data.valid = "corpus"
  c.data.vocab_size = 800
  c.data.corpus_stories = 6_000

  c.eval.every = 150  # steps
  c.eval.max_windows = 128
  c.checkpoint.every = 150  # steps
  return c
