"""What is known of the modules of transformers, so that others compute what they do."""
