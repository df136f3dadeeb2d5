"""A guarded change of a deployment's flags: proven by real completions, reverted by itself when it is not."""
