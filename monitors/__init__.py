"""What watches: hang-monitor."""
