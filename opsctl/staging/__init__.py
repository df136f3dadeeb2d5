"""A deployment of ours on this machine, with monitor, pager and clients: what the demo and the drills play on."""
