"""Settings of the server: flags, environment variables and the YAML file, in one definition."""
