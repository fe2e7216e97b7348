"""Models whose tokens weigh a bias of their scores by distance (Inkling): their layers are replaced."""
