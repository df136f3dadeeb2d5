"""Who drafts, and the one function that decides what is accepted."""
