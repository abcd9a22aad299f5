r"""Logit chasing on a CPU: what cross-entropy does to logits without an anchor.

  taperjax reproduce configs/chase.py --workdir runs/chase \
    --variants baseline,internal,internal_aux,final,all,all_aux --seeds 0-2

One run: `python train.py --config configs/chase.py:final`. No download.
Argument: VARIANT, final unless given; nothing else differs between variants.

Where a token is predicted with a margin, cross-entropy pulls the last hidden
state outward, and no final norm is there to make that pull vanish
(arXiv:2602.10408 (v1), Propositions 4.1 and 4.2). Natural text hides it for
long: its uncertain tokens set the scale of the logits, and 4,000 steps on bytes
of TinyStories made a factor of 2. Here (taperjax/data/alphabet.py) all but one
token in 33 are certain, and the uncertain one, which holds all the loss, 0.124
nats per token, would show a run that diverges. Mean logit norm at the end and
validation loss, seeds 0, 1 and 2 (code of commit cdbdb1f, jax 0.10.2, all 18
runs in 19 minutes on two cores):

  baseline           64      73      83    0.1233  0.1233  0.1233
  internal           65      71      86    0.1233  0.1233  0.1233
  internal_aux       65     104      72    0.1236  0.1234  0.1234
  final           1,497   1,112     933    0.1234  0.1233  0.1234
  all             7,685   8,637  16,615    0.1237  0.1235  0.1235
  all_aux            68      76      74    0.1236  0.1235  0.1235

With a rate of 3e-3 falling to 0, final ended at 3 times the baseline. 2,000
steps do for final and all too, but then the baseline has not caught up with
all_aux, 1.4 times above it. Under `internal` s(h) reaches 2e7; the final norm
divides it away.
"""

from ml_collections import config_dict

from configs import tinystories


def get_config(variant: str = "final") -> config_dict.ConfigDict:
  """A short run on the alphabet; other fields as in tinystories."""
  c = tinystories.get_config(f"1m,{variant}")
  c.size = "chase"
  c.steps = 3_000
  c.batch_size = 16  # windows
  c.context_len = 32  # tokens: about one document

  c.model.num_layers = 2
  c.model.embed_dim = 32
  c.model.num_heads = 4

  c.taper.start = 0.05  # share of the steps; the paper's
  c.taper.end = 0.2  # an early end leaves time to chase

  c.optimizer.learning_rate = 1e-2  # peak
  c.optimizer.final_learning_rate = 1e-3  # at 0 the chase would end

  c.data.train = "alphabet"
  c.data.valid = "alphabet"
  c.data.tokenizer = "bytes"
  c.data.vocab_size = None  # 257

  c.eval.prompt = "wxyz"
  c.eval.sample_tokens = 13  # to the end of the document
  return c
