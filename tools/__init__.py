"""What makes the files that twostep ships; nothing here is installed."""
