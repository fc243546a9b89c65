"""Measurements of ranks that train together."""
