"""Weights in the formats in which models are published, written by their definitions, and what they stand for."""
