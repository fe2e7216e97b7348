"""How weights are packed, quantized and multiplied: a row's product depends on that row alone, to the last bit."""
