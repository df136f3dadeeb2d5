"""The incident, played on one machine."""
