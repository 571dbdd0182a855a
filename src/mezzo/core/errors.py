"""The one error a user is meant to read."""

from __future__ import annotations


class UserError(ValueError):
    """Bad input or usage: says what is wrong, where, and what to do, in one line.

    The command line prints it without a traceback and exits with code 2. Anything else that escapes is our bug
    (exit code 1).

    Args:
        what: what is wrong, without a final full stop.
        where: the file, row, field, module or option it was found in.
        todo: what the user can do about it, without a final full stop.
    """

    def __init__(self, what: str, *, where: str | None = None, todo: str | None = None) -> None:
        self.what, self.where, self.todo = what, where, todo
        text = f"{where}: {what}" if where else what
        super().__init__(" ".join((f"{text}. {todo}." if todo else f"{text}.").split()))
