# Connects with the shell's own sockets and with whatever client is installed.
port=$(echo "$1" | sed 's/.*"port": \([0-9]*\).*/\1/')
(exec 3<>"/dev/tcp/127.0.0.1/$port") 2>/dev/null && echo "BREACH tcp"
(exec 3<>"/dev/tcp/1.1.1.1/80") 2>/dev/null && echo "BREACH the world"
for client in curl wget nc; do
    command -v "$client" >/dev/null && timeout 3 "$client" "http://127.0.0.1:$port" >/dev/null 2>&1 && echo "BREACH $client"
done
echo end
