"""The quickstart: a small story model that loses its norms, in two minutes.

  python train.py --config configs/quickstart.py

No download: it trains on stories from a grammar in this package. The taper is
the paper's (arXiv:2602.10408 (v1), section 5.1); width, rate, vocabulary and
steps were set by measurement, so that two CPU cores finish in under three
minutes. Argument: VARIANT, all_aux unless given.
"""

from ml_collections import config_dict

from configs import tinystories


def get_config(variant: str = "all_aux") -> config_dict.ConfigDict:
  """A short run on the embedded corpus; other fields as in tinystories."""
  c = tinystories.get_config(f"1m,{variant}")
  c.size = "quickstart"
  c.steps = 400
  c.batch_size = 16  # windows
  c.context_len = 128  # tokens

  c.model.num_layers = 4
  c.model.embed_dim = 128
  c.model.num_heads = 4
  c.model.scan_layers = False

  c.optimizer.learning_rate = 3e-3  # the paper's 3e-4 learns little so soon
  c.optimizer.warmup = 0.05

  c.data.train = "corpus"
  c.data.valid = "corpus"
  c.data.vocab_size = 800
  c.data.folder = None  # inside the workdir
  c.data.corpus_stories = 6_000

  c.eval.every = 200  # steps
  c.eval.max_windows = 128
  c.eval.prompt = ""
  c.checkpoint.every = 200  # steps
  return c
