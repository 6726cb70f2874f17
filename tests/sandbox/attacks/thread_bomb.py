# Starts threads until it may not. limits: processes=40
import threading
import time

count = 0
try:
    while count < 1000:
        threading.Thread(target=time.sleep, args=(30,), daemon=True).start()
        count += 1
except RuntimeError:
    pass
if count > 40:
    breach(count)
end()
os._exit(0)
