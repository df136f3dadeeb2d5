"""The parent process: children, watchdog, evidence, sd_notify, other nodes."""
