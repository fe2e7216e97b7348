"""HTTP below ASGI: uvicorn's protocol with bounds on what one connection may cost."""
