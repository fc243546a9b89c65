"""Level 3: the weights after steps of several ranks. Imports no framework."""
