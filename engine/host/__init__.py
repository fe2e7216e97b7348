"""What this machine and its libraries must be told before they serve: memory, huge pages, imports, vector math.

Knows nothing of requests or models.
"""
