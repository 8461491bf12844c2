"""Video through a network: frames read, prepared, answered, drawn and written in stages that overlap."""
