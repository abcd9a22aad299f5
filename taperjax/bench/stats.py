"""Paired ratios of times, and whether they are resolved.

Forms are timed in turn, A B C A B C, so a disturbance of the machine meets both
members of a pair. The median of the ratios has an interval that assumes no
distribution.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

HALF_WIDTH = 0.03  # of the ratio: a wider interval is "not resolved"


def median_ranks(count: int) -> tuple[int, int] | None:
  r"""Indices of the sorted sample that enclose its median with 95 percent.

  The number of values below the true median is binomial (n, 1/2): the k-th
  smallest and the k-th largest enclose it with 1 - 2 P(X < k), and k is the
  largest for which that is at least 0.95.

  Returns:
    (low, high), from 0; or None below 6 values, where no two enclose it.
  """
  below, k = 0.0, 0
  while True:
    below += math.comb(count, k) * 0.5**count
    if 2 * below > 0.05 or k > count // 2:
      break
    k += 1
  return None if k == 0 else (k - 1, count - k)


def spread(values: Sequence[float]) -> dict[str, float]:
  """median, and the quartiles q1 and q3, in the unit of the values."""
  q1, _, q3 = (
    statistics.quantiles(values, n=4, method="inclusive")
    if len(values) > 1 else [values[0]] * 3
  )
  return {"median": statistics.median(values), "q1": q1, "q3": q3}


def paired_ratio(
  slow: Sequence[float], fast: Sequence[float]
) -> dict[str, Any]:
  """How many times faster the second form is.

  Args:
    slow, fast: seconds of the first and the second form, pair by pair.

  Returns:
    ratio, the median of slow / fast; low and high, its 95 percent interval,
    None with fewer than 6 pairs; half_width, of the interval as a share of the
    ratio; resolved, whether that is at most `HALF_WIDTH`.
  """
  ratios = sorted(a / b for a, b in zip(slow, fast, strict=True))
  ratio = statistics.median(ratios)
  ranks = median_ranks(len(ratios))
  if ranks is None:
    found = {"low": None, "high": None, "half_width": None, "resolved": False}
    return {"ratio": ratio, **found}
  low, high = ratios[ranks[0]], ratios[ranks[1]]
  half = (high - low) / 2 / ratio
  return {
    "ratio": ratio, "low": low, "high": high, "half_width": half,
    "resolved": half <= HALF_WIDTH,
  }


def ratio_text(found: dict[str, Any]) -> str:
  """A cell of the table: the ratio and its interval, or "not resolved"."""
  if found["low"] is None:
    return "not resolved (too few pairs)"
  text = f"{found['ratio']:.3f} [{found['low']:.3f}, {found['high']:.3f}]"
  return text if found["resolved"] else f"not resolved: {text}"
