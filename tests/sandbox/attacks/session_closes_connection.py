# session: closes the connection that its answers take.
os.close(3)
