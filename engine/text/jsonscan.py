"""A JSON object read one character at a time, far enough to know where its top-level values begin and end."""

from __future__ import annotations

from enum import Enum, auto

MAX_DEPTH = 64
_SPACE = " \t\r\n"
_BARE = frozenset("0123456789+-.eEtrufalsn")  # numbers and literals; whether they are spelt right is judged at the end


class ScanError(ValueError):
    """This character cannot stand here in JSON."""


class Where(Enum):
    BEFORE = auto()  # the object has not begun
    KEY = auto()  # a key, or the end of the object, comes next
    COLON = auto()
    VALUE = auto()  # a top-level value comes next
    IN_VALUE = auto()
    AFTER_VALUE = auto()
    DONE = auto()


class ObjectScanner:
    """Feeds on the characters of one object.

    ``raw`` is what was read, from the opening brace; ``key`` the present top-level key (as written, without quotes);
    ``value_start`` and ``value_end`` the slice of ``raw`` that holds its value, ``value_end`` None while it goes on.
    It finds what cannot be JSON early, not always: a complete object is still to be judged by a parser.
    """

    def __init__(self) -> None:
        self._parts: list[str] = []
        self.size = 0
        self.where = Where.BEFORE
        self.key = ""
        self.value_start = 0
        self.value_end: int | None = None
        self._depth = 0
        self._in_string = False
        self._escaped = False
        self._key_start = 0

    @property
    def raw(self) -> str:
        if len(self._parts) > 1:
            self._parts = ["".join(self._parts)]
        return self._parts[0] if self._parts else ""

    def push(self, char: str) -> bool:
        """Take one character; true when a top-level value, or the object, has just ended.

        Raises:
            ScanError: it cannot stand here. It was not taken.
        """
        ended = self._string(char) if self._in_string else self._outside(char)
        if self.where is not Where.BEFORE:
            self._parts.append(char)
            self.size += 1
        return ended

    def _string(self, char: str) -> bool:
        if char < " ":
            raise ScanError("a control character in a string")
        if self._escaped:
            self._escaped = False
        elif char == "\\":
            self._escaped = True
        elif char == '"':
            self._in_string = False
            if self._depth == 1:
                return self._end_value(self.size + 1) if self.where is Where.IN_VALUE else self._end_key()
        return False

    def _outside(self, char: str) -> bool:
        if char in _SPACE:
            # A bare value ends at white space, which stays outside of it.
            return self._end_value(self.size) if self._bare() else False
        match self.where:
            case Where.BEFORE:
                if char != "{":
                    raise ScanError("no JSON object")
                self.where, self._depth = Where.KEY, 1
            case Where.KEY if char == '"':
                self._in_string, self._key_start = True, self.size + 1
            case Where.KEY if char == "}":
                self.where, self._depth = Where.DONE, 0
                return True
            case Where.COLON if char == ":":
                self.where = Where.VALUE
            case Where.VALUE:
                self.where, self.value_start, self.value_end = Where.IN_VALUE, self.size, None
                self._inside_value(char)
            case Where.IN_VALUE if self._depth == 1 and char in ",}":
                self._end_value(self.size)
                self._after_value(char)
                return True
            case Where.IN_VALUE:
                return self._inside_value(char)
            case Where.AFTER_VALUE:
                return self._after_value(char)
            case _:
                raise ScanError(f"{char!r} where a {self.where.name.lower()} was due")
        return False

    def _bare(self) -> bool:
        return self.where is Where.IN_VALUE and self._depth == 1

    def _after_value(self, char: str) -> bool:
        if char == ",":
            self.where = Where.KEY
        elif char == "}":
            self.where, self._depth = Where.DONE, 0
            return True
        else:
            raise ScanError(f"{char!r} after a value")
        return False

    def _inside_value(self, char: str) -> bool:
        if char == '"':
            self._in_string = True
        elif char in "{[":
            self._depth += 1
            if self._depth > MAX_DEPTH:
                raise ScanError(f"more than {MAX_DEPTH} levels")
        elif char in "}]":
            self._depth -= 1
            if self._depth < 1:
                raise ScanError(f"{char!r} where a value was due")
            if self._depth == 1:
                return self._end_value(self.size + 1)
        elif char in ",:":
            if self._depth == 1:
                raise ScanError(f"{char!r} where a value was due")
        elif char not in _BARE:
            raise ScanError(f"{char!r} outside a string")
        return False

    def _end_key(self) -> bool:
        self.key = self.raw[self._key_start :]
        self.where = Where.COLON
        return False

    def _end_value(self, end: int) -> bool:
        self.value_end = end
        self.where = Where.AFTER_VALUE
        return True
