"""From a checkpoint to a model that runs: loading, choosing how its layers run, and what it and the machine can do."""
