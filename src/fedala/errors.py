"""The one kind of error that a user is meant to read."""


class UserError(ValueError):
    """A mistake in what the user asked for, in one sentence: what was wrong, where, and what would be right."""
