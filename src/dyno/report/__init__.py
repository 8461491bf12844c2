"""Everything that makes results readable: tables, charts, sentences of the verdict, the HTML page."""
