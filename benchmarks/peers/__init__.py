"""twostep beside other servers: starts each by its command, puts the load test's scenarios on it, and compares.

It is no part of `loadtest`, which talks HTTP only and starts nothing; it uses that package's load and statistics.
Linux only: /proc tells what a server's processes used, and what others took from it.
"""
