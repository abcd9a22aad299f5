"""Configs drawn inside the ranges of the fields: each trains, folds and writes.

Three steps are one of each phase. The short form draws a few of them, and
`TAPERJAX_DRAWS=200` more. Meshes and several seeds have tests of their own.
"""

from __future__ import annotations

import os
import random

import jax
import numpy as np
import pytest

from taperjax import (
  config as config_lib,
  decode,
  fakeln,
  folding,
  gate as gate_lib,
  lora,
  state as state_lib,
  step as step_lib,
)
from tests import tiny

DRAWS = int(os.environ.get("TAPERJAX_DRAWS", "3"))
STEPS = 3


@pytest.fixture(autouse=True)
def quick_programs():
  """They run once: what counts is the time to make them."""
  jax.config.update("jax_disable_most_optimizations", True)
  yield
  jax.config.update("jax_disable_most_optimizations", False)
  jax.clear_caches()


def spread(rng: random.Random, low: float, high: float) -> float:
  """Evenly in the logarithm."""
  return float(np.exp(rng.uniform(np.log(low), np.log(high))))


def draw(rng: random.Random) -> dict:
  """Changes for `tiny.fields`; numbers from the whole range of each field."""
  most, norms = config_lib._MOST, ("attn_norm", "mlp_norm")
  variant = rng.choice(list(config_lib.VARIANTS))
  internal, final, _ = config_lib.VARIANTS[variant]
  rate = spread(rng, 2.0**-126, most["optimizer.learning_rate"])
  micro = rng.choice((1, 1, 2, 3))
  changes = {
    "variant": variant,
    "seeds": (rng.randrange(2**31),),
    "steps": STEPS,
    "nonfinite": rng.choice(("stop", "skip")),
    "batch_size": micro * rng.choice((1, 2)),
    "micro_batches": micro,
    "compute_dtype": rng.choice(("float32", "bfloat16")),
    "taper__start": 1 / 3,
    "taper__end": rng.choice((2 / 3, 1.0)),
    "taper__ema_rate": rng.choice((None, spread(rng, 1e-6, 1.0))),
    "taper__scale_loss_weight": spread(
      rng, 2.0**-126, most["taper.scale_loss_weight"]
    ),
    "optimizer__learning_rate": rate,
    "optimizer__final_learning_rate": rng.choice((0.0, rate)),
    "optimizer__warmup": rng.choice((0.0, rng.random(), 1.0)),
    "optimizer__b1": rng.choice((0.0, rng.random(), most["optimizer.b1"])),
    "optimizer__b2": rng.choice((0.0, rng.random(), most["optimizer.b2"])),
    "optimizer__eps": spread(rng, 1e-16, most["optimizer.eps"]),
    "optimizer__clip_norm": spread(rng, 2.0**-126, 2.0**126),
    "model__remat": rng.choice((True, False)),
  }
  if variant == "fakeln":
    names = ("gap_mlp", "gap_qk", "gap_v", "eot_after", "position0_after")
    changes |= {f"fakeln__{name}": 0 for name in names} | {
      "fakeln__start": 1,
      f"fakeln__{rng.choice(names[3:])}": 1,
      "fakeln__momentum": rng.choice((0.0, most["fakeln.momentum"])),
    }
  else:
    changes |= {
      "taper__shape": rng.choice(("cosine", "linear", "step")),
      "taper__calibrate": rng.choice((True, False)),
      "taper__train_gain": rng.choice((True, False)),
      "taper__scale_loss_schedule": rng.choice(("constant", "taper")),
    }
  if (internal or final) and rng.randrange(3) == 0:
    kinds = [*norms * internal, *["final_norm"] * final]
    changes["taper__sites"] = (rng.choice(kinds),)
  if variant != "fakeln" and rng.randrange(4) == 0:
    changes |= {f"model__{name}": None for name in tiny.fields()["model"]}
    changes |= {"norm": None, "context_len": rng.choice((None, 1, 5)),
                "init__checkpoint": "x", "data__tokenizer": "init",
                "data__vocab_size": None}
    return changes | {
      "lora__rank": rng.choice((0, 1, 9)),
      "lora__alpha": spread(rng, 2.0**-126, most["lora.alpha"]),
      "lora__targets": tuple(rng.sample(config_lib.LORA_TARGETS, 3)),
    }
  heads, kv_heads = rng.choice(((1, 1), (2, 2), (4, 2), (4, 1)))
  head_dim = rng.choice((None, 2, 5, 6))
  mlp, tied = rng.choice(("swiglu", "gelu_tanh", "gelu")), rng.choice((0, 1))
  no_bias = {"head": tied, "gate": mlp != "swiglu"}
  biases = [n for n in config_lib.BIASES if not no_bias.get(n)]
  return changes | {
    "norm": rng.choice(("rms", "layer")),
    "context_len": rng.choice((2, 5)) if variant == "fakeln" else rng.choice(
      (1, 2, 5)
    ),
    "model__num_layers": rng.randrange(1, 4),
    "model__embed_dim": rng.choice((1, 3, 8)) if head_dim else heads * 2,
    "model__num_heads": heads,
    "model__num_kv_heads": kv_heads,
    "model__head_dim": head_dim,
    "model__mlp_dim": rng.choice((None, 1, 20)),
    "model__mlp": mlp,
    "model__positions": "learned" if head_dim == 5 else rng.choice(
      ("rope", "learned")
    ),
    "model__rope_theta": spread(rng, 1.0, 2.0**126),
    "model__norm_eps": spread(rng, 2.0**-126, 2.0**126),
    "model__biases": tuple(rng.sample(biases, rng.randrange(4))),
    "model__tied": bool(tied),
    "model__init_std": spread(rng, 2.0**-126, most["model.init_std"]),
    # Blocks that are scanned must be alike.
    "model__scan_layers": variant != "fakeln" and rng.choice((True, False)),
    "optimizer__weight_decay": rng.choice(
      (0.0, spread(rng, 2.0**-126, most["optimizer.weight_decay"]))
    ),
  }


