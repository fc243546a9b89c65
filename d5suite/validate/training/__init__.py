"""Level 2: the loss and the parameters over several steps. Imports no framework."""
