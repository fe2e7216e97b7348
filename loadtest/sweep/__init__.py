"""Several loads, one after the other, as a table and a plot of latencies and throughput against the load."""
