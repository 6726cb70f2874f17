# Makes, addresses and moves network interfaces.
import fcntl
import socket
import struct

link = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
address = struct.pack("16sHHI8x", b"lo", socket.AF_INET, 0, 0x0100000A)
refused(lambda: fcntl.ioctl(link, 0x8916, address), "address")
refused(lambda: fcntl.ioctl(link, 0x8914, struct.pack("16sH14x", b"lo", 0)), "flags")
refused(lambda: open("/dev/net/tun", "r+b"), "tun")
names = [line.split(":")[0].strip() for line in open("/proc/self/net/dev") if ":" in line]
if names != ["lo"]:
    breach(names)
end()
