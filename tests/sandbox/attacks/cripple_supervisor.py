# Takes from the supervisor, which is the same user, the files, time and priority it needs to watch. limits: memory_mb=256
import resource

for which in range(16):
    refused(lambda: resource.prlimit(1, which, (0, 0)), f"limit {which}")
refused(lambda: os.sched_setaffinity(1, {0}), "affinity")
refused(lambda: os.sched_setscheduler(1, os.SCHED_IDLE, os.sched_param(0)), "scheduler")
refused(lambda: os.sched_setparam(1, os.sched_param(0)), "parameter")
refused(lambda: os.setpriority(os.PRIO_PROCESS, 1, 19), "priority")
refused(lambda: os.setpriority(os.PRIO_USER, 0, 19), "priority of the user")
refused(lambda: os.setpriority(os.PRIO_USER, 1000, 19), "priority of the user by number")
denied(lambda: syscall(number(251, 30), 1, 1, (3 << 13)), "input and output priority")
denied(lambda: syscall(number(251, 30), 3, 1000, (3 << 13)), "the same of the user")
denied(lambda: syscall(number(314, 274), 1, ctypes.create_string_buffer(48), 0), "sched_setattr")
for name in ("oom_score_adj", "autogroup", "timerslack_ns", "coredump_filter", "comm", "sched", "setgroups", "uid_map"):
    refused(lambda: open(f"/proc/1/{name}", "w").write("0"), name)
end()
