"""Tables that others published, audited."""
