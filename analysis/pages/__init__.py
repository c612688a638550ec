"""The offline page of a study: what is on it, its charts, and the HTML file itself."""
