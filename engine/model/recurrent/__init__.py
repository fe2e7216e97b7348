"""Recurrent layers of transformers that have no function of their own to replace: they are replaced as a whole."""
