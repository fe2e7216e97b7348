"""The loaded model, and the states of the app around it: loading, ready, draining, stopped."""
