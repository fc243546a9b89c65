"""Optimizers and learning-rate schedules as neutral settings; imports `d5suite.errors` only."""
