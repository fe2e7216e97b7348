"""Makes a checkpoint a model that runs: loads it, chooses how its layers run, and measures it and the machine."""
