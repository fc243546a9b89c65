"""The neutral training loop: epochs of steps, evaluation off the clock, events, checkpoints.

The loop takes a `d5suite.levels.training.Trainer` and batches of NumPy arrays, of any framework.
Imports the contract, `d5suite.optimizers`, metrics and the clock.
"""
