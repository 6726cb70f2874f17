# Makes a file that claims to be enormous. fetch: huge
refused(lambda: os.truncate("huge", 1 << 50), "truncate")
with open("huge", "wb") as file:
    refused(lambda: file.truncate(1 << 40), "ftruncate")
    refused(lambda: os.posix_fallocate(file.fileno(), 0, 1 << 40), "fallocate")
end()
