"""UserError: one line that a terminal can show, whatever is quoted in it."""

from taperjax.errors import UserError


def test_what_is_quoted_cannot_break_the_line_or_steer_the_terminal():
  """Names in a hostile file hold line breaks, colours and half characters."""
  error = UserError("name='a\nb\x1b[2J\u202e\ud800' is ▁ wrong\xa0; mend é")
  assert str(error) == (
    r"name='a\nb\x1b[2J\u202e\ud800' is ▁ wrong\xa0; mend é"
  )
  assert str(error).encode().decode().isprintable()


def test_a_long_message_keeps_its_field_and_its_remedy():
  error = str(UserError(f"name={'x' * 10**6} is wrong; mend the file"))
  assert len(error) < 2_100
  assert error.startswith("name=xxx") and error.endswith("; mend the file")
