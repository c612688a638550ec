"""Tables that others published, recomputed and audited."""
