"""Processes of one job each: started, watched and ended, with what the machine did meanwhile."""
