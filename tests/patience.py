"""How much longer than on a quiet machine a test waits: a deadline tells a hang from a wait, not a crowded machine from it."""

CROWDED = 3
