"""One file per group of routes; all bodies in and out are JSON."""
