"""JSON Schemas of d5suite's files."""
