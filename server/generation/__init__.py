"""What all generating endpoints share: request validation, plans, sampling parameters, fan-out, usage and streaming."""
