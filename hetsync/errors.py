"""Mistakes that a user can mend."""


class UserError(ValueError):
    """Bad input: one sentence that names the key, the value and the remedy.

    The command line prints it once for the whole job, without a traceback, and the job ends non-zero.
    """
