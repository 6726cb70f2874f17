# Leaves jobs in the background, with and without a hang-up.
sleep 600 &
nohup sleep 600 >/dev/null 2>&1 &
setsid sleep 600 </dev/null >/dev/null 2>&1 &
disown -a
echo end
