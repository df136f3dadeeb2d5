"""The parts in C: sources, how they are compiled, and their Python signatures."""
