"""The leaderboard: every method, with and without ALA, in the same settings."""
