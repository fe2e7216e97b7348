"""The engine process and its life: `python -m engine.process`, its connection, supervision, restarts after a death."""
