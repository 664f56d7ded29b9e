"""HTTP: an ASGI application over an engine."""
