"""Runbooks: what a person does at 05:41, as text that can be read and as steps that can be run."""
