"""The one exception type for mistakes that the user can mend."""

from __future__ import annotations

_LONGEST = 2_000  # characters; a damaged file may hold a name of a megabyte


class UserError(ValueError):
  """A mistake of the user, told in one line: field, value, rule, remedy.

  The command line prints the message alone and exits with 2; every other
  exception is a fault of ours and keeps its traceback. What is quoted may come
  from a hostile file: characters that are not printable are written as escapes,
  and the middle of a very long message is left out.
  """

  def __init__(self, message: str):
    if len(message) > _LONGEST:
      half = _LONGEST // 2
      message = f"{message[:half]} ... {message[-half:]}"
    super().__init__(
      "".join(c if c.isprintable() else repr(c)[1:-1] for c in message)
    )
