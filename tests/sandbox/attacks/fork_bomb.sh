# The shell's fork bomb. expect: finished time_limit killed_by_itself | limits: wall_seconds=1 processes=40
bomb() { bomb | bomb & }
bomb
wait
sleep 5
