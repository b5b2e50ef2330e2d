"""The decode pool: reserves, receives KV blocks, and generates."""
