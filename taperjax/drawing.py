"""matplotlib without a window, and without files in the home folder."""

from __future__ import annotations

import contextlib
import os
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from typing import Any


@contextlib.contextmanager
def drawing(settings: Mapping[str, Any] | None = None) -> Iterator[None]:
  """Settings hold inside alone; a text may hold a dollar, or any letter."""
  with contextlib.ExitStack() as stack:
    if "MPLCONFIGDIR" not in os.environ:
      folder = stack.enter_context(tempfile.TemporaryDirectory())
      os.environ["MPLCONFIGDIR"] = folder
      stack.callback(os.environ.pop, "MPLCONFIGDIR", None)
    import matplotlib

    settings = {"text.parse_math": False, **(settings or {})}
    stack.enter_context(matplotlib.rc_context(settings))
    stack.enter_context(warnings.catch_warnings())
    warnings.filterwarnings("ignore", "Glyph .* missing from")
    yield
