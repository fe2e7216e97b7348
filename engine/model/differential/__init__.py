"""Models with differential attention (DiffLlama): their layers, over the paged cache."""
