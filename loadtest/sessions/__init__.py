"""Agent sessions: conversations of several turns, each of which goes on from the answers before it."""
