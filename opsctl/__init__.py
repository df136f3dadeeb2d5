"""What a person does: opsctl."""
