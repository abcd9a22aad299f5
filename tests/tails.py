"""Where a mean loss comes from: median and worst tokens of a folded run.

  python -m tests.tails WORKDIR

A model without norms may give a few tokens an enormous loss; the mean alone
does not tell these from a bad model.
"""

from __future__ import annotations

import argparse
import functools
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np

import taperjax
from taperjax import model as model_lib, saved
from taperjax.data import windows

LIMIT = 50.0  # nats; a uniform guess among 10,000 costs 9.2


@functools.partial(jax.jit, static_argnums=0)
def token_losses(config, params, tokens_BL1):
  logits_BLV, _ = model_lib.Transformer(config).apply(
    {"params": params}, tokens_BL1[:, :-1]
  )
  logp_BLV = jax.nn.log_softmax(logits_BLV)
  return -jnp.take_along_axis(logp_BLV, tokens_BL1[:, 1:, None], -1)[..., 0]


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("workdir", type=pathlib.Path)
  model = taperjax.load(parser.parse_args().workdir / "folded")
  losses = []
  for tokens_BL1, mask_BL in windows.eval_batches(
    saved.valid_tokens(model),
    batch_size=16,
    context_len=model.config.context_len,
  ):
    found_BL = token_losses(model.config, model.params, tokens_BL1)
    losses.append(np.asarray(found_BL)[mask_BL > 0])
  loss = np.concatenate(losses)
  print(
    json.dumps({
      "tokens": len(loss),
      "mean": float(loss.mean()),
      "median": float(np.median(loss)),
      "p99_9": float(np.percentile(loss, 99.9)),
      "largest": float(loss.max()),
      f"above_{LIMIT:g}": int((loss > LIMIT).sum()),
      "mean_of_the_rest": float(loss[loss <= LIMIT].mean()),
    })
  )


if __name__ == "__main__":
  main()
