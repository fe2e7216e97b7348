"""Compares twostep with other servers: starts each by its command, and runs the load test's scenarios on it.

It is no part of `loadtest`, which speaks HTTP only and starts nothing; it uses that package's load and statistics.
Linux only: /proc has the CPU time of a server's processes, and of all others on the machine.
"""
