# session: a value whose text and picture raise, loop and exit.
class Hostile(Exception):
    def __repr__(self):
        raise self

    __str__ = __repr__

    def _repr_png_(self):
        raise SystemExit("leaving")


raise Hostile
