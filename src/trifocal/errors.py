"""The one exception that a person, not a program, is meant to read."""


class UserError(ValueError):
    """Bad input from a command line, a config or a file.

    The message is one clear line: what was given, what was expected, what to do. The command line prints it
    without a traceback and exits with status 2.
    """
