"""Service managers behind one protocol: systemd (here or over ssh) and a small supervisor of our own."""
