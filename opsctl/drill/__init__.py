"""Drills: a real fault, injected into a real server at a random moment, and how it was seen, captured, mended and over."""
