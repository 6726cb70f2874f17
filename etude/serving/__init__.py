"""What HTTP servers share: a socket to listen on, limits on connections and requests, a bearer token."""
