"""Which of several replicas of the server takes a request. Plain values: no I/O, no clock, nothing of other packages,
so that every router can use it, and a simulator."""
