# Writes kernel settings that run programs on the host: core_pattern, modprobe, a cgroup's release agent.
import glob

for path in ("core_pattern", "modprobe", "hotplug", "poweroff_cmd"):
    refused(lambda: open(f"/proc/sys/kernel/{path}", "w").write("|/bin/false"), path)
refused(lambda: open("/proc/sysrq-trigger", "w").write("h"), "sysrq")
for path in ["/sys/fs/cgroup", *glob.glob("/sys/kernel/uevent*")]:
    refused(lambda: open(path + "/release_agent", "w"), path)
end()
