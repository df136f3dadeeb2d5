"""Reproduction of a fault: experiments as data, with held concurrency, counts, and the sentence that they support."""
