"""How a job's processes start, are bounded, and end. Imports the standard library and psutil; knows jobs, not adapters."""
