"""Typed messages and the authenticated sessions that carry them."""
