"""The prefill pool: computes prompts and offers their KV blocks."""
