"""What a user can put right."""


class UserError(Exception):
    """Bad input, in one line that says what to change. The command line prints it alone and exits with code 2."""
