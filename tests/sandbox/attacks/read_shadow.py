# Reads the host's password files.
refused(lambda: open("/etc/shadow").read(), "shadow")
refused(lambda: open("/etc/gshadow").read(), "gshadow")
users = open("/etc/passwd").read().splitlines()
if len(users) > 2:
    breach("the host's users")
end()
