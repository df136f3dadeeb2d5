"""Playbooks that ship with Lastbatch: `importlib.resources.files("playbooks")`. A site's own folder comes first."""
