"""Learning on source domains."""
