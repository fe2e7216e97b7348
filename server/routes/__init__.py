"""The HTTP routes, one file per group; all bodies in and out are JSON."""
