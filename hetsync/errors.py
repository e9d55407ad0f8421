"""Mistakes that a user can mend, and how users hear of what goes wrong."""

import sys


class UserError(ValueError):
    """Bad input: one sentence that names the key, the value and the remedy.

    The command line prints it once for the whole job, without a traceback, and the job ends non-zero.
    """


def complain(sentence: str) -> None:
    """Tell whoever started the job, on standard error."""
    print(f"hetsync: {sentence}", file=sys.stderr, flush=True)
