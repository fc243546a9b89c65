"""What people read: tables, plots and the schema of results. Knows results, never adapters."""
