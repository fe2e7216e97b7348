"""The bodies that cross the wire: requests as pydantic models that refuse, responses as models that document."""
