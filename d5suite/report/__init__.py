"""What people read: comparison tables and files beside the results. Knows results, never adapters."""
