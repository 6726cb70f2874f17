# Makes empty files without end.
made = 0
try:
    while made < 100_000:
        open(f"/tmp/{made}", "w").close()
        made += 1
except OSError:
    pass
if made > 25_000:
    breach(made)
end()
