"""What every part of the server speaks: errors, the record of one HTTP request, and small values."""
