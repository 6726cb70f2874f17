"""Shared parts of the HTTP servers: listening sockets, limits on connections and requests, bearer tokens, metrics."""
