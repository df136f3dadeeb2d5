"""Load on a served model: what is sent, how its answers come, and results that a later run can be held against."""
