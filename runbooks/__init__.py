"""Runbooks that ship with Lastbatch, one a verdict class: `importlib.resources.files("runbooks")`. A site's own folder comes first."""
