# Writes into the sandbox's own code and the third-party packages.
for folder in ("/opt", "/opt/etude", "/opt/etude/guest", "/opt/etude/libraries-0"):
    refused(lambda: open(f"{folder}/{goals['marker']}.py", "w"), folder)
refused(lambda: open("/opt/etude/guest/fork_server.py", "a"), "fork_server")
refused(lambda: os.truncate("/opt/etude/guest/program.py", 0), "program")
end()
