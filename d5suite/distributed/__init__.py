"""Ranks that train together: communicators, collective algorithms and schemes.

Imports `d5suite.levels` and `d5suite.errors`; a communicator's module imports its transport.
"""
