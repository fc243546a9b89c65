"""Measurements of the training level."""
