"""Requests of a rollout's own, from the plainest to the most demanding, and what their answers must be like."""
