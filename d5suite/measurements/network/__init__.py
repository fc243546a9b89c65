"""Measurements of the network level."""
