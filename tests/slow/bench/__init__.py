"""``make bench``: how fast the engine serves, beside transformers' own generate in the same run.

A program for developers, and so not a command of opsctl: it needs torch and transformers, which opsctl never loads
and an installed Lastbatch need not have, and it starts servers of its own with settings that it chooses.
"""
