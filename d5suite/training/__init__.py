"""The neutral training loop: epochs of steps, evaluation off the clock, events, checkpoints.

The loop knows a `d5suite.levels.training.Trainer` and batches of NumPy arrays; which framework trains, it cannot tell.
Imports the contract, data, validation's metrics and measuring.
"""
