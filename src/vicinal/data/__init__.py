"""Images, domains, streams."""
