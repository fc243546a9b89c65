"""How a job's processes start, are bounded, and end. Imports psutil; knows jobs, not adapters."""
