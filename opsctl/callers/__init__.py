"""The kinds of clients of a deployment: what each sends, what it gets, and whether it gets it from this server."""
