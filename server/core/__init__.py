"""Values that all packages of the server use: errors over HTTP, the record of one HTTP request, timings, prompts."""
