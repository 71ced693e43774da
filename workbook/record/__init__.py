"""Recordings: the suites of the papers, campaigns, replays, and the networks of the zoo."""
