"""What a machine installs beside the code: the unit, a dashboard, alert rules."""
