"""The one kind of error that a user is meant to read."""


class UserError(ValueError):
    """A mistake in what the user asked for, in one sentence: what was wrong, where, and what would be right."""


class RunError(Exception):
    """A run that cannot go on, for no fault of its input: one sentence. What it had finished is kept."""
