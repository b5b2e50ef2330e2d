"""HTTP: requests in, answers out; everything a client of the API touches."""
