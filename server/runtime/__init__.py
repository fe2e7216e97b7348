"""The loaded model and the life of the app around it: loading, serving, draining."""
