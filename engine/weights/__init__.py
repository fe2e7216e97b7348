"""Packs, quantizes and multiplies weights, batch-invariantly: a row's product depends on that row alone."""
