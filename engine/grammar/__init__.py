"""Constrained decoding: backends, compile pool and cache, masks."""
