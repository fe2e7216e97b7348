"""The asyncio side of the engine: admission, live requests, outputs. Imports no torch; talks to an engine process."""
