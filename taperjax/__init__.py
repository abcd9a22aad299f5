"""taperjax: transformers whose normalization tapers away and folds.

The interface lies in `taperjax.api` and is imported when first used:

    model = taperjax.load("runs/a")             # any checkpoint
    model = taperjax.init(model_config, seed=0)
    logits = taperjax.apply(model, tokens)
    model = taperjax.calibrate(model, batches)
    folded = taperjax.fold(model)
    texts = taperjax.generate(folded, ["Once upon a time"])
    losses = taperjax.evaluate(folded, tokens)
    found = taperjax.probe(model, tokens)       # which norms are free to remove
"""

from __future__ import annotations

from typing import Any

__version__ = "0.1.0"
__all__ = [
  "Model",
  "apply",
  "as_int8",
  "calibrate",
  "evaluate",
  "evaluate_tails",
  "fold",
  "generate",
  "init",
  "load",
  "probe",
]


def __getattr__(name: str) -> Any:
  if name in __all__:
    from taperjax import api

    return getattr(api, name)
  raise AttributeError(f"module 'taperjax' has no attribute {name!r}")


def __dir__() -> list[str]:
  return sorted([*globals(), *__all__])
