"""A report of a bundle: ``report.html`` for a browser, ``report.md`` for a ticket, drafts of an incident and an
upstream bug report. Every number in them is read from an artefact and cites it."""

from monitors.report.render import incident, markdown, page, upstream, write

__all__ = ["incident", "markdown", "page", "upstream", "write"]
