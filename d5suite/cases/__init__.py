"""Cases: the subjects of measurements, as a user declares them.

Imports the neutral settings and descriptions only.
"""
