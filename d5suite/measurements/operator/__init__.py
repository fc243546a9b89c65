"""Measurements of the operator level."""
