"""Models whose queries and keys are convolved over tokens, and half of whose values are of the token before (ZAYA)."""
