# session: answers with more text, images and traceback than anybody would keep.
class Large:
    def _repr_png_(self):
        return b"\x89PNG\r\n\x1a\n" + bytes(50 << 20)

    def __repr__(self):
        return "x" * (50 << 20)


Large()
