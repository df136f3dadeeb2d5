"""One file a signal; each gives a value or the reason why there is none."""
