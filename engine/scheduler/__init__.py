"""Rank 0's decisions and how every rank carries them out."""
