"""Architectures, weights and how they are split over ranks."""
