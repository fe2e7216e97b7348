"""What one client may cost."""
