"""The two kinds of failure a user can meet, and the exit code of each."""


class UserError(Exception):
    """The input is wrong: the message names what, where, what was expected and what to change. Exit code 2."""


class RunError(Exception):
    """The run failed: the message names the first cause and, where there is one, its rank. Exit code 1."""
