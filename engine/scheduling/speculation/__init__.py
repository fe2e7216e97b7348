"""Which draft tokens a step verifies: who proposes them, how many, and whether they pay."""
