"""The model: loading, attention over paged KV, steps, sampling."""
