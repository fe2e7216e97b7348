"""A simulator of many replicas in virtual time: the server's own scheduler and routing policies, with priced steps
instead of a model. Everything is a function of the settings and the seed."""
