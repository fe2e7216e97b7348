"""How long a step takes: predicted from earlier steps, at least by this machine's roofline, and as traced."""
