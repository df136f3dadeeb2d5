"""Playbooks: changes, responses, experiments and drills as documents that a person can read and ``opsctl`` carries out."""
