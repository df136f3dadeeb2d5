"""A day that happened, replayed in compressed time on two real systemd nodes: its steps as a document, its figures beside ours."""
