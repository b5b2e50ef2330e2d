"""KV blocks: identity, ownership, storage and the links that move them."""
