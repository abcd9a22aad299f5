"""The one exception type for mistakes that the user can mend."""

from __future__ import annotations


class UserError(ValueError):
  """A mistake of the user, told in one line: field, value, rule, remedy.

  The command line prints the message alone and exits with 2; every other
  exception is a fault of ours and keeps its traceback.
  """
