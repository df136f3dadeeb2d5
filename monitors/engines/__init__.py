"""Dialects: what differs between SGLang, vLLM and the bundled engine, one file of data an engine."""

from monitors.engines.dialect import Dialect, DialectError, load, names

__all__ = ["Dialect", "DialectError", "load", "names"]
