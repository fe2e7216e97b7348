"""Set-up of this machine and its libraries before serving: memory, huge pages, imports, vector math.

Nothing here knows requests or models.
"""
