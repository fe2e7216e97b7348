"""What a model will take here, told before its weights are loaded."""
