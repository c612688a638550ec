"""The one exception that means "the user asked for something that cannot be"."""


class UsageError(ValueError):
    """A user's mistake. Its message is one line that holds the numbers and what to do.

    Every command catches it in `main`, prints it on stderr and exits with status 2; nothing else
    is caught there, so a defect of ours keeps its traceback.
    """
