"""Between text and tokens: templates, detokeniser, stop strings, stream parsers."""
