# Spends CPU time in processes that each stay below the limit. expect: time_limit | limits: cpu_seconds=1 wall_seconds=20
for _ in range(5):
    os.fork()
while True:
    pass
