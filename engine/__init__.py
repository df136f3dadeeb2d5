"""The engine: what serves. `cli.py` is the way in, `launch/launcher.py` the parent process."""
