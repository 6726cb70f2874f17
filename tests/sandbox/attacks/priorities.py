# Gives itself more than its share: priority, real-time scheduling, immunity from the out-of-memory killer, no limits.
import resource

refused(lambda: os.nice(-10), "nice")
refused(lambda: os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(10)), "real-time")
refused(lambda: open("/proc/self/oom_score_adj", "w").write("-1000"), "oom_score_adj")
for name in ("CPU", "AS", "NPROC", "FSIZE", "NOFILE", "CORE", "MEMLOCK"):
    which = getattr(resource, f"RLIMIT_{name}")
    hard = resource.getrlimit(which)[1]
    if hard == resource.RLIM_INFINITY:
        breach(f"no limit of {name}")
    refused(lambda: resource.setrlimit(which, (hard + 1, hard + 1)), name)
if resource.getrlimit(resource.RLIMIT_CORE) != (1, 1):  # 0 would forbid files, but not a program of the host's core_pattern
    breach("a crash starts a program of the host")
for name, code in (("RTPRIO", 14), ("NICE", 13), ("MSGQUEUE", 12), ("SIGPENDING", 11)):
    if resource.getrlimit(code)[1] > {"MSGQUEUE": 1 << 16, "SIGPENDING": 1024}.get(name, 0):
        breach(f"the host's own limit of {name}")
end()
