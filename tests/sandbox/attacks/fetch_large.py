# Leaves more than anybody would want to carry. fetch: a b c | limits: file_size_mb=40 disk_mb=130
for name in "abc":
    with open(name, "wb") as file:
        for _ in range(30):
            file.write(bytes(1 << 20))
end()
