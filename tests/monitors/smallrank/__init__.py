"""A small engine rank: a real process with a main thread, a stream thread and a real black box, that can be told to
work, to rest, and to stand still in each of the ways that a real rank does."""
