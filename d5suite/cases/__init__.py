"""Cases: what a user declares to be measured.

Imports the neutral settings and descriptions only.
"""
