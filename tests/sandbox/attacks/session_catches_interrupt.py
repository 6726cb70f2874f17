# session: catches its interruption and goes on. timeout: 0.5
import time

while True:
    try:
        time.sleep(60)
    except BaseException:
        pass
