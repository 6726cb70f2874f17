# Replaces folders on the way to a file by links. fetch: one/two/secret
os.makedirs("one")
os.symlink(os.path.dirname(goals["file"]), "one/two")
os.chmod(".", 0)
end()
