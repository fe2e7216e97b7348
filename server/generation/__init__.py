"""What all generating endpoints do alike: the door, the plan, sampling, counting, streaming."""
