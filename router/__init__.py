"""The front door: everything a client or a person touches."""
