"""Plain values that every part speaks: settings, requests, batches, outputs, messages, errors. No torch, no I/O."""
