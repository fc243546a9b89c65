"""The process that runs one job; it imports a framework only through its backend."""
