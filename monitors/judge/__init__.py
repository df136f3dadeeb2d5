"""Pure judgement: no clock, no file, no process."""
