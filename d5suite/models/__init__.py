"""Models of a training step: its memory and its time on a machine that a file describes.

A model takes counts and a machine file, and needs no framework. Imports `d5suite.errors` and
`d5suite.files`.
"""
