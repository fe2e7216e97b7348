"""What a step takes: as predicted from steps before, at best on this machine, and as traced."""
