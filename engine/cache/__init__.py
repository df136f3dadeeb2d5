"""KV memory by page: the pool, the prefix cache, and who owns what."""