def train(config: config_lib.Config, initial: dict | None):
  """(params, c, model) after three steps, and their losses."""
  state, losses, phases = state_lib.start(config, initial), [], set()
  shape = (config.batch_size, config.context_len)
  for k in range(1, STEPS + 1):
    rng = np.random.default_rng(k)
    tokens = rng.integers(0, tiny.V, (shape[0], shape[1] + 1), np.int32)
    phase = gate_lib.phase(k, config.taper_steps)
    phases.add(phase)
    step = step_lib.make_train_step(config, phase)
    state, metrics = step(state, tokens, np.ones(shape, np.float32))
    losses += [metrics["loss"], metrics["grad_norm"]]
    if config.tapers and k == config.taper_steps.start:
      state = step_lib.make_calibrate(config)(state)
  if config.tapers:
    assert gate_lib.SCALE in phases and gate_lib.NORM in phases
    assert state.gate == 0
  params, c = jax.device_get((state.params, state.taper.c))
  params, model = lora.merge(params, config.lora), config.model
  if config.cuts:
    params, c, model = fakeln.to_taper(params, c, model)
  return params, c, model, jax.device_get(losses)


@pytest.mark.parametrize("number", range(DRAWS))
def test_a_drawn_config_trains_folds_and_generates(number):
  """All is finite, and the folded model is the unfolded one."""
  changes = draw(random.Random(number))
  initial = model = None
  if "init__checkpoint" in changes:
    model = tiny.model_config(internal_norm="norm", final_norm="norm")
    initial = tiny.params(model)
  config = config_lib.parse(tiny.fields(**changes), model)
  config = config.with_vocab(tiny.V, eot_id=3)
  params, c, model, losses = train(config, initial)
  for leaf in (*losses, *jax.tree.leaves(params), c):
    assert np.isfinite(leaf).all(), changes
  forms = {"own": (params, model, c, 0.0)}
  if config.ends_without_norms:
    folded, folded_model = folding.fold(params, c, model)
    forms["folded"] = (folded, folded_model, None, 1.0)
    found = folding.compare(
      params, c, model, folded, folded_model, tiny.tokens(2, config.context_len
      + 1), np.ones((2, config.context_len), np.float32),
    )
    bound = 1e-5 * max(1.0, found["logit_scale_f32"])
    assert found["max_abs_delta_logit_f32"] <= bound, (found, changes)
  if config.context_len == 1:  # has no room for another token
    return
  for name, (params, model, c, gate) in forms.items():
    [ids] = decode.generate(
      params, model, [[1]], max_new=3, gate=gate, c=c, window=True
    )
    assert len(ids) == 3 and 0 <= min(ids) <= max(ids) < tiny.V, name
