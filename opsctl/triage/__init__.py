"""Triage: what is the matter with a deployment, in one read-only look under one deadline."""
