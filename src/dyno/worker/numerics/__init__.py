"""Where two runtimes part: graphs marked and cut, layers run alone on the reference's inputs, and their errors."""
