"""Pure functions of stored records: statistics, comparison, tables, charts, the report."""
