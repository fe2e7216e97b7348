"""Tools that make files which twostep ships; the tools themselves are not installed."""
