"""A train step with its logits in chunks, and with all of them at once.

  python -m tests.cross_entropy CONFIG [--repeats=N] [--config.NAME=VALUE ...]

Times both in turn and prints the temporary memory of each compiled step. With
--repeats=0 it compiles alone. CONFIG is of a baseline: its step is loss
and update alone.
"""

from __future__ import annotations

import argparse
from unittest import mock

import jax
import jax.numpy as jnp

from taperjax import cli, step as step_lib
from taperjax.bench import stats, train


def whole(h_TD, kernel_DV, bias_V, target_T, weight_T):
  """`losses.token_cross_entropy` as one writes it first, left to autodiff."""
  z_TV = jnp.dot(h_TD, kernel_DV, preferred_element_type=jnp.float32)
  if bias_V is not None:
    z_TV = z_TV + bias_V[None, :]
  nll_TV = -jax.nn.log_softmax(z_TV)
  nll_T = jnp.take_along_axis(nll_TV, target_T[:, None], axis=-1)[:, 0]
  norm_T = jax.lax.stop_gradient(jnp.linalg.norm(z_TV, axis=-1))
  return jnp.dot(weight_T, nll_T), jnp.dot(weight_T, norm_T)


def whole_logits():
  """Steps traced in here have `whole` for the chunks."""
  return mock.patch.object(step_lib.losses, "token_cross_entropy", whole)


def timers(config) -> dict[str, train.Timer]:
  found = {"chunks": train.Timer(config, "baseline")}
  with whole_logits():
    found["whole"] = train.Timer(config, "baseline")
  return found


def main() -> None:
  parser = argparse.ArgumentParser()
  parser.add_argument("config")
  parser.add_argument("--repeats", type=int, default=20)
  args, fields = parser.parse_known_args()
  config = cli.load_config(args.config)
  cli._set_fields(config, args.config, fields)
  config = cli._whole_config(config)
  if config.taper_steps is not None or args.repeats < 0:
    parser.error("give a baseline, and repeats from 0")
  both = timers(config)
  for name, timer in both.items():
    megabytes = timer.temporary_bytes() / 1e6
    print(f"{name}: {megabytes:,.0f} MB of temporary memory")
  if not args.repeats:
    return
  seconds = {name: [] for name in both}
  for again in range(args.repeats + 1):
    for name, timer in both.items():
      taken = timer.seconds()
      if again:
        seconds[name].append(taken)
  ratio = stats.paired_ratio(seconds["whole"], seconds["chunks"])
  ms = 1e3 * stats.spread(seconds["chunks"])["median"]
  print(f"whole / chunks {stats.ratio_text(ratio)}; chunks {ms:,.0f} ms")


if __name__ == "__main__":
  main()
