# Runs programs that the system, or itself, has marked set-user-id.
cp /bin/bash shell && chmod u+s,g+s shell 2>/dev/null
[ "$(./shell -p -c 'id -u')" = 0 ] && echo "BREACH own copy"
for program in su sudo mount pkexec newgrp passwd; do
    path=$(command -v "$program") || continue
    [ "$(echo | timeout 3 "$path" -c 'id -u' 2>/dev/null)" = 0 ] && echo "BREACH $program"
done
echo end
