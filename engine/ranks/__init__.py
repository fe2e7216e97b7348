"""Several processes of one host that compute a model together: started, led step by step, and ended."""
