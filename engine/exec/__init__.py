"""One rank's work: streams, layout, forward pass, drawing, committing."""
