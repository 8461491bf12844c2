"""One table and one chart as plain data, how the declared ones are found, and how a table is written in any format."""
