"""Plain values that all parts of the engine share: settings, requests, batches, outputs, messages, errors. No torch, no
I/O."""
