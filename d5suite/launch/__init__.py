"""Start, limits and end of a job's processes. Imports psutil; knows jobs, not adapters."""
