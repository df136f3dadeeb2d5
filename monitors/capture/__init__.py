"""Evidence: ordered probes, bundles, redaction."""
